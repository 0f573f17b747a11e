"""What the guides do to real completions, token by token: Figure 1 from a trained policy instead of
a drawing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.algorithm.guides import GuideInputs
from sage_lib.algorithm.token_probabilities import (
    completion_logits_and_hidden,
    drawn_log_probabilities,
    entropies_of,
    log_probabilities,
)
from sage_lib.errors import SageError
from sage_lib.evaluation import token_impact
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, write_json, write_text
from sage_lib.policy import loading, token_signals
from sage_lib.policy.sampling import rollouts, sample_seed
from sage_lib.tasks.judging import judge
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.tasks.verifier import Verifier

#: Completions of each traced problem: a group, as the profiles' RL has it.
COMPLETIONS = 8
#: The thresholds of Table 6, nats.
THRESHOLDS = (0.8, 1.2, 2.0)


@dataclass
class Group:
    """The completions of one problem: tensors of shape (completions, time) and texts."""

    problem: Problem
    prompt: list[int]
    drawn: torch.Tensor  # token ids
    mask: torch.Tensor  # True up to and with the end token
    logps: torch.Tensor  # log pi of the drawn tokens
    reference_logps: torch.Tensor
    entropies: torch.Tensor  # of pi, nats
    kept_mass: np.ndarray  # of every token within the mask: what min-p sampling leaves
    gradients: np.ndarray  # of every token within the mask: G_t
    texts: list[str]
    correct: list[bool]


@dataclass
class Totals:
    """What is gathered over all completions, a part per problem."""

    entropies: list[np.ndarray] = field(default_factory=list)
    surprisals: list[np.ndarray] = field(default_factory=list)
    kept_mass: list[np.ndarray] = field(default_factory=list)
    gradients: list[np.ndarray] = field(default_factory=list)
    impacts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, group: Group) -> None:
        self.entropies.append(group.entropies[group.mask].cpu().numpy())
        self.surprisals.append(-group.logps[group.mask].cpu().numpy())
        self.kept_mass.append(group.kept_mass)
        self.gradients.append(group.gradients)


@torch.no_grad()
def measure(profile: Profile, run: Run) -> dict:
    """Trace completions of the reference method's policy; returns the run record.

    Writes traces.json, one completion as {"problem", "answer", "correct", "method", "progress",
    "tokens": [a row per token]}, for countdown also "valid" as the step checker says, with text,
    pi, pi_ref (probabilities of the drawn token), entropy (of pi, nats), surprisal (-log pi, nats)
    and q of each guide at the start of a run; signals.json: entropy and surprisal over all
    completions as ``token_signals.summary`` has them, the share of tokens "above" each threshold of
    Table 6 and above the branch guide's own, and the "kept_mass" that min-p sampling leaves;
    updates.csv and impact.csv (:mod:`token_impact`)."""
    policy = run.policy
    if policy is None or not policy.done():
        raise SageError(
            f"the traces are of the policy {policy.name if policy else '-'}, which is not there: "
            "run notebook 21 or sage-companion stage rl first"
        )
    for name in runs.TRACED:
        runs.require_entropies(profile, profile.guide_choice(name))
    seed = profile.seeds[0] if run.seed is None else run.seed
    record = Record("trace", profile.name, run.fingerprint, seed, _settings(profile, run))
    model, tokenizer = loading.load(profile, policy.model)
    reference, _ = loading.load(profile, runs.sft_run(profile).model)
    guides = {name: runs.guide_of(profile, profile.guide_choice(name)) for name in runs.TRACED}
    run.samples.unlink(missing_ok=True)
    verifier = Verifier(workers=profile.compute.threads)
    generator = torch.Generator().manual_seed(seed)
    totals = Totals()
    shown: tuple[tuple[bool, bool, float], dict[str, Any]] | None = None
    asked = problems.sampled_problems(profile, ood=False)[: profile.evaluation.traced]
    for number, problem in enumerate(asked):
        group = _draw(profile, model, reference, tokenizer, problem, seed, verifier)
        inputs = GuideInputs(
            entropies=group.entropies,
            logps=group.logps,
            mask=group.mask,
            progress=0.0,
            generator=generator,
            ids=group.drawn,
        )
        q = {name: guide(inputs) for name, guide in guides.items()}
        totals.add(group)
        if number % 2 == 0:
            totals.impacts += token_impact.impacts(
                model,
                tokenizer,
                profile.rl,
                problem,
                group.prompt,
                group.drawn[0][group.mask[0]].tolist(),
                group.entropies[0][group.mask[0]].tolist(),
                seed,
                verifier,
            )
        for row, (text, correct) in enumerate(zip(group.texts, group.correct, strict=True)):
            tokens = _token_rows(group, q, row, tokenizer)
            kept = {"problem": problem.id, "text": text, "correct": correct, "tokens": tokens}
            append_line(run.samples, kept)
            # Shown is the completion with the most uncertain state, among those whose work the
            # step checker calls valid where the task has one, else among the correct ones.
            measures = task_of(problem.task).measures(problem, text, correct)
            sound = measures.get("valid", correct)
            rank = (sound, correct, max(token["entropy"] for token in tokens))
            if shown is None or rank > shown[0]:
                trace = {"problem": problem.question, "answer": text, "correct": correct}
                trace |= {key: measures[key] for key in ("valid",) if key in measures}
                trace |= {"method": run.method, "progress": 0.0, "tokens": tokens}
                shown = rank, trace
    if shown is None:
        raise SageError(f"profile {profile.name} has no problems to trace: add evaluation data")
    write_json(run.measured / "traces.json", shown[1])
    _write(profile, run, totals, guides["branch"])
    return run.finish(record, policy=policy.name, completions=len(asked) * COMPLETIONS)


def _settings(profile: Profile, run: Run) -> dict[str, Any]:
    return {
        "method": run.method,
        "problems": profile.evaluation.traced,
        "completions": COMPLETIONS,
        "continuations": token_impact.CONTINUATIONS,
    }


def _draw(
    profile: Profile,
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problem: Problem,
    seed: int,
    verifier: Verifier,
) -> Group:
    """Completions of one problem as RL samples them, judged and scored."""
    stream = sample_seed(seed, problem, 0)
    out, start, mask = rollouts(model, tokenizer, problem, COMPLETIONS, profile.rl, stream)
    drawn, mask = out[:, start:], mask.bool()
    texts = [
        tokenizer.decode(ids[kept], skip_special_tokens=True)
        for ids, kept in zip(drawn, mask, strict=True)
    ]
    correct = judge([problem] * len(texts), texts, verifier)
    # One completion at a time: with a large vocabulary a whole group's distributions would fill a
    # GPU.
    read = [
        _signals(model, reference, out[row : row + 1], start, mask[row], alpha, profile.rl)
        for row, alpha in enumerate(_advantages(correct))
    ]
    logps, reference_logps, entropy, kept_mass, gradients = zip(*read, strict=True)
    return Group(
        problem=problem,
        prompt=out[0, :start].tolist(),
        drawn=drawn,
        mask=mask,
        logps=torch.stack(logps),
        reference_logps=torch.stack(reference_logps),
        entropies=torch.stack(entropy),
        kept_mass=np.concatenate(kept_mass),
        gradients=np.concatenate(gradients),
        texts=texts,
        correct=correct,
    )


def _advantages(correct: Sequence[bool]) -> np.ndarray:
    """GRPO's advantages of one group; on the policy that drew it they are the weight alpha_t of
    every token (eq. 4 of the exploration report)."""
    rewards = np.asarray(correct, dtype=np.float64)
    advantages: np.ndarray = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    return advantages


def _signals(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    out: torch.Tensor,
    start: int,
    mask: torch.Tensor,
    alpha: float,
    settings: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
    """Of one completion, ``out`` of shape (1, prompt and time): log pi and log pi_ref of its tokens
    and the entropies, shape (time,), and of the tokens within ``mask`` the kept mass and G_t at the
    weight ``alpha``."""
    drawn, temperature = out[0, start:], settings["temperature"]
    logits, hidden = completion_logits_and_hidden(model, out, start)
    log_pi = log_probabilities(logits, temperature)[0]
    reference_logits, _ = completion_logits_and_hidden(reference, out, start)
    log_reference = log_probabilities(reference_logits, temperature)[0]
    gradients = token_signals.gradient_norm(
        np.full(int(mask.sum()), alpha),
        log_pi[mask].cpu().numpy(),
        drawn[mask].cpu().numpy(),
        hidden[0][mask].cpu().numpy(),
    )
    kept = token_signals.kept_mass(log_pi[mask], settings["min_p"] or 0.0).cpu().numpy()
    logps, reference_logps = (drawn_log_probabilities(x, drawn) for x in (log_pi, log_reference))
    return logps, reference_logps, entropies_of(log_pi), kept, gradients


def _token_rows(
    group: Group, q: dict[str, torch.Tensor], row: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """A row per token of one completion of the group, as traces.json has them."""
    rows = []
    for t in torch.nonzero(group.mask[row]).flatten().tolist():
        token = {
            "text": tokenizer.decode([int(group.drawn[row, t])]),
            "pi": float(group.logps[row, t].exp()),
            "pi_ref": float(group.reference_logps[row, t].exp()),
            "entropy": float(group.entropies[row, t]),
            "surprisal": -float(group.logps[row, t]),
        }
        rows.append({**token, **{name: float(values[row, t]) for name, values in q.items()}})
    return rows


def _write(profile: Profile, run: Run, totals: Totals, branch: Any) -> None:
    """signals.json, updates.csv and impact.csv."""
    entropy, kept = np.concatenate(totals.entropies), np.concatenate(totals.kept_mass)
    updates = token_impact.updates(entropy, np.concatenate(totals.gradients))
    for name, table in (("updates", updates), ("impact", pd.DataFrame(totals.impacts))):
        write_text(run.measured / f"{name}.csv", table.to_csv(index=False, float_format="%.6g"))
    thresholds = (*THRESHOLDS, branch.threshold)
    signals = {
        "entropy": token_signals.summary(entropy),
        "surprisal": token_signals.summary(np.concatenate(totals.surprisals)),
        "above": {str(t): float((entropy > t).mean()) for t in thresholds},
        "min_p": profile.rl["min_p"],
        "kept_mass": {"mean": float(np.mean(kept)), "lowest": float(np.min(kept))},
        "branch": {"threshold": branch.threshold, "ratio": branch.ratio},
    }
    write_json(run.measured / "signals.json", signals)
