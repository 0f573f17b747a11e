"""log rho of guides (theory.optimum), from samples of the base alone: nothing is trained."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import t

from sage_lib.algorithm.guides import (
    BranchGuide,
    Guide,
    GuideInputs,
    RandomGuide,
    TokenGuide,
    check_q,
)
from sage_lib.errors import SageError
from sage_lib.evaluation.evaluate import count_correct
from sage_lib.evaluation.sample_texts import Sample
from sage_lib.experiment import problems
from sage_lib.experiment.profile import Model, Profile
from sage_lib.experiment.runs import Run
from sage_lib.policy import loading
from sage_lib.policy.sampling import collect, with_end
from sage_lib.policy.scoring import signals
from sage_lib.tasks.verifier import Verifier
from sage_lib.theory.optimum import check_beta, guide_gain, success

#: Two more branch guides: quantiles of the entropies at which q exceeds 1, and reaches 1.4.
QUANTILES = {"Branch, 90 % to 99.9 %": (0.9, 0.999), "Branch, 80 % to 90 %": (0.8, 0.9)}
COLUMNS = ["guide", "log rho", "low", "high", "helps", "problems", "acted", "of the reward"]
COLUMNS += ["pass@1", "needed", "if shuffled"]
#: Says of a gold answer and a completion whether the latter is right.
Judge = Callable[[str, str], bool]
#: Permutations of the q of each problem's samples, over which "if shuffled" is a mean.
SHUFFLES = 1000


def scored_samples(profile: Profile, run: Run, judge: Judge | None = None) -> pd.DataFrame:
    """Return the samples of a base's evaluation with the entropies of their tokens: a row each.

    Columns problem, right (0 or 1), prompt, gold, completion, and arrays of shape (tokens,): ids,
    and of the base entropies and logps, both in nats. Without a judge the tasks say what is right.
    Data sets marked ``ood`` are left out, as in all averages.
    """
    assert run.policy is not None
    sampled = problems.sampled_problems(profile)
    rows = collect(sorted(run.build.glob("samples*.jsonl")), sampled, profile.evaluation.samples)
    verifier = Verifier(workers=profile.compute.threads)
    if judge is None:
        count_correct(sampled, rows, verifier, profile.model.boxed)
    else:
        for problem, row in zip(sampled, rows, strict=True):
            row["correct"] = [judge(problem.gold, text) for text in row["completions"]]
    model, tokenizer = loading.load(profile.model, run.policy.model)
    table = []
    in_average = {problem.dataset for problem in problems.sampled_problems(profile, ood=False)}
    for problem, row in zip(sampled, rows, strict=True):
        if problem.dataset not in in_average:
            continue
        prompt = loading.encode(tokenizer, problem.question)
        bodies = with_end(row, model, tokenizer)
        name = f"{problem.dataset}/{problem.id}"
        samples = [
            Sample(name, problem.question, text, problem.gold, right)
            for text, right in zip(row["completions"], row["correct"], strict=True)
        ]
        table += _scored(model, prompt, bodies, loading.pad_id(tokenizer), samples)
    return pd.DataFrame(table)


def score_texts(name: str, samples: Sequence[Sample], template: str | None = None) -> pd.DataFrame:
    """Return a frame as :func:`scored_samples` does, of samples that a file has.

    A text says neither its tokens nor whether it ended: the model's tokenizer reads it anew, and no
    end token is scored.

    Args:
        name: folder or hub name of the model that scores.
        samples: with their verdicts.
        template: ``prompt`` of the section ``model``. None takes texts as they are, and puts
            conversations into the model's own chat template.
    """
    has_turns = any(not isinstance(sample.prompt, str) for sample in samples)
    chat = template or ("model" if has_turns else "{question}")
    section = Model(name=name, max_seq_length=1, seed=0, prompt=chat)
    model, tokenizer = loading.load(section, name)
    context = getattr(model.config, "max_position_embeddings", None)
    by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(repr((sample.problem, sample.prompt)), []).append(sample)
    table = []
    for of_prompt in by_prompt.values():
        first = of_prompt[0].prompt
        if not isinstance(first, str):
            turns = tokenizer.apply_chat_template(first, add_generation_prompt=True)
            prompt = list(turns["input_ids"] if isinstance(turns, Mapping) else turns)
        elif template is None:
            prompt = tokenizer(first)["input_ids"]
        else:
            prompt = loading.encode(tokenizer, first)
        bodies = [
            tokenizer(sample.completion, add_special_tokens=False)["input_ids"]
            for sample in of_prompt
        ]
        longest = len(prompt) + max(map(len, bodies))
        if context is not None and longest > context:
            raise SageError(
                f"{of_prompt[0].problem}: prompt and completion have {longest} tokens, and the "
                f"model reads {context}: leave this problem out"
            )
        table += _scored(model, prompt, bodies, loading.pad_id(tokenizer), of_prompt)
    return pd.DataFrame(table)


def _scored(
    model: Any, prompt: list[int], bodies: list[list[int]], pad: int, samples: Sequence[Sample]
) -> list[dict[str, Any]]:
    scored = signals(model, model, prompt, bodies, pad, branching=False)
    return [
        {"problem": s.problem, "right": float(bool(s.is_correct)), "prompt": s.prompt}
        | {"gold": s.gold, "completion": s.completion, "ids": ids}
        | {"entropies": x.entropy, "logps": x.base_log_pi}
        for s, ids, x in zip(samples, bodies, scored, strict=True)
    ]


def candidate_guides(samples: pd.DataFrame) -> dict[str, Guide]:
    """Return the paper's guides, and branch guides with these samples' quantiles as thresholds."""
    guides: dict[str, Guide] = {"Random": RandomGuide(), "Token": TokenGuide()}
    guides["Branch, 1.2 nats"] = BranchGuide()
    tokens = np.concatenate(samples["entropies"].tolist())
    for name, shares in QUANTILES.items():
        low, high = np.quantile(tokens, shares)
        if high > low:
            guides[name] = BranchGuide(threshold=float(low), ratio=float(0.4 / (high - low)))
    return guides


def apply_guides(samples: pd.DataFrame, guides: Mapping[str, Guide]) -> pd.DataFrame:
    """Compute q of each guide on each of :func:`scored_samples`: a row each.

    Columns problem, right and tokens (how many). Each guide adds two columns: under its name log
    q(y), the sum over tokens of log q_t, and as "NAME acted" the number of tokens with q other than
    1.
    """
    table = samples[["problem", "right"]].assign(tokens=samples["logps"].map(len))
    columns = [samples[name] for name in ("entropies", "logps", "ids")]
    for name, guide in guides.items():
        generator = torch.Generator().manual_seed(0)
        of_token = [
            q_of(guide, entropies, logps, generator, ids)
            for entropies, logps, ids in zip(*columns, strict=True)
        ]
        table[name] = [np.log(q).sum() for q in of_token]
        table[f"{name} acted"] = [(q != 1).sum() for q in of_token]
    return table


def gain_table(q_table: pd.DataFrame, beta: float, precision: float = 0.05) -> pd.DataFrame:
    """Estimate log rho of each guide: a row each, with the columns COLUMNS.

    - log rho is a mean over the problems with right and wrong samples; their number is "problems".
      low and high bound its 95 % interval over problems, whose spread includes the samples' noise.
    - helps: the share of problems with log rho above 0.
    - acted: the share of tokens with q other than 1.
    - of the reward: log rho over 1/beta, the reward's part of the log-odds.
    - pass@1: the guide's gain in pass@1 of the optimum, a mean over these problems.
    - needed: the number of samples in all for an interval of +- precision, from more problems, each
      with as many samples as now.
    - if shuffled: log rho with q dealt at random among the samples of a problem.

    Args:
        q_table: of :func:`apply_guides`.
        beta: of the KL term.
        precision: of "needed".
    """
    check_beta(beta)
    base = q_table.groupby("problem", sort=False)["right"].mean()
    rows = []
    for name in [column for column in q_table if f"{column} acted" in q_table]:
        gains = guide_gain(q_table["right"], q_table[name], list(q_table["problem"]))
        gains = gains.dropna(subset="log_rho")
        rho = gains["log_rho"].to_numpy()
        if len(rho) < 2:
            raise SageError(
                f"{len(rho)} problems have right and wrong samples, and two or more are needed: "
                "draw more samples, or give problems that the model sometimes solves"
            )
        mean, half = rho.mean(), t.ppf(0.975, len(rho) - 1) * rho.std(ddof=1) / len(rho) ** 0.5
        p = base.loc[gains["problem"]].to_numpy()
        added = (success(p, beta, rho) - success(p, beta)).mean()
        needed = int(np.ceil(len(q_table) * (half / precision) ** 2))
        bounds = (mean, mean - half, mean + half, (rho > 0).mean(), len(rho))
        acted = q_table[f"{name} acted"].sum() / q_table["tokens"].sum()
        rows.append((name, *bounds, acted, mean * beta, added, needed, _if_shuffled(q_table, name)))
    return pd.DataFrame(rows, columns=COLUMNS)


def _if_shuffled(q_table: pd.DataFrame, name: str) -> float:
    rng, means = np.random.default_rng(0), []
    for _, of in q_table.groupby("problem", sort=False):
        right = int(of["right"].sum())
        if 0 < right < len(of):
            q = np.exp(of[name] - of[name].max()).to_numpy()
            dealt = rng.permuted(np.tile(q, (SHUFFLES, 1)), axis=1)
            means.append(np.log(dealt[:, :right].mean(1) / dealt[:, right:].mean(1)).mean())
    return float(np.mean(means))


def q_of(
    guide: Guide, entropies: Any, logps: Any, generator: torch.Generator, ids: Any
) -> np.ndarray:
    """Return q of each token of a completion at the start of a run, shape (tokens,).

    Args:
        guide: computes q.
        entropies: before each token, nats, shape (tokens,).
        logps: log-probability of each token, shape (tokens,).
        generator: of a guide that draws.
        ids: of the tokens, shape (tokens,).
    """
    if len(logps) == 0:  # an empty completion has no quantiles
        return np.ones(0)
    state, drawn = (torch.as_tensor(x, dtype=torch.float64)[None] for x in (entropies, logps))
    mask, tokens = torch.ones_like(drawn), torch.as_tensor(ids, dtype=torch.long)[None]
    inputs = GuideInputs(state, drawn, mask, 0.0, generator, tokens)
    q: np.ndarray = check_q(guide(inputs), inputs)[0].numpy()
    return q
