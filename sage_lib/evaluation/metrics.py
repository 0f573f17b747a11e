"""The metrics of both papers as pure functions: pass@k, votes, diversity; and how sure a mean over
problems is: intervals, paired differences, crossings.

``values`` are numbers per problem, shape (problems, columns), or (problems,) for a single column; a
column is, for instance, one k of pass@k. ``sets`` names the data set of each problem: a mean is
then that over data sets of their means, the papers' "Avg". ``level`` is the share of cases in which
an interval should hold the true value.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import nctdtrinc, stdtrit  # scipy.stats takes seconds to load

from sage_lib.errors import SageError

Array = NDArray[np.float64]
Sets = Sequence[Hashable] | None


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Array:
    """Unbiased pass@k per problem: 1 - C(n-c, k) / C(n, k), shape (problems,).

    Chen et al. 2021; exploration report, eq. 2. ``n`` samples per problem, shape (problems,) or one
    number for all, ``c`` of them correct. SageError where k is not in 1..n, or c not in 0..n.
    """
    samples, correct = _checked_counts(n, c, [k])
    found: Array = np.asarray(1.0 - np.prod(_wrong_draws(samples, correct, k), axis=-1))
    return found


def pass_at_k_curve(n: ArrayLike, c: ArrayLike, ks: Sequence[int]) -> Array:
    """:func:`pass_at_k` of every problem for every k, shape (problems, len(ks))."""
    samples, correct = _checked_counts(n, c, ks)
    # Problems with the same counts have the same curve.
    counts, place = np.unique(np.stack([samples, correct]), axis=1, return_inverse=True)
    all_wrong = np.cumprod(_wrong_draws(counts[0], counts[1], max(ks)), axis=-1)
    curves: Array = np.asarray(1.0 - all_wrong[:, np.asarray(ks) - 1])
    return curves[place.ravel()]


def _checked_counts(n: ArrayLike, c: ArrayLike, ks: Sequence[int]) -> tuple[Array, Array]:
    """Samples and right ones, of one shape. SageError as :func:`pass_at_k`."""
    samples, correct = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    if samples.size == 0:
        raise SageError("pass@k needs at least one problem")
    whole = (np.mod(samples, 1) == 0).all() and (np.mod(correct, 1) == 0).all()
    if not (whole and (correct >= 0).all() and (correct <= samples).all()):
        raise SageError("counts must be whole numbers with 0 <= c <= n")
    fewest = samples.min()
    for k in ks:
        if k < 1:
            raise SageError(f"pass@k needs a whole k of 1 or more, not {k}")
        if k > fewest:
            raise SageError(
                f"pass@{k} needs {k} samples for every problem and some have {fewest}: "
                "draw more, or ask for a smaller k"
            )
    return samples, correct


def _wrong_draws(samples: Array, correct: Array, k: int) -> Array:
    """Chance of each of k draws in a row to be wrong, given that those before it were."""
    drawn_before = np.arange(k)
    wrong = (samples - correct)[..., None].astype(np.float64)
    wrong_left = np.clip(wrong - drawn_before, 0, None)
    chances: Array = wrong_left / (samples[..., None] - drawn_before)
    return chances


def variance_of_pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Array:
    """Unbiased variance of :func:`pass_at_k` over draws of the n samples, shape (problems,).

    The square of the chance that k draws are wrong, less an unbiased estimate of it: the chance
    that 2 k are. That estimate needs 2 k samples of each problem; with fewer it is NaN.
    """
    found = pass_at_k(n, c, k)
    if 2 * k > np.asarray(n).min():
        return np.full_like(found, np.nan)
    variance: Array = (1 - found) ** 2 - (1 - pass_at_k(n, c, 2 * k))
    return variance


def majority_at_k(
    answers: Sequence[Hashable | None], correct: Sequence[bool], k: int, draws: int, seed: int
) -> float:
    """maj@k of one problem: how often the most frequent answer among k samples is correct.

    The k samples are drawn without replacement, ``draws`` times. Samples without an answer (None)
    do not vote; a tie is broken at random, and k samples without any answer are wrong. SageError
    for fewer than k samples, or an answer that is correct once and wrong once.
    """
    if not 1 <= k <= len(answers) or len(answers) != len(correct):
        raise SageError(f"maj@{k} needs {k} samples and verdicts, not {len(answers)}")
    verdicts: dict[Hashable | None, bool] = {}  # of each different answer
    for answer, verdict in zip(answers, correct, strict=True):
        if verdicts.setdefault(answer, bool(verdict)) != bool(verdict):
            raise SageError(f"the answer {answer!r} is correct once and wrong once")
    values = list(verdicts)
    place = {value: number for number, value in enumerate(values)}
    ballots = np.array([place[answer] for answer in answers])
    may_win = np.array([value is not None for value in values])
    rng, wins = np.random.default_rng(seed), 0
    for _ in range(draws):
        drawn = rng.permutation(ballots)[:k]
        votes = np.bincount(drawn, minlength=len(values)) * may_win
        if votes.max() > 0:
            leaders = np.flatnonzero(votes == votes.max())
            wins += verdicts[values[rng.choice(leaders)]]
    return wins / draws


def unsolvable(problems: Sequence[str], c: ArrayLike) -> set[str]:
    """The k-rollout unsolvable set (exploration report, 2.1): problems with ``c`` = 0 correct."""
    return {problem for problem, n in zip(problems, np.asarray(c), strict=True) if n == 0}


def distinct_answers(answers: Sequence[Hashable | None]) -> int:
    """Answer diversity of one problem: how many different answers its samples gave, None aside."""
    return len(set(answers) - {None})


# --- how sure a mean over problems is -------------------------------------------------------------


def mean_over_sets(values: ArrayLike, sets: Sets = None) -> Array:
    """Mean over problems by column, shape (columns,); with ``sets`` that over data sets."""
    means = [_columns(part).mean(axis=0) for part in _by_set(values, sets)]
    mean: Array = np.mean(means, axis=0)
    return mean


def mean_std(values: Sequence[float] | Array) -> tuple[float, float]:
    """Mean and standard deviation over seeds (ddof = 1; NaN for one seed)."""
    numbers = np.asarray(values, dtype=np.float64)
    spread = float(numbers.std(ddof=1)) if numbers.size > 1 else float("nan")
    return float(numbers.mean()), spread


def bootstrap_interval(
    values: ArrayLike,
    resamples: int,
    seed: int,
    sets: Sets = None,
    level: float = 0.95,
    bounds: tuple[float, float] = (0.0, 1.0),
    repeats: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """(low, high) of the mean over problems, each of shape (columns,), for these policies.

    A Bayesian bootstrap: each resample weighs the problems at random, Dirichlet(1, ..., 1). One
    problem that was not seen takes part, with the value ``bounds[0]`` for ``low`` and ``bounds[1]``
    for ``high``. For shares of right and wrong this is the interval of Clopper and Pearson (1934),
    otherwise that of Learned-Miller and Thomas (arXiv 1905.06208). With ``sets`` problems are
    weighed within each data set. ``repeats``, without ``sets``: how many problems have each row of
    values. SageError without problems, or for values outside ``bounds``.
    """
    smallest, largest = bounds
    low_draws, high_draws = [], []
    for number, part in enumerate(_by_set(values, sets)):
        if len(part) == 0:
            raise SageError("a bootstrap needs at least one problem")
        if (part < smallest).any() or (part > largest).any():
            found = f"{part.min():g} to {part.max():g}"
            raise SageError(f"{found} lies outside the bounds {smallest:g} and {largest:g}")
        rng = np.random.default_rng(seed + number)
        if repeats is None:
            weights = rng.standard_exponential((resamples, len(part) + 1))
        else:  # the sum of so many exponential numbers
            weights = rng.standard_gamma([*np.asarray(repeats), 1.0], (resamples, len(part) + 1))
        weights /= weights.sum(axis=1, keepdims=True)
        seen, unseen = weights[:, :-1] @ _columns(part), weights[:, -1:]
        low_draws.append(seen + unseen * smallest)
        high_draws.append(seen + unseen * largest)
    tail = (1 - level) / 2
    low: Array = np.quantile(np.mean(low_draws, axis=0), tail, axis=0)
    high: Array = np.quantile(np.mean(high_draws, axis=0), 1 - tail, axis=0)
    return low, high


def paired_difference(
    a: ArrayLike, b: ArrayLike, sets: Sets = None, level: float = 0.95
) -> tuple[Array, Array, Array]:
    """Mean of a - b, and an interval that covers other training seeds and other problems.

    Seed s of ``a`` is compared with seed s of ``b`` on the same problems. The error of the mean has
    two sources: ``seeds``, the variance over seeds of their means / seeds, and at least what noise
    alone would give there; and ``problems``, the same over problems, less the noise, at least 0.
    So the error is at least that of these checkpoints on other problems. The interval is mean +- t
    * sqrt(seeds + problems), with Satterthwaite's degrees of freedom (Hillis 2007, Statistics in
    Medicine 26, 596-619). With one seed on both sides the first part is left out: the result then
    holds for *these two checkpoints* on other problems.

    ``a`` and ``b`` have shape (seeds, problems, columns); of one checkpoint, which is compared with
    every seed of the other side, (problems, columns) or (problems,). Returns (mean, low, high),
    each of shape (columns,); ``low`` and ``high`` are NaN where all differences are the same, or a
    data set has one problem. SageError for other problems, columns or seeds on both sides.
    """
    difference = differences(a, b)
    error, degrees = _standard_error(difference, sets)
    mean = mean_over_sets(difference.mean(axis=0), sets)
    half = stdtrit(degrees, 0.5 + level / 2) * error
    return mean, mean - half, mean + half


def minimum_detectable_effect(
    differences: ArrayLike, sets: Sets = None, power: float = 0.8, level: float = 0.95
) -> Array:
    """The smallest mean difference that :func:`paired_difference` would find with ``power``.

    That is with as many seeds and problems (noncentral t). ``differences`` are shaped as there.
    Shape (columns,), NaN where all differences are the same. SageError for fewer than two problems.
    """
    by_seed = _with_seeds(differences)
    if min(map(len, _by_set(by_seed[0], sets))) < 2:
        raise SageError("a detectable effect needs at least two problems of each data set")
    error, degrees = _standard_error(by_seed, sets)
    effect: Array = nctdtrinc(degrees, 1 - power, stdtrit(degrees, 0.5 + level / 2)) * error
    return effect


def times_as_much(
    differences: ArrayLike, noise: ArrayLike, sets: Sets = None, power: float = 0.8
) -> tuple[Array, Array]:
    """How many times as much data finds a true difference as large as the mean, with ``power``.

    The first: as many times the seeds and the problems, both at once, because the error falls with
    the root of them. The second: as many times the samples of each problem, with the same seeds and
    problems; ``noise``, shape (columns,), is the variance of the mean that comes from drawing
    samples, which falls as 1 / samples. It is inf where other seeds and problems alone vary too
    much. Degrees of freedom are taken as they are. ``differences`` and NaN as in
    :func:`minimum_detectable_effect`; both have shape (columns,).
    """
    by_seed = _with_seeds(differences)
    effect = minimum_detectable_effect(by_seed, sets, power)
    error, _ = _standard_error(by_seed, sets)
    mean = mean_over_sets(by_seed.mean(axis=0), sets)
    # Sides that were drawn with the same random numbers differ by less than their own noise says.
    drawing = np.minimum(np.asarray(noise, dtype=np.float64), error**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        data: Array = (effect / mean) ** 2
        allowed = error**2 / data - (error**2 - drawing)  # what drawing may add
        samples: Array = np.where(allowed > 0, drawing / allowed, np.inf)
    return data, np.where(np.isnan(data) | np.isnan(drawing), np.nan, samples)


def crossing_interval(
    a: ArrayLike, b: ArrayLike, ks: Sequence[int], sets: Sets = None, level: float = 0.95
) -> dict[str, float]:
    """Where curve b passes curve a for the first time as k grows, on a log2 axis of k.

    Between two values of ``ks``, in rising order, the curves are straight lines. ``a`` and ``b``
    are pass@k, shape (seeds, problems, len(ks)) or (problems, len(ks)).

    Returns ``k``, of the means (NaN where b never comes from at or below to above a); ``low``, the
    last k before it at which b is below a by more than chance, and ``high``, the first k after it
    at which b is above a by more than chance (NaN where there is none); and ``crosses``, whether
    both are there.
    """
    difference = differences(b, a)
    if difference.shape[-1] != len(ks):
        raise SageError(f"a crossing over {len(ks)} values of k, not over {difference.shape[-1]}")
    k = _first_crossing(mean_over_sets(difference.mean(axis=0), sets), ks)
    # Where it is looked for: at each k, and 16 times for each doubling of k.
    steps = np.ceil(16 * np.diff(np.log2(ks))).astype(int)
    inner = [place + np.arange(step) / step for place, step in enumerate(steps)]
    places = np.concatenate([*inner, [len(ks) - 1.0]])
    before = np.minimum(places.astype(int), max(len(ks) - 2, 0))
    share = places - before
    after = np.minimum(before + 1, len(ks) - 1)
    finer = difference[..., before] * (1 - share) + difference[..., after] * share
    finer_ks = 2 ** np.interp(places, np.arange(len(ks)), np.log2(ks))
    _, lows, highs = paired_difference(finer, np.zeros_like(finer), sets, level)
    is_below = finer_ks[(highs < 0) & (finer_ks <= k)]  # none where k is NaN
    is_above = finer_ks[(lows > 0) & (finer_ks >= k)]
    return {
        "k": k,
        "low": float(is_below[-1]) if len(is_below) else float("nan"),
        "high": float(is_above[0]) if len(is_above) else float("nan"),
        "crosses": len(is_below) > 0 and len(is_above) > 0,
    }


def _first_crossing(difference: Array, ks: Sequence[int]) -> float:
    """k at which ``difference`` goes from at most 0 to above 0 for the first time, or NaN."""
    for i in range(1, len(ks)):
        before, after = difference[i - 1], difference[i]
        if before <= 0 < after:
            share = -before / (after - before)
            return float(2 ** (np.log2(ks[i - 1]) + share * np.log2(ks[i] / ks[i - 1])))
    return float("nan")


def _with_seeds(values: ArrayLike) -> Array:
    """``values`` as (seeds, problems, columns); what has no axis of seeds is one checkpoint's."""
    numbers = np.asarray(values, dtype=np.float64)
    return numbers if numbers.ndim == 3 else _columns(numbers)[None]


