"""What a single token is worth: replace it by the runner-up, roll both prefixes out again, compare
(exploration report, eq. 5-6); and how the size of an update follows uncertainty (its eq. 4)."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sage_lib.algorithm.token_probabilities import (
    completion_logits,
    drawn_log_probabilities,
    entropies_of,
    log_probabilities,
)
from sage_lib.errors import SageError
from sage_lib.experiment import problems
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, read_lines, write_text
from sage_lib.policy import loading, token_signals
from sage_lib.policy.sampling import rollouts, sample_seed, warpers
from sage_lib.tasks.judging import judge
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.verifier import Verifier

#: Continuations of a token and of its runner-up, from which the impact of the token is estimated.
CONTINUATIONS = 16


@torch.no_grad()
def impact(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    completion: Sequence[int],
    position: int,
    count: int,
    settings: Mapping[str, Any],
    seed: int,
    judged: Callable[[list[str]], Sequence[bool]],
) -> tuple[float, float]:
    """Accuracy of ``count`` continuations of the token at ``position``, and of as many of its
    runner-up: I_t is their difference.

    Args:
        prompt, completion: token ids; the completion is one that the model drew, with or without
            its end token.
        position: which of the completion's tokens is replaced, 0-based.
        settings: temperature, top_p, top_k, min_p and max_completion_length as GRPOConfig has them;
            the length counts from the start of the completion.
        judged: texts of whole completions -> which are correct.
    """
    before = list(completion[:position])
    prefix = [*prompt, *before]
    ids = torch.tensor([prefix], device=model.device)
    logits = model(input_ids=ids).logits[0, -1:].float().cpu().numpy()
    drawn = completion[position]
    other = int(token_signals.runner_up(logits, np.array([drawn]))[0])
    stops = model.generation_config.eos_token_id or tokenizer.eos_token_id
    ends = stops if isinstance(stops, list) else [stops]
    config = GenerationConfig(
        do_sample=True,
        max_new_tokens=max(settings["max_completion_length"] - position - 1, 1),
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=stops,
    )
    texts = {
        token: [tokenizer.decode([*before, token], skip_special_tokens=True)] * count
        for token in (drawn, other)
    }
    rolled = [token for token in (drawn, other) if token not in ends]
    if rolled:
        torch.manual_seed(seed)
        started = [[*prefix, token] for token in rolled for _ in range(count)]
        ids = torch.tensor(started, device=model.device)
        keys = ("temperature", "top_p", "top_k", "min_p")
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList(warpers(*(settings[key] for key in keys))),
        ).tolist()
        for i, token in enumerate(rolled):
            rows = [row[len(prompt) :] for row in out[i * count : (i + 1) * count]]
            texts[token] = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    kept, replaced = (sum(map(bool, judged(texts[token]))) / count for token in (drawn, other))
    return kept, replaced


def impacts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Mapping[str, Any],
    problem: Problem,
    prompt: list[int],
    completion: list[int],
    entropy: list[float],
    seed: int,
    verifier: Verifier,
) -> list[dict[str, Any]]:
    """The impact of two tokens of one completion: its most uncertain one and another drawn at
    random.

    A row each, with the accuracy of the continuations of the token (``kept``) and of its runner-up
    (``replaced``). ``settings`` as :func:`impact` has them; ``entropy`` (nats) of every token.
    """
    most = int(np.argmax(entropy))
    positions = {"most uncertain": most}
    others = [i for i in range(len(completion)) if i != most]
    if others:
        positions["another"] = random.Random(sample_seed(seed, problem, 0)).choice(others)

    rows = []
    for kind, position in positions.items():
        kept, replaced = impact(
            model,
            tokenizer,
            prompt,
            completion,
            position,
            CONTINUATIONS,
            settings,
            seed,
            partial(_judged, problem, verifier),
        )
        rows.append(
            {
                "dataset": problem.dataset,
                "problem": problem.id,
                "token": kind,
                "position": position,
                "tokens": len(completion),
                "entropy": entropy[position],
                "kept": kept,
                "replaced": replaced,
                "continuations": CONTINUATIONS,
            }
        )
    return rows


#: The part of a completion's tokens that is early, and late (exploration report, Figure 6b), and of
#: the completions that have a low, or a high perplexity (its Figure 5b).
END = 0.2
#: What is kept of each replaced token.
COLUMNS = (
    *("problem", "completion", "perplexity_group", "perplexity", "correct", "token", "position"),
    *("tokens", "entropy", "kept", "replaced", "continuations"),
)


@dataclass(frozen=True)
class Drawn:
    """One completion that a policy drew, and what the policy says of it."""

    problem: Problem
    number: int  # within the problem
    prompt: list[int]
    ids: list[int]  # the end token included
    entropy: list[float]  # nats, before each token
    perplexity: float  # under the policy itself
    correct: bool

    @property
    def name(self) -> str:
        return f"{self.problem.id}/{self.number}"


def _judged(problem: Problem, verifier: Verifier, texts: list[str]) -> list[bool]:
    return judge([problem] * len(texts), texts, verifier)


def chosen_positions(entropy: Sequence[float], stream: random.Random) -> dict[str, int]:
    """Which tokens of a completion are replaced: its most uncertain one, those of its first and of
    its last fifth (rounded up), and one drawn from all as a control."""
    values = np.asarray(entropy)
    end = max(1, int(np.ceil(END * len(values) - 1e-9)))
    return {
        "most uncertain": int(values.argmax()),
        "early": int(values[:end].argmax()),
        "late": len(values) - end + int(values[-end:].argmax()),
        "random": stream.randrange(len(values)),
    }


def perplexity_groups(drawn: Sequence[Drawn], count: int) -> dict[str, list[Drawn]]:
    """Up to ``count`` completions of the lowest and of the highest fifth by perplexity.

    One of each problem in a group, the most extreme, so that completions are independent; of these
    the most extreme problems."""
    ranked = sorted(drawn, key=lambda one: (one.perplexity, one.name))
    end = max(1, int(np.ceil(END * len(ranked) - 1e-9)))
    groups = {}
    for name, members in (("low", ranked[:end]), ("high", ranked[::-1][:end])):
        of_problem: dict[str, Drawn] = {}
        for one in members:
            of_problem.setdefault(one.problem.id, one)
        groups[name] = list(of_problem.values())[:count]
    return groups


def measure(profile: Profile, run: Run) -> dict:
    """Replace tokens in completions of a trained policy, and roll out again; the run record.

    Writes impact.csv, a row for each replaced token (:data:`COLUMNS`): ``kept`` and ``replaced``
    are the accuracies of the continuations of the token and of its runner-up, I_t (eq. 6) is their
    difference. Every row is kept as it is made, and a run that goes on makes the others."""
    policy = run.policy
    if policy is None or not policy.done():
        name = policy.name if policy else "-"
        raise SageError(
            f"the policy {name} is not there: "
            f"sage-companion stage rl --profile {profile.spec} --run {name} makes it"
        )
    explored, seed = profile.exploration, profile.rl["seed"]
    record = Record("impact", profile.name, run.fingerprint, seed, dataclasses.asdict(explored))
    model, tokenizer = loading.load(profile, policy.model)
    verifier = Verifier(workers=profile.compute.threads)
    asked = problems.rl_problems(profile)[: explored.prompts]
    drawn = [
        one
        for problem in asked
        for one in _draw(model, tokenizer, profile, problem, seed, verifier)
    ]
    made = {
        (row["completion"], row["perplexity_group"], row["token"])
        for row in read_lines(run.samples, repair=True)
    }
    for group, members in perplexity_groups(drawn, explored.replaced).items():
        for one in members:
            stream = sample_seed(seed, one.problem, one.number)
            positions = chosen_positions(one.entropy, random.Random(stream))
            for token, position in positions.items():
                if (one.name, group, token) in made:
                    continue
                kept, replaced = impact(
                    model,
                    tokenizer,
                    one.prompt,
                    one.ids,
                    position,
                    explored.continuations,
                    profile.rl,
                    stream + position,
                    partial(_judged, one.problem, verifier),
                )
                values = (
                    *(one.problem.id, one.name, group, one.perplexity, one.correct, token),
                    *(position, len(one.ids), one.entropy[position], kept, replaced),
                    explored.continuations,
                )
                append_line(run.samples, dict(zip(COLUMNS, values, strict=True)))
                append_line(run.live_steps, {"step": len(made) + 1})
                made.add((one.name, group, token))
    table = pd.DataFrame(read_lines(run.samples), columns=COLUMNS)
    write_text(run.measured / "impact.csv", table.to_csv(index=False, float_format="%.6g"))
    return run.finish(record, policy=policy.name, drawn=len(drawn))


@torch.no_grad()
def _draw(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    profile: Profile,
    problem: Problem,
    seed: int,
    verifier: Verifier,
) -> list[Drawn]:
    """Completions of one problem as RL samples them, judged and scored by the policy itself."""
    count, stream = profile.exploration.completions, sample_seed(seed, problem, 0)
    out, start, mask = rollouts(model, tokenizer, problem, count, profile.rl, stream)
    log_pi = log_probabilities(completion_logits(model, out, start), profile.rl["temperature"])
    logps, entropy = drawn_log_probabilities(log_pi, out[:, start:]), entropies_of(log_pi)
    bodies = [ids[kept].tolist() for ids, kept in zip(out[:, start:], mask.bool(), strict=True)]
    texts = [tokenizer.decode(body, skip_special_tokens=True) for body in bodies]
    correct = judge([problem] * count, texts, verifier)
    return [
        Drawn(
            problem=problem,
            number=number,
            prompt=out[0, :start].tolist(),
            ids=body,
            entropy=entropy[number, : len(body)].tolist(),
            perplexity=token_signals.perplexity(logps[number, : len(body)].cpu().numpy()),
            correct=bool(correct[number]),
        )
        for number, body in enumerate(bodies)
    ]


def updates(entropies: np.ndarray, gradients: np.ndarray) -> pd.DataFrame:
    """Size of the update by uncertainty: tokens in ten groups of equal size by entropy, least
    first.

    Args:
        entropies: nats, shape (tokens,).
        gradients: G_t of the exploration report, shape (tokens,).

    Returns:
        Columns group, tokens, entropy (mean, nats), gradient (mean G_t, eq. 4 of the exploration
        report) and share (of the sum of all G_t).
    """
    order = np.argsort(entropies, kind="stable")
    total = max(gradients.sum(), 1e-300)
    rows = []
    for number, part in enumerate(np.array_split(order, 10), 1):
        rows.append(
            {
                "group": number,
                "tokens": len(part),
                "entropy": entropies[part].mean(),
                "gradient": gradients[part].mean(),
                "share": gradients[part].sum() / total,
            }
        )
    return pd.DataFrame(rows)
