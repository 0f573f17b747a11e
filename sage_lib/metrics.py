"""pass@k and its uncertainty, as functions of counts: n samples per problem, c of them correct."""

import numpy as np

from sage_lib.errors import SageError


def pass_at_k(n: np.ndarray, c: np.ndarray, k: int) -> np.ndarray:
    """Unbiased pass@k per problem: 1 - C(n-c, k)/C(n, k) (Chen et al. 2021; exploration report eq. 1).

    Args:
        n: samples per problem, shape (problems,).
        c: correct samples per problem, same shape.
        k: samples a user may draw, without replacement.

    Returns:
        Probabilities, float64 of shape (problems,).

    Raises:
        SageError: where k is below 1 or above some n (the estimator does not exist there), or c is not in 0..n.
    """
    n, c = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    if n.size == 0:
        raise SageError("pass@k needs at least one problem")
    if not (np.equal(np.mod(n, 1), 0).all() and np.equal(np.mod(c, 1), 0).all()) or (c < 0).any() or (c > n).any():
        raise SageError("counts must be whole numbers with 0 <= c <= n: check the samples they come from")
    if k < 1 or k > n.min():
        raise SageError(f"pass@{k} needs at least {max(k, 1)} samples for every problem and some have {n.min()}: draw more, or ask for a smaller k")
    # C(n-c, k)/C(n, k) as a product over the k draws; a factor is 0 as soon as fewer than k samples are wrong.
    draws = np.arange(k)
    remaining = (n - c)[..., None].astype(np.float64) - draws
    return 1.0 - np.prod(np.clip(remaining, 0, None) / (n[..., None] - draws), axis=-1)


def pass_at_k_curve(n: np.ndarray, c: np.ndarray, ks: tuple[int, ...]) -> np.ndarray:
    """pass@k of every problem for every k, shape (problems, len(ks))."""
    return np.stack([pass_at_k(n, c, k) for k in ks], axis=1)


def bootstrap_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means over problems drawn with replacement: shape (resamples, columns) for values of shape (problems, columns).

    The problem is the unit: samples of one problem are not independent of each other.
    """
    values = np.asarray(values, dtype=np.float64)
    problems = values.shape[0]
    weights = np.random.default_rng(seed).multinomial(problems, np.full(problems, 1 / problems), size=resamples)
    return weights @ values.reshape(problems, -1) / problems


def bootstrap_interval(values: np.ndarray, resamples: int, seed: int, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of the mean over problems, by column: (low, high) for values of shape (problems, columns)."""
    tail = (1 - level) / 2
    low, high = np.quantile(bootstrap_means(values, resamples, seed), [tail, 1 - tail], axis=0)
    return low, high


def ratio_interval(counts: np.ndarray, totals: np.ndarray, resamples: int, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of sum(counts)/sum(totals), resampling problems: for shares of samples such as the rare way's."""
    means = bootstrap_means(np.stack([counts, totals], axis=1), resamples, seed)
    tail = (1 - level) / 2
    low, high = np.quantile(means[:, 0] / means[:, 1], [tail, 1 - tail])
    return float(low), float(high)


def paired_difference(a: np.ndarray, b: np.ndarray, resamples: int, seed: int, level: float = 0.95) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of a - b over the same problems with its interval, by column: (mean, low, high)."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise SageError(f"a paired difference needs the same problems on both sides, not shapes {a.shape} and {b.shape}")
    low, high = bootstrap_interval(a - b, resamples, seed, level)
    return (a - b).reshape(len(a), -1).mean(0), low, high


def mean_std(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds (ddof = 1; NaN for a single seed, which has no spread)."""
    values = np.asarray(values, dtype=np.float64)
    return float(values.mean()), float(values.std(ddof=1)) if values.size > 1 else float("nan")
