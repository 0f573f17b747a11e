"""A confidence band of a difference over all values of k at once."""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from sage_lib.evaluation import metrics
from sage_lib.evaluation.metrics import Array


def simultaneous_band(
    a: ArrayLike, b: ArrayLike, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> tuple[Array, Array, float]:
    """A band that holds the true difference in all columns at once.

    It consists of the intervals of :func:`metrics.paired_difference`, at a higher level that is
    the same for all columns. That level is such that normal errors, correlated between columns as
    those of these data, leave no interval in a share ``level`` of cases: a sup-t band (Montiel Olea
    and Plagborg-Moller 2019, J. Appl. Econometrics 34, 1-17). The correlations are those of the
    means of problems and of the means of seeds, added.

    Returns (low, high), each of shape (columns,), and the level of each interval. A column in which
    all differences are the same tells nothing: its bounds are -1 and 1, as a difference of shares
    has. Shapes and errors as of :func:`metrics.paired_difference`.
    """
    difference = metrics.differences(a, b)
    of_problems, of_seeds = difference.mean(axis=0), difference.mean(axis=1)
    parts = [
        (means - means.mean(axis=0)) / np.sqrt(max(len(means) * (len(means) - 1), 1))
        for means in (of_problems, of_seeds)
    ]
    errors = np.concatenate(parts)  # errors' transpose times errors: covariances of the mean
    spread = np.sqrt((errors**2).sum(axis=0))
    errors = errors[:, spread > 0] / spread[spread > 0]
    of_each = level
    if errors.shape[1]:
        root = np.linalg.qr(errors, mode="r")  # has the same covariances in fewer rows
        rng = np.random.default_rng(seed)
        sizes = [min(500, draws - start) for start in range(0, draws, 500)]
        largest = [
            np.abs(rng.standard_normal((size, len(root))) @ root).max(axis=1) for size in sizes
        ]
        of_each = float(2 * ndtr(np.quantile(np.concatenate(largest), level)) - 1)
    _, low, high = metrics.paired_difference(a, b, level=of_each)
    return np.where(np.isnan(low), -1.0, low), np.where(np.isnan(high), 1.0, high), of_each
