"""A confidence band of a difference over all values of k at once."""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, stdtr

from sage_lib.evaluation import metrics
from sage_lib.evaluation.metrics import Array

#: Simulated errors at a time.
BATCH = 500


def simultaneous_band(
    a: ArrayLike, b: ArrayLike, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> tuple[Array, Array, float]:
    """A band that holds the true difference in all columns at once.

    It consists of the intervals of :func:`metrics.paired_difference`, at a higher level that is
    the same for all columns. That level is such that normal errors, correlated between columns as
    those of these data, leave no interval in a share ``level`` of cases: a sup-t band (Montiel Olea
    and Plagborg-Moller 2019, J. Appl. Econometrics 34, 1-17). With several seeds it is the higher
    one of this level and that of a parametric bootstrap (:func:`_bootstrap_level`). Three seeds
    that lie far apart still tell little: then the band holds in about 91 % of cases, not in 95 %.

    Returns (low, high), each of shape (columns,), and the level of each interval. A column in which
    all differences are the same tells nothing: its bounds are -1 and 1, as a difference of shares
    has. Shapes and errors as of :func:`metrics.paired_difference`.
    """
    difference = metrics.differences(a, b)
    varies = np.ptp(difference, axis=(0, 1)) > 1e-12
    of_each = level
    if varies.any() and difference.shape[1] > 1:
        rng = np.random.default_rng(seed)
        of_each = _normal_level(difference[..., varies], level, draws, rng)
        if len(difference) > 1:
            again = _bootstrap_level(difference[..., varies], level, draws, rng)
            of_each = max(of_each, again)
    _, low, high = metrics.paired_difference(a, b, level=of_each)
    return np.where(np.isnan(low), -1.0, low), np.where(np.isnan(high), 1.0, high), of_each


def _normal_level(difference: Array, level: float, draws: int, rng: np.random.Generator) -> float:
    """The level of normal errors whose correlations are those of the means of problems and of the
    means of seeds, added."""
    parts = [
        (means - means.mean(axis=0)) / np.sqrt(max(len(means) * (len(means) - 1), 1))
        for means in (difference.mean(axis=0), difference.mean(axis=1))
    ]
    errors = np.concatenate(parts)  # errors' transpose times errors: covariances of the mean
    spread = np.sqrt((errors**2).sum(axis=0))
    kept = spread > 0
    if not kept.any():
        return level
    root = np.linalg.qr(errors[:, kept] / spread[kept], mode="r")  # the same in fewer rows
    sizes = [min(BATCH, draws - start) for start in range(0, draws, BATCH)]
    largest = [np.abs(rng.standard_normal((size, len(root))) @ root).max(axis=1) for size in sizes]
    return float(2 * ndtr(np.quantile(np.concatenate(largest), level)) - 1)


def _bootstrap_level(
    difference: Array, level: float, draws: int, rng: np.random.Generator
) -> float:
    """The level at which the intervals of simulated data leave out the truth nowhere.

    It draws errors of problems and of seeds with the covariances of these data. Variances over
    problems are taken as known. Those over seeds are estimated anew in each draw, for few seeds
    tell little of them. Both are those of :func:`metrics.paired_difference`.
    """
    seeds, problems, _ = difference.shape
    of_problems = difference.mean(axis=0)
    centred = of_problems - of_problems.mean(axis=0)
    variance = of_problems.var(axis=0, ddof=1) / problems
    of_seeds = difference.mean(axis=1)
    rest = difference - of_seeds[:, None] - of_problems + of_problems.mean(axis=0)
    freedom = (seeds - 1) * (problems - 1)
    noise = (rest**2).sum(axis=(0, 1)) / freedom / (seeds * problems)
    own = np.maximum(variance - noise, 0)
    spread = np.sqrt((centred**2).sum(axis=0))
    scaled = np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 0)
    root = np.linalg.qr(scaled * np.sqrt(own), mode="r")  # the same covariances in fewer rows
    doubt = own**2 / (problems - 1)
    spreads = (of_seeds - of_seeds.mean(axis=0)) / np.sqrt(seeds - 1)
    found = []
    for start in range(0, draws, BATCH):
        size = min(BATCH, draws - start)
        drawn = rng.standard_normal((size, seeds, seeds)) @ spreads
        error = rng.standard_normal((size, len(root))) @ root + drawn.mean(axis=1)
        between = drawn.var(axis=1, ddof=1) / seeds
        total = own + np.maximum(between, noise)
        of_between = np.where(between < noise, noise**2 / freedom, between**2 / (seeds - 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.abs(error) / np.sqrt(total)
            p = 2 * stdtr(total**2 / (doubt + of_between), -t)
        found.append(np.nanmin(np.where(total > 0, p, 1.0), axis=1))
    return float(1 - np.quantile(np.concatenate(found), 1 - level))