def differences(a: ArrayLike, b: ArrayLike) -> Array:
    """a - b, shape (seeds, problems, columns); a single checkpoint stays for every seed."""
    ours, theirs = _with_seeds(a), _with_seeds(b)
    if ours.shape[1:] != theirs.shape[1:]:
        shapes = f"{ours.shape[1:]} and {theirs.shape[1:]}"
        raise SageError(f"the same problems on both sides are needed, not shapes {shapes}")
    if len({len(ours), len(theirs)} - {1}) > 1:
        raise SageError(
            f"the same seeds on both sides are needed, not {len(ours)} and {len(theirs)}"
        )
    return ours - theirs


def _standard_error(difference: Array, sets: Sets) -> tuple[Array, Array]:
    """Standard error of the mean of (seeds, problems, columns) and its degrees of freedom, both by
    column, NaN where nothing varies. The model is that of :func:`paired_difference`."""
    seeds, columns = len(difference), difference.shape[-1]
    by_seed = [_by_set(one, sets) for one in difference]
    parts = [np.stack(of_set) for of_set in zip(*by_seed, strict=True)]  # one for each data set
    unknown = np.full(columns, np.nan)
    if min(part.shape[1] for part in parts) < 2:
        return unknown, unknown
    problems, noise, doubt_of_problems, doubt_of_noise = np.zeros((4, columns))
    for part in parts:
        size, weight = part.shape[1], 1 / len(parts) ** 2
        of_problems = part.mean(axis=0)
        found = weight * of_problems.var(axis=0, ddof=1) / size
        problems += found
        doubt_of_problems += found**2 / (size - 1)
        if seeds > 1:
            rest = part - part.mean(axis=1, keepdims=True) - of_problems + part.mean(axis=(0, 1))
            freedom = (seeds - 1) * (size - 1)
            found = weight * (rest**2).sum(axis=(0, 1)) / freedom / (seeds * size)
            noise += found
            doubt_of_noise += found**2 / freedom
    own = np.maximum(problems - noise, 0)
    kept = np.divide(own, problems, out=np.zeros(columns), where=problems > 0)
    variance, doubt = own, kept**2 * doubt_of_problems
    if seeds > 1:
        of_seeds = np.mean([part.mean(axis=1) for part in parts], axis=0)  # (seeds, columns)
        found = of_seeds.var(axis=0, ddof=1) / seeds
        # Means of seeds vary at least by their noise, whatever few of them happen to show.
        doubt = doubt + np.where(found < noise, doubt_of_noise, found**2 / (seeds - 1))
        variance = variance + np.maximum(found, noise)
    # Equal differences leave no more than what rounding makes of them.
    rounding = 1e-12 * np.abs(difference).max(axis=(0, 1))
    varies = variance > rounding**2
    degrees = np.divide(variance**2, doubt, out=unknown.copy(), where=varies)
    return np.where(varies, np.sqrt(variance), np.nan), degrees


def _columns(values: Array) -> Array:
    """``values`` as (problems, columns)."""
    return values.reshape(len(values), -1)


def _by_set(values: ArrayLike, sets: Sets) -> list[Array]:
    """``values`` by data set, in the order in which the sets come first; without ``sets``, all."""
    numbers = np.asarray(values, dtype=np.float64)
    if sets is None:
        return [numbers]
    if len(sets) != len(numbers):
        raise SageError(f"{len(numbers)} problems need as many names of data sets, not {len(sets)}")
    places: dict[Hashable, list[int]] = {}
    for place, name in enumerate(sets):
        places.setdefault(name, []).append(place)
    return [numbers[chosen] for chosen in places.values()]
