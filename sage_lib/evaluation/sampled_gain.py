"""What guides would do to the optimum of eq. 4, from samples of the base alone: nothing is trained.

By theory.optimum a guide adds log rho to the log-odds of a right completion, for every beta.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import t

from sage_lib.algorithm.guides import BranchGuide, Guide, GuideInputs, RandomGuide, TokenGuide
from sage_lib.errors import SageError
from sage_lib.evaluation.evaluate import judged
from sage_lib.experiment import problems
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.policy import loading
from sage_lib.policy.sampling import collect
from sage_lib.policy.scoring import signals
from sage_lib.tasks.verifier import Verifier
from sage_lib.theory.optimum import guide_gain, success

#: Shares of the samples' own tokens at which two more branch guides begin to act, and reach 1.4.
QUANTILES = {"Branch, 90 % to 99.9 %": (0.9, 0.999), "Branch, 80 % to 90 %": (0.8, 0.9)}
COLUMNS = ["guide", "log rho", "low", "high", "helps", "problems", "acted", "of the reward"]
COLUMNS += ["pass@1", "needed", "if shuffled"]
#: How often the right samples of each problem are dealt anew for "if shuffled".
SHUFFLES = 1000
NO_OPTIMUM = "beta must be positive, not {}: without a KL term there is no optimum"


def scored_samples(profile: Profile, run: Run) -> pd.DataFrame:
    """The samples of a base's evaluation: a row each, with the columns problem, right (0 or 1), and
    entropies, logps (arrays of shape (tokens,), nats, of the base). Data sets marked ``ood`` are
    left out, as in every average."""
    assert run.policy is not None
    asked = problems.sampled_problems(profile)
    rows = collect(sorted(run.build.glob("samples*.jsonl")), asked, profile.evaluation.samples)
    judged(asked, rows, Verifier(workers=profile.compute.threads))
    model, tokenizer = loading.load(profile, run.policy.model)
    found = []
    kept = {problem.dataset for problem in problems.sampled_problems(profile, ood=False)}
    for problem, row in zip(asked, rows, strict=True):
        if problem.dataset not in kept:
            continue
        prompt = loading.encode(tokenizer, problem.question)
        drawn = zip(row["ids"], row["finished"], strict=True)
        bodies = [[*ids, tokenizer.eos_token_id] if done else ids for ids, done in drawn]
        scored = signals(model, model, prompt, bodies, tokenizer.pad_token_id, branching=False)
        for right, one in zip(row["correct"], scored, strict=True):
            name = f"{problem.dataset}/{problem.id}"
            found.append((name, float(right), one.entropy, one.base_log_pi))
    return pd.DataFrame(found, columns=["problem", "right", "entropies", "logps"])


def candidate_guides(drawn: pd.DataFrame) -> dict[str, Guide]:
    """The paper's guides, and branch guides whose thresholds are quantiles of these samples."""
    found: dict[str, Guide] = {"Random": RandomGuide(), "Token": TokenGuide()}
    found["Branch, 1.2 nats"] = BranchGuide()
    tokens = np.concatenate(drawn["entropies"].tolist())
    for name, shares in QUANTILES.items():
        low, high = np.quantile(tokens, shares)
        if high > low:
            found[name] = BranchGuide(threshold=float(low), ratio=float(0.4 / (high - low)))
    return found


def apply_guides(drawn: pd.DataFrame, guides: Mapping[str, Guide], seed: int = 0) -> pd.DataFrame:
    """Rows of :func:`scored_samples` with what each guide says of them: the columns problem, right
    and tokens (how many), and of each guide by its name log q(y), the sum over tokens of log q_t,
    and as "NAME acted" the number of tokens with q other than 1."""
    found = drawn[["problem", "right"]].assign(tokens=drawn["logps"].map(len))
    for name, guide in guides.items():
        generator = torch.Generator().manual_seed(seed)
        of_token = [
            q_of(guide, entropies, logps, generator)
            for entropies, logps in zip(drawn["entropies"], drawn["logps"], strict=True)
        ]
        found[name] = [np.log(q).sum() for q in of_token]
        found[f"{name} acted"] = [(q != 1).sum() for q in of_token]
    return found


def gain_table(found: pd.DataFrame, beta: float, precision: float = 0.05) -> pd.DataFrame:
    """What each guide does: columns COLUMNS, from rows of :func:`apply_guides`.

    log rho is a mean over problems with right and wrong samples, how many `problems` says; low and
    high are its 95 % interval over problems, whose spread holds that of the samples. helps: the
    share of problems with log rho above 0. acted: of tokens with q other than 1. of the reward:
    log rho over 1/beta, what the reward adds. pass@1: what the guide adds to the optimum's, a mean
    over these problems. needed: samples, as many of each problem, for an interval of +- precision.
    """
    if not beta > 0:
        raise SageError(NO_OPTIMUM.format(beta))
    base = found.groupby("problem", sort=False)["right"].mean()
    rows = []
    for name in [column for column in found if f"{column} acted" in found]:
        gains = guide_gain(found["right"], found[name], list(found["problem"]))
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
        needed = int(np.ceil(len(found) * (half / precision) ** 2))
        bounds = (mean, mean - half, mean + half, (rho > 0).mean(), len(rho))
        acted = found[f"{name} acted"].sum() / found["tokens"].sum()
        rows.append((name, *bounds, acted, mean * beta, added, needed, _if_shuffled(found, name)))
    return pd.DataFrame(rows, columns=COLUMNS)


def _if_shuffled(found: pd.DataFrame, name: str) -> float:
    rng, means = np.random.default_rng(0), []
    for _, of in found.groupby("problem", sort=False):
        right = int(of["right"].sum())
        if 0 < right < len(of):
            q = np.exp(of[name] - of[name].max()).to_numpy()
            dealt = rng.permuted(np.tile(q, (SHUFFLES, 1)), axis=1)
            means.append(np.log(dealt[:, :right].mean(1) / dealt[:, right:].mean(1)).mean())
    return float(np.mean(means))


def q_of(guide: Guide, entropies: Any, logps: Any, generator: torch.Generator) -> np.ndarray:
    """q of each token of one completion, shape (tokens,), as at the start of a run."""
    state, drawn = (torch.as_tensor(one, dtype=torch.float64)[None] for one in (entropies, logps))
    mask = torch.ones_like(drawn)
    ids = torch.zeros_like(drawn, dtype=torch.long)
    found: np.ndarray = guide(GuideInputs(state, drawn, mask, 0.0, generator, ids))[0].numpy()
    return found
