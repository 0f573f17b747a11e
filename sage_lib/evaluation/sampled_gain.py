"""log rho of guides, from samples of the base alone: nothing is trained.

At the optimum of eq. 4 a guide adds log rho to the log-odds of a right completion, for every beta
(theory.optimum).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import t

from sage_lib.algorithm.guides import BranchGuide, Guide, GuideInputs, RandomGuide, TokenGuide
from sage_lib.errors import SageError
from sage_lib.evaluation.evaluate import count_correct
from sage_lib.experiment import problems
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.policy import loading
from sage_lib.policy.sampling import collect
from sage_lib.policy.scoring import signals
from sage_lib.tasks.verifier import Verifier
from sage_lib.theory.optimum import guide_gain, success

#: Two more branch guides: quantiles of the entropies at which q exceeds 1, and reaches 1.4.
QUANTILES = {"Branch, 90 % to 99.9 %": (0.9, 0.999), "Branch, 80 % to 90 %": (0.8, 0.9)}
COLUMNS = ["guide", "log rho", "low", "high", "helps", "problems", "acted", "of the reward"]
COLUMNS += ["pass@1", "needed", "if shuffled"]
#: Permutations of the q of each problem's samples, over which "if shuffled" is a mean.
SHUFFLES = 1000
NO_OPTIMUM = "beta must be positive, not {}: without a KL term there is no optimum"


def scored_samples(profile: Profile, run: Run) -> pd.DataFrame:
    """Return the samples of a base's evaluation with the entropies of their tokens.

    A row is a sample, with the columns problem, right (0 or 1), entropies and logps. The last two
    are arrays of shape (tokens,), nats, of the base. Data sets marked ``ood`` are left out, as in
    all averages.
    """
    assert run.policy is not None
    sampled = problems.sampled_problems(profile)
    rows = collect(sorted(run.build.glob("samples*.jsonl")), sampled, profile.evaluation.samples)
    verifier = Verifier(workers=profile.compute.threads)
    count_correct(sampled, rows, verifier, profile.model.boxed)
    model, tokenizer = loading.load(profile, run.policy.model)
    table = []
    in_average = {problem.dataset for problem in problems.sampled_problems(profile, ood=False)}
    for problem, row in zip(sampled, rows, strict=True):
        if problem.dataset not in in_average:
            continue
        prompt = loading.encode(tokenizer, problem.question)
        pairs = zip(row["ids"], row["finished"], strict=True)
        bodies = [[*ids, tokenizer.eos_token_id] if done else ids for ids, done in pairs]
        scored = signals(model, model, prompt, bodies, tokenizer.pad_token_id, branching=False)
        for right, sample in zip(row["correct"], scored, strict=True):
            name = f"{problem.dataset}/{problem.id}"
            table.append((name, float(right), sample.entropy, sample.base_log_pi))
    return pd.DataFrame(table, columns=["problem", "right", "entropies", "logps"])


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


def apply_guides(samples: pd.DataFrame, guides: Mapping[str, Guide], seed: int = 0) -> pd.DataFrame:
    """Compute q of each guide on each sample.

    Args:
        samples: of :func:`scored_samples`.
        guides: by name.
        seed: of the guides that draw.

    Returns:
        A row for each sample: problem, right and tokens (how many). Each guide adds two columns:
        under its name log q(y), the sum over tokens of log q_t, and as "NAME acted" the number of
        tokens with q other than 1.
    """
    table = samples[["problem", "right"]].assign(tokens=samples["logps"].map(len))
    for name, guide in guides.items():
        generator = torch.Generator().manual_seed(seed)
        of_token = [
            q_of(guide, entropies, logps, generator)
            for entropies, logps in zip(samples["entropies"], samples["logps"], strict=True)
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
    - needed: the number of samples, equally many of each problem, for an interval of +- precision.
    - if shuffled: log rho with q dealt at random among the samples of a problem.

    Args:
        q_table: of :func:`apply_guides`.
        beta: of the KL term.
        precision: of "needed".
    """
    if not beta > 0:
        raise SageError(NO_OPTIMUM.format(beta))
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


def q_of(guide: Guide, entropies: Any, logps: Any, generator: torch.Generator) -> np.ndarray:
    """Return q of each token of a completion at the start of a run, shape (tokens,).

    Args:
        guide: computes q.
        entropies: before each token, nats, shape (tokens,).
        logps: log-probability of each token, shape (tokens,).
        generator: of a guide that draws.
    """
    state, drawn = (torch.as_tensor(x, dtype=torch.float64)[None] for x in (entropies, logps))
    mask = torch.ones_like(drawn)
    ids = torch.zeros_like(drawn, dtype=torch.long)
    q: np.ndarray = guide(GuideInputs(state, drawn, mask, 0.0, generator, ids))[0].numpy()
    return q
