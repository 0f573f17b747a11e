"""The metrics of both papers as pure functions, and the uncertainty of means over problems:
intervals and paired differences.

``values`` are numbers per problem, shape (problems, columns), or (problems,) for a single column; a
column is, for instance, one k of pass@k. ``sets`` names the data set of each problem. The mean is
then over data sets, of their means: the papers' "Avg". ``level`` is the share of cases in which an
interval should contain the true value.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import nctdtrinc, stdtrit  # scipy.stats takes seconds to load

from sage_lib.errors import SageError

Array = NDArray[np.float64]
Sets = Sequence[Hashable] | None


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Array:
    """Estimate pass@k of each problem without bias: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021; exploration report, eq. 2.

    Args:
        n: samples of each problem, shape (problems,), or a number for all.
        c: how many of them are correct, shaped alike.
        k: samples of which at least one is to be correct.

    Returns:
        pass@k, shape (problems,). SageError where k is not a whole number in 1..n, or c not in
        0..n.
    """
    return pass_at_k_curve(n, c, [k])[:, 0]


def pass_at_k_curve(n: ArrayLike, c: ArrayLike, ks: Sequence[int]) -> Array:
    """Return :func:`pass_at_k`, whose arguments it has, for several k: (problems, len(ks))."""
    samples, correct = _checked_counts(n, c, ks)
    sizes = np.asarray(ks, dtype=int)
    # Problems with the same counts have the same curve.
    counts, number = np.unique(np.stack([samples, correct]), axis=1, return_inverse=True)
    drawn_before = np.arange(sizes.max())  # by each of the k draws
    wrong_left = np.clip((counts[0] - counts[1])[:, None] - drawn_before, 0, None)
    all_wrong = np.cumprod(wrong_left / (counts[0][:, None] - drawn_before), axis=-1)
    curves: Array = 1.0 - all_wrong[:, sizes - 1]
    return curves[number.ravel()]


def _checked_counts(n: ArrayLike, c: ArrayLike, ks: Sequence[int]) -> tuple[Array, Array]:
    """Samples and right ones, of one shape. SageError as :func:`pass_at_k`."""
    samples, correct = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    if samples.size == 0:
        raise SageError("pass@k needs at least one problem")
    whole = (np.mod(samples, 1) == 0).all() and (np.mod(correct, 1) == 0).all()
    if not (whole and (correct >= 0).all() and (correct <= samples).all()):
        raise SageError("counts must be whole numbers with 0 <= c <= n")
    if not len(ks):
        raise SageError("pass@k needs at least one k")
    fewest = samples.min()
    for k in ks:
        if k < 1 or k % 1:
            raise SageError(f"pass@k needs a whole k of 1 or more, not {k}")
        if k > fewest:
            raise SageError(
                f"pass@{k} needs {k} samples for every problem and some have {fewest}: "
                "draw more, or ask for a smaller k"
            )
    return samples, correct


# --- the uncertainty of means over problems -------------------------------------------------------


def mean_over_sets(values: ArrayLike, sets: Sets = None) -> Array:
    """Return the mean over problems, or over the means of data sets, shape (columns,)."""
    means = [_columns(part).mean(axis=0) for part in _by_set(values, sets)]
    mean: Array = np.mean(means, axis=0)
    return mean


def bootstrap_interval(
    values: ArrayLike,
    resamples: int,
    seed: int,
    repeats: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Return a 95 % interval of the mean over problems for these policies, by a Bayesian bootstrap.

    Each resample weighs the problems at random, Dirichlet(1, ..., 1). An unseen problem takes part,
    with the value 0 for ``low`` and 1 for ``high``. For shares of right and wrong this is the
    interval of Clopper and Pearson (1934), otherwise that of Learned-Miller and Thomas (arXiv
    1905.06208).

    Args:
        values: numbers per problem, from 0 to 1.
        resamples: how many.
        seed: of the weights.
        repeats: how many problems have each row of values.

    Returns:
        (low, high), each of shape (columns,). SageError without problems, or for other values.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) == 0:
        raise SageError("a bootstrap needs at least one problem")
    rows = _columns(numbers)
    outside = rows[~((rows >= 0) & (rows <= 1))]  # NaN is, too
    if outside.size:
        raise SageError(
            f"a bootstrap needs a number from 0 to 1 of every problem, not {outside[0]:g}"
        )
    rng = np.random.default_rng(seed)
    if repeats is None:
        weights = rng.standard_exponential((resamples, len(rows) + 1))
    else:  # the sum of so many exponential numbers
        weights = rng.standard_gamma([*np.asarray(repeats), 1.0], (resamples, len(rows) + 1))
    weights /= weights.sum(axis=1, keepdims=True)
    seen, unseen = weights[:, :-1] @ rows, weights[:, -1:]
    low: Array = np.quantile(seen, 0.025, axis=0)
    high: Array = np.quantile(seen + unseen, 0.975, axis=0)
    return low, high


def paired_difference(
    a: ArrayLike, b: ArrayLike, sets: Sets = None, level: float = 0.95
) -> tuple[Array, Array, Array]:
    """Return the mean of a - b, with an interval that covers other training seeds and problems.

    Seed s of ``a`` is compared with seed s of ``b`` on the same problems. The variance of the mean
    is the sum of two parts. The part ``seeds`` is the variance of the seeds' means / seeds, but at
    least the part of it that noise explains. The part ``problems`` is the same over problems, less
    the noise, but at least 0. The interval is mean +- t * sqrt(seeds + problems), with
    Satterthwaite's degrees of freedom (Hillis 2007, Statistics in Medicine 26, 596-619). With one
    seed on both sides the first part is left out: the result then holds for *these two checkpoints*
    on other problems.

    Args:
        a: shape (seeds, problems, columns). A single checkpoint, shape (problems, columns) or
            (problems,), is compared with each seed of the other side.
        b: shaped as ``a``.
        sets: the data set of each problem.
        level: of the interval.

    Returns:
        (mean, low, high), each of shape (columns,). The bounds are NaN where all differences are
        the same, or a data set has one problem; all three are NaN in a column with a NaN. SageError
        for other problems, columns or seeds on both sides.
    """
    difference = differences(a, b)
    error, degrees = _standard_error(difference, sets)
    mean = mean_over_sets(difference.mean(axis=0), sets)
    half = stdtrit(degrees, 0.5 + level / 2) * error
    return mean, mean - half, mean + half


def interval_of_shares(values: ArrayLike, sets: Sets = None) -> tuple[Array, Array, Array]:
    """Return the mean of shares, such as pass@k, with a 95 % interval over seeds and problems.

    Args:
        values: of each seed and problem, as ``a`` of :func:`paired_difference`.
        sets: the data set of each problem.

    Returns:
        (mean, low, high), as of :func:`paired_difference`, the bounds clipped to 0 and 1. For two
        seeds they are NaN: they would be wider than that.
    """
    shares = _with_seeds(values)
    mean, low, high = paired_difference(shares, 0 * shares, sets)
    if len(shares) == 2:
        low, high = np.full((2, *low.shape), np.nan)
    return mean, np.clip(low, 0, 1), np.clip(high, 0, 1)


def minimum_detectable_effect(
    differences: ArrayLike, sets: Sets = None, power: float = 0.8, level: float = 0.95
) -> Array:
    """Return the smallest true difference that :func:`paired_difference` finds with ``power``.

    Args:
        differences: a - b, shaped as in :func:`paired_difference`.
        sets: the data set of each problem.
        power: the probability of finding the difference.
        level: of the interval that finds it.

    Returns:
        Differences (noncentral t), shape (columns,), NaN where all ``differences`` are the same.
        SageError for fewer than two problems of a data set.
    """
    by_seed = _with_seeds(differences)
    if min(map(len, _by_set(by_seed[0], sets))) < 2:
        raise SageError("a detectable effect needs at least two problems of each data set")
    error, degrees = _standard_error(by_seed, sets)
    effect: Array = nctdtrinc(degrees, 1 - power, stdtrit(degrees, 0.5 + level / 2)) * error
    return effect


def times_as_much(differences: ArrayLike, noise: ArrayLike) -> tuple[Array, Array]:
    """Return by which factor more data finds a true difference as large as the mean.

    Args:
        differences: a - b, shaped as in :func:`paired_difference`.
        noise: the variance of the mean from drawing samples, shape (columns,). It falls as
            1 / samples.

    Returns:
        Two factors, shape (columns,), at the same degrees of freedom. The first multiplies seeds
        and problems together. The second multiplies the samples of each problem alone; it is inf
        where seeds and problems vary too much. NaN as in :func:`minimum_detectable_effect`.
    """
    by_seed = _with_seeds(differences)
    effect = minimum_detectable_effect(by_seed)
    error, _ = _standard_error(by_seed, None)
    mean = mean_over_sets(by_seed.mean(axis=0))
    # Sides that were drawn with the same random numbers differ by less than their own noise says.
    drawing = np.minimum(np.asarray(noise, dtype=np.float64), error**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        data: Array = (effect / mean) ** 2
        allowed = error**2 / data - (error**2 - drawing)  # for drawing alone
        samples: Array = np.where(allowed > 0, drawing / allowed, np.inf)
    return data, np.where(np.isnan(data) | np.isnan(drawing), np.nan, samples)


def _with_seeds(values: ArrayLike) -> Array:
    """Return ``values`` as (seeds, problems, columns); without an axis of seeds there is one."""
    numbers = np.asarray(values, dtype=np.float64)
    return numbers if numbers.ndim == 3 else _columns(numbers)[None]


def differences(a: ArrayLike, b: ArrayLike) -> Array:
    """Return a - b, shape (seeds, problems, columns); a single checkpoint stands for all seeds."""
    ours, theirs = _with_seeds(a), _with_seeds(b)
    shapes = ours.shape[1:], theirs.shape[1:]
    if shapes[0] != shapes[1]:
        raise SageError(f"the same problems on both sides are needed, not shapes {shapes}")
    if len({len(ours), len(theirs)} - {1}) > 1:
        raise SageError(
            f"the same seeds on both sides are needed, not {len(ours)} and {len(theirs)}"
        )
    return ours - theirs


def _standard_error(difference: Array, sets: Sets) -> tuple[Array, Array]:
    """Return the standard error of a mean and its degrees of freedom, NaN where nothing varies.

    ``difference`` has shape (seeds, problems, columns), the results (columns,). For the model see
    :func:`paired_difference`.
    """
    seeds, columns = len(difference), difference.shape[-1]
    by_seed = [_by_set(of_seed, sets) for of_seed in difference]
    parts = [np.stack(of_set) for of_set in zip(*by_seed, strict=True)]  # one for each data set
    unknown = np.full(columns, np.nan)
    if min(part.shape[1] for part in parts) < 2:
        return unknown, unknown
    problems, noise, doubt_of_problems, doubt_of_noise = np.zeros((4, columns))
    for part in parts:
        size, weight = part.shape[1], 1 / len(parts) ** 2
        of_problems = part.mean(axis=0)
        variance = weight * of_problems.var(axis=0, ddof=1) / size
        problems += variance
        doubt_of_problems += variance**2 / (size - 1)
        if seeds > 1:
            residuals = (
                part - part.mean(axis=1, keepdims=True) - of_problems + part.mean(axis=(0, 1))
            )
            freedom = (seeds - 1) * (size - 1)
            variance = weight * (residuals**2).sum(axis=(0, 1)) / freedom / (seeds * size)
            noise += variance
            doubt_of_noise += variance**2 / freedom
    without_noise = np.maximum(problems - noise, 0)
    share = np.divide(without_noise, problems, out=np.zeros(columns), where=problems > 0)
    variance, doubt = without_noise, share**2 * doubt_of_problems
    if seeds > 1:
        of_seeds = np.mean([part.mean(axis=1) for part in parts], axis=0)  # (seeds, columns)
        over_seeds = of_seeds.var(axis=0, ddof=1) / seeds
        # Means of seeds vary at least by their noise, even if a few of them happen to be close.
        doubt = doubt + np.where(over_seeds < noise, doubt_of_noise, over_seeds**2 / (seeds - 1))
        variance = variance + np.maximum(over_seeds, noise)
    # Equal differences vary by rounding alone.
    rounding = 1e-12 * np.abs(difference).max(axis=(0, 1))
    varies = variance > rounding**2
    degrees = np.divide(variance**2, doubt, out=unknown.copy(), where=varies)
    return np.where(varies, np.sqrt(variance), np.nan), degrees


def _columns(values: Array) -> Array:
    """Return ``values`` as (problems, columns)."""
    return values.reshape(len(values), -1)


def _by_set(values: ArrayLike, sets: Sets) -> list[Array]:
    """Split ``values`` by data set, in the order of the sets' first problems."""
    numbers = np.asarray(values, dtype=np.float64)
    if sets is None:
        return [numbers]
    if len(sets) != len(numbers):
        raise SageError(f"{len(numbers)} problems need as many names of data sets, not {len(sets)}")
    return [numbers[[name == other for other in sets]] for name in dict.fromkeys(sets)]
