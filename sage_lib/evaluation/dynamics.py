"""Base against trained policy, token by token on the same completions of RL's prompts: which tokens
lost entropy, which probabilities moved, and where in a completion (exploration report, 3.2)."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.algorithm.token_probabilities import (
    completion_logits,
    drawn_log_probabilities,
    entropies_of,
    log_probabilities,
)
from sage_lib.errors import SageError
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, write_text
from sage_lib.policy import loading, token_groups
from sage_lib.policy.sampling import rollouts, sample_seed
from sage_lib.tasks.judging import judge
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.verifier import Verifier

#: Whose completions: those of the base, and those of the trained policy.
BASE, POLICY = "base", "policy"


@torch.no_grad()
def measure(profile: Profile, run: Run) -> dict:
    """Read completions of the base and of a trained policy under both; returns the run record.

    Writes tokens.csv: :data:`token_groups.GROUPS` by ``source`` (whose completions), where before
    is the base, after the trained policy, and a completion is positive where it is correct; and
    prompts.csv, a row per source and prompt: completions, correct (share of them) and entropy (mean
    over their tokens, nats, of the policy that drew them)."""
    model, base, tokenizer = policies(profile, run)
    seed = profile.rl["seed"]
    explored = profile.exploration
    kept = {"prompts": explored.prompts, "completions": explored.completions}
    record = Record("dynamics", profile.name, run.fingerprint, seed, kept)
    asked = problems.rl_problems(profile)[: explored.prompts]
    verifier = Verifier(workers=profile.compute.threads)
    drawers = {BASE: base, POLICY: model}
    groups, prompts = [], []
    run.live_steps.unlink(missing_ok=True)
    for source, drawer in drawers.items():
        tokens = []
        for number, problem in enumerate(asked):
            first = number * explored.completions
            both = (base, model)
            found = _tokens(profile, drawer, both, tokenizer, problem, seed, verifier, first)
            tokens.append(found)
            own = "before" if source == BASE else "after"
            right = found.groupby("completion")["sign"].first() == "positive"
            numbers = {"completions": len(right), "correct": right.mean()}
            row = {"source": source, "problem": problem.id, **numbers, "entropy": found[own].mean()}
            prompts.append(row)
            append_line(run.live_steps, {"step": len(prompts)})
        groups.append(token_groups.grouped(pd.concat(tokens)).assign(source=source))
    for name, table in (("tokens", pd.concat(groups)), ("prompts", pd.DataFrame(prompts))):
        write_text(run.measured / f"{name}.csv", table.to_csv(index=False, float_format="%.6g"))
    return run.finish(record)


def policies(
    profile: Profile, run: Run
) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
    """The trained policy that a run reads, the base, and their tokenizer."""
    policy = run.policy
    if policy is None or not policy.done():
        name = policy.name if policy else "-"
        raise SageError(
            f"the policy {name} is not there: "
            f"sage-companion stage rl --profile {profile.spec} --run {name} makes it"
        )
    model, tokenizer = loading.load(profile, policy.model)
    base, _ = loading.load(profile, runs.sft_run(profile).model)
    return model, base, tokenizer


def _tokens(
    profile: Profile,
    drawer: PreTrainedModel,
    both: tuple[PreTrainedModel, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    problem: Problem,
    seed: int,
    verifier: Verifier,
    first: int,
) -> pd.DataFrame:
    """Completions of one problem, a row for each token: columns ``token_groups.TOKENS``."""
    count, stream = profile.exploration.completions, sample_seed(seed, problem, 0)
    out, start, mask = rollouts(drawer, tokenizer, problem, count, profile.rl, stream)
    drawn, kept = out[:, start:], mask.bool()
    texts = [
        tokenizer.decode(ids[row], skip_special_tokens=True)
        for ids, row in zip(drawn, kept, strict=True)
    ]
    correct = judge([problem] * count, texts, verifier)
    before, after = (signals(model, out, start, profile.rl) for model in both)
    frames = []
    for number in range(count):
        row = kept[number]
        frame = pd.DataFrame(
            {
                "kind": token_groups.kinds(tokenizer, drawn[number][row].tolist()),
                "before": before["entropy"][number][row].cpu().numpy(),
                "after": after["entropy"][number][row].cpu().numpy(),
                "p_before": before["p"][number][row].cpu().numpy(),
                "p_after": after["p"][number][row].cpu().numpy(),
            }
        )
        sign = "positive" if correct[number] else "negative"
        place = frame.index / len(frame)
        frames.append(frame.assign(completion=first + number, sign=sign, place=place))
    return pd.concat(frames, ignore_index=True)


def signals(
    model: PreTrainedModel, out: torch.Tensor, start: int, settings: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Entropy (nats) before each token of some completions and probability of the drawn one, at the
    temperature of RL; shape (completions, time)."""
    logits = completion_logits(model, out, start)
    log_pi = log_probabilities(logits, settings["temperature"])
    p = drawn_log_probabilities(log_pi, out[:, start:]).exp()
    return {"entropy": entropies_of(log_pi), "p": p}
