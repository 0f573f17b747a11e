"""Effect of a guide on the optimum: a ratio for each problem, measurable without training.

Rewards are 0 or 1. For the optimum of eq. 4, with means over completions drawn from pi_ref,

    odds(right | pi_SAGE) = odds(right | pi_ref) * exp(1/beta) * rho,
    rho = E[q | right] / E[q | wrong].

Proof: sum eq. 4 over the right and over the wrong completions; the normaliser cancels. Division by
a group's standard deviation puts kappa/beta in the place of 1/beta (`losses.kappa`).
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy.special import expit, logsumexp
from scipy.stats import t

from sage_lib.errors import SageError

GAIN = ["problem", "samples", "right", "log_rho", "low", "high"]


def check_beta(beta: float) -> None:
    """Raise SageError unless beta is above 0; NaN is not."""
    if not beta > 0:
        raise SageError(f"beta must be positive, not {beta}: without a KL term there is no optimum")


def log_rho(reference: torch.Tensor, reward: torch.Tensor, guide: torch.Tensor) -> float:
    """Return the log of E[q | right] / E[q | wrong] under the reference, from pi_ref, the reward of
    0 or 1, and q of each completion. SageError where no completion is right, or none wrong."""
    right = reward == 1
    if right.all() or not right.any():
        raise SageError("rho compares right with wrong completions: both must be there")
    q_right, q_wrong = (
        (reference * guide)[outcome].sum() / reference[outcome].sum() for outcome in (right, ~right)
    )
    return float((q_right / q_wrong).log())


def success(reference_success: ArrayLike, beta: float, log_rho: ArrayLike = 0.0) -> np.ndarray:
    """Return the probability of a right completion at the optimum, from that under the reference.

    A :func:`log_rho` of 0 gives eq. 2, another one eq. 4; shapes broadcast. SageError unless
    beta > 0.
    """
    check_beta(beta)
    p = np.asarray(reference_success, dtype=np.float64)
    with np.errstate(divide="ignore"):
        shift = np.log(p) - np.log1p(-p) + 1 / beta + np.asarray(log_rho)
    probability: np.ndarray = expit(shift)
    return probability


def guide_gain(
    rewards: ArrayLike, log_q: ArrayLike, problem: Sequence[object], level: float = 0.95
) -> pd.DataFrame:
    """Estimate log rho of each problem from samples of the base: the amount that a guide adds to
    the log odds of a right completion at the optimum, the same for all beta and k.

    Args:
        rewards: 0 or 1 of each sample, shape (samples,).
        log_q: log q of each sample's completion, the sum over its tokens, shape (samples,).
        problem: of each sample, such as a number or an id.
        level: of the interval.

    Returns:
        Columns GAIN. The interval is Welch's, of the difference of two log means (delta method).
        NaN where a problem has no right or no wrong sample; low, high are NaN with one of either.
    """
    right, logs = np.asarray(rewards, dtype=np.float64), np.asarray(log_q, dtype=np.float64)
    names = pd.Series(list(problem))
    if not right.shape == logs.shape == names.shape:
        raise SageError(
            f"rewards, log_q and problem need one entry a sample each, and have {right.shape}, "
            f"{logs.shape} and {names.shape}"
        )
    if not np.isin(right, (0, 1)).all():
        raise SageError("rho is defined for rewards of 0 and 1: give 1 for right, 0 for wrong")
    rows = []
    for name, group in names.groupby(names, sort=False).groups.items():
        index = np.asarray(group)
        of_right, of_wrong = (logs[index][right[index] == reward] for reward in (1, 0))
        rows.append((name, len(index), len(of_right), *_log_ratio(of_right, of_wrong, level)))
    return pd.DataFrame(rows, columns=GAIN)


def _log_ratio(right: np.ndarray, wrong: np.ndarray, level: float) -> tuple[float, float, float]:
    """Return the log of the ratio of two means of exp, with its interval."""
    if not len(right) or not len(wrong):
        return np.nan, np.nan, np.nan
    means, errors, degrees = [], [], []
    for logs in (right, wrong):
        mean = float(logsumexp(logs) - np.log(len(logs)))
        relative = np.exp(logs - mean)  # q over its mean
        means.append(mean)
        degrees.append(len(logs) - 1)
        errors.append(relative.var(ddof=1) / len(logs) if len(logs) > 1 else np.nan)
    estimate, total = means[0] - means[1], sum(errors)
    if np.isnan(total):
        return estimate, np.nan, np.nan
    if total == 0:
        return estimate, estimate, estimate
    freedom = total**2 / sum(e**2 / d for e, d in zip(errors, degrees, strict=True))
    half = float(t.ppf(0.5 + level / 2, freedom) * np.sqrt(total))
    return estimate, estimate - half, estimate + half


class Prefixes:
    """The tree of listed completions, for quantities of a policy over them at each prefix.

    The token ids and the mask, which is True on tokens, have shape (completions, time).
    """

    def __init__(self, ids: np.ndarray, mask: np.ndarray) -> None:
        self.mask = mask
        #: Number of the prefix before each token and of the one after it, shape of ids.
        self.before, self.after = np.zeros_like(ids), np.zeros_like(ids)
        parents, number = [0], np.zeros(len(ids), dtype=ids.dtype)
        for time in range(ids.shape[1]):
            rows = mask[:, time]
            pairs = np.stack([number[rows], ids[rows, time]], axis=1)
            distinct, index = np.unique(pairs, axis=0, return_inverse=True)
            self.before[rows, time] = number[rows]
            number[rows] = len(parents) + index.ravel()
            self.after[rows, time] = number[rows]
            parents += list(distinct[:, 0])
        self.parents = np.array(parents)

    def entropies(self, policy: np.ndarray) -> np.ndarray:
        """Return the entropy (nats, eq. 12) of a policy before each token, shape of ids."""
        mass = np.zeros(len(self.parents))
        mass[0] = policy.sum()
        weights = np.broadcast_to(policy[:, None], self.mask.shape)[self.mask]
        np.add.at(mass, self.after[self.mask], weights)
        share = mass[1:] / np.maximum(mass[self.parents[1:]], np.finfo(float).tiny)
        of_edge = -share * np.log(np.where(share > 0, share, 1))
        entropies = np.bincount(self.parents[1:], of_edge, minlength=len(mass))
        return np.where(self.mask, entropies[self.before], 0.0)
