"""Differences of two curves over k: a confidence band at all k at once, and where curves cross."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, stdtr

from sage_lib.evaluation import metrics
from sage_lib.evaluation.metrics import Array

#: Share of cases in which a band, or an interval, holds.
LEVEL = 0.95
#: Simulated errors at a time.
BATCH = 500


def simultaneous_band(
    a: ArrayLike, b: ArrayLike, draws: int = 10_000, seed: int = 0
) -> tuple[Array, Array, float]:
    """A band that holds the true difference in all columns at once.

    It consists of the intervals of :func:`metrics.paired_difference`, at a higher level that is
    the same for all columns. At that level normal errors, correlated as those of these data, leave
    no interval in 95 % of cases: a sup-t band (Montiel Olea and Plagborg-Moller 2019, J. Appl.
    Econometrics 34, 1-17). With several seeds the level is at least that of a parametric bootstrap
    (:func:`_bootstrap_level`). With three seeds that lie far apart the band holds in about 91 %.

    Returns (low, high), each of shape (columns,), and the level of each interval. A column in which
    all differences are the same tells nothing: its bounds are -1 and 1, as a difference of shares
    has. Shapes and errors as of :func:`metrics.paired_difference`.
    """
    difference = metrics.differences(a, b)
    varies = np.ptp(difference, axis=(0, 1)) > 1e-12
    of_each = LEVEL
    if varies.any() and difference.shape[1] > 1:
        rng = np.random.default_rng(seed)
        # Simulated, so it may come out a little below the level where the columns are alike.
        of_each = max(LEVEL, _normal_level(difference[..., varies], draws, rng))
        if len(difference) > 1:
            of_each = max(of_each, _bootstrap_level(difference[..., varies], draws, rng))
    _, low, high = metrics.paired_difference(a, b, level=of_each)
    return np.where(np.isnan(low), -1.0, low), np.where(np.isnan(high), 1.0, high), of_each


def _normal_level(difference: Array, draws: int, rng: np.random.Generator) -> float:
    """The level of normal errors whose correlations are those of the means of problems and of the
    means of seeds, added."""
    parts = [
        (means - means.mean(axis=0)) / np.sqrt(max(len(means) * (len(means) - 1), 1))
        for means in (difference.mean(axis=0), difference.mean(axis=1))
    ]
    errors = np.concatenate(parts)  # errors' transpose times errors: covariances of the mean
    spread = np.sqrt((errors**2).sum(axis=0))
    varies = spread > 0
    if not varies.any():
        return LEVEL
    root = np.linalg.qr(errors[:, varies] / spread[varies], mode="r")  # the same in fewer rows
    sizes = [min(BATCH, draws - start) for start in range(0, draws, BATCH)]
    largest = [np.abs(rng.standard_normal((size, len(root))) @ root).max(axis=1) for size in sizes]
    return float(2 * ndtr(np.quantile(np.concatenate(largest), LEVEL)) - 1)


def _bootstrap_level(difference: Array, draws: int, rng: np.random.Generator) -> float:
    """The level at which the intervals of simulated data leave out the truth nowhere.

    It draws errors with the covariances of these data. Variances over problems are taken as known.
    Those over seeds are estimated anew in each draw, for few seeds tell little of them.
    """
    seeds, problems, _ = difference.shape
    of_problems = difference.mean(axis=0)
    centred = of_problems - of_problems.mean(axis=0)
    variance = of_problems.var(axis=0, ddof=1) / problems
    of_seeds = difference.mean(axis=1)
    residuals = difference - of_seeds[:, None] - of_problems + of_problems.mean(axis=0)
    freedom = (seeds - 1) * (problems - 1)
    noise = (residuals**2).sum(axis=(0, 1)) / freedom / (seeds * problems)
    of_sampling = np.maximum(variance - noise, 0)
    spread = np.sqrt((centred**2).sum(axis=0))
    scaled = np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 0)
    root = np.linalg.qr(scaled * np.sqrt(of_sampling), mode="r")  # covariances in fewer rows
    doubt = of_sampling**2 / (problems - 1)
    spreads = (of_seeds - of_seeds.mean(axis=0)) / np.sqrt(seeds - 1)
    smallest = []
    for start in range(0, draws, BATCH):
        size = min(BATCH, draws - start)
        drawn = rng.standard_normal((size, seeds, seeds)) @ spreads
        error = rng.standard_normal((size, len(root))) @ root + drawn.mean(axis=1)
        between = drawn.var(axis=1, ddof=1) / seeds
        total = of_sampling + np.maximum(between, noise)
        of_between = np.where(between < noise, noise**2 / freedom, between**2 / (seeds - 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.abs(error) / np.sqrt(total)
            p = 2 * stdtr(total**2 / (doubt + of_between), -t)
        smallest.append(np.nanmin(np.where(total > 0, p, 1.0), axis=1))
    return float(1 - np.quantile(np.concatenate(smallest), 1 - LEVEL))


def crossing_interval(a: ArrayLike, b: ArrayLike, ks: Sequence[int]) -> dict[str, float]:
    """Return the k at which curve b passes curve a for the first time, on a log2 axis of k.

    Args:
        a: pass@k, shape (seeds, problems, len(ks)) or (problems, len(ks)).
        b: shaped as ``a``.
        ks: rising. Between two of them the curves are straight lines.

    Returns:
        ``k`` of the mean curves (NaN where b does not go from at most a to above a); ``low``, the
        last k before it at which b is below a by more than chance; ``high``, the first k after it
        at which b is above a by more than chance (NaN for none); and ``crosses``, whether there
        are both.
    """
    difference = metrics.differences(b, a)
    k = _first_crossing(metrics.mean_over_sets(difference.mean(axis=0)), ks)
    # The intervals are read at each k, and at 16 points for each doubling of k.
    steps = np.ceil(16 * np.diff(np.log2(ks))).astype(int)
    inner = [number + np.arange(step) / step for number, step in enumerate(steps)]
    points = np.concatenate([*inner, [len(ks) - 1.0]])
    numbers = np.arange(len(ks))
    finer = np.apply_along_axis(lambda row: np.interp(points, numbers, row), -1, difference)
    finer_ks = 2 ** np.interp(points, numbers, np.log2(ks))
    _, lows, highs = metrics.paired_difference(finer, np.zeros_like(finer))
    is_below = finer_ks[(highs < 0) & (finer_ks <= k)]  # none where k is NaN
    is_above = finer_ks[(lows > 0) & (finer_ks >= k)]
    return {
        "k": k,
        "low": float(is_below[-1]) if len(is_below) else float("nan"),
        "high": float(is_above[0]) if len(is_above) else float("nan"),
        "crosses": len(is_below) > 0 and len(is_above) > 0,
    }


def _first_crossing(difference: Array, ks: Sequence[int]) -> float:
    """Return the first k at which ``difference`` goes from at most 0 to above 0, or NaN."""
    for i in range(1, len(ks)):
        before, after = difference[i - 1], difference[i]
        if before <= 0 < after:
            share = -before / (after - before)
            return float(2 ** (np.log2(ks[i - 1]) + share * np.log2(ks[i] / ks[i - 1])))
    return float("nan")
