"""The metrics of both papers as pure functions: pass@k, its uncertainty, votes, diversity, support.

Nothing here knows of models or files: counts, answers and probabilities in, numbers out. numpy and
scipy are all it needs.

Three arguments mean the same in every function. ``values`` are numbers per problem, shape
(problems, columns), or (problems,) for a single column; a column is, for instance, one k of pass@k.
``sets`` names the data set of each problem; then a mean is that over data sets of their means, the
papers' "Avg", in which a small set weighs as much as a large one. ``level`` is the share of cases
in which an interval should hold the true value.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import nctdtrinc
from scipy.stats import t

from sage_lib.errors import SageError

Array = NDArray[np.float64]
Sets = Sequence[Hashable] | None

#: Points between two values of k at which a crossing is looked for.
_FINE = 16


# -- pass@k ----------------------------------------------------------------------------------------


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Array:
    """Unbiased pass@k per problem: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021; exploration report, eq. 2.

    Args:
        n: samples per problem, shape (problems,), or one number for all.
        c: correct samples per problem, same shape.
        k: samples a user may draw, without replacement.

    Returns:
        Probabilities, float64 of shape (problems,).

    Raises:
        SageError: where k is below 1 or above some n (the estimator does not exist there), or c is
            not in 0..n.
    """
    samples, correct = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    _require_counts(samples, correct)
    fewest = samples.min()
    if k < 1 or k > fewest:
        raise SageError(
            f"pass@{k} needs at least {max(k, 1)} samples for every problem and some have "
            f"{fewest}: draw more, or ask for a smaller k"
        )
    # C(n-c, k) / C(n, k) is the chance that k draws in a row are wrong: a product of one factor a
    # draw, in which a factor is 0 as soon as no wrong sample is left.
    drawn_before = np.arange(k)
    left = samples[..., None] - drawn_before
    wrong = (samples - correct)[..., None].astype(np.float64)
    wrong_left = np.clip(wrong - drawn_before, 0, None)
    found: Array = 1.0 - np.prod(wrong_left / left, axis=-1)
    return found


def _require_counts(n: NDArray[Any], c: NDArray[Any]) -> None:
    if n.size == 0:
        raise SageError("pass@k needs at least one problem")
    whole = np.equal(np.mod(n, 1), 0).all() and np.equal(np.mod(c, 1), 0).all()
    within = (c >= 0).all() and (c <= n).all()
    if not (whole and within):
        raise SageError(
            "counts must be whole numbers with 0 <= c <= n: check the samples they come from"
        )


def pass_at_k_curve(n: ArrayLike, c: ArrayLike, ks: Sequence[int]) -> Array:
    """:func:`pass_at_k` of every problem for every k, shape (problems, len(ks))."""
    return np.stack([pass_at_k(n, c, k) for k in ks], axis=1)


# -- means over problems and their uncertainty -----------------------------------------------------


def mean_over_sets(values: ArrayLike, sets: Sets = None) -> Array:
    """Mean over problems by column, shape (columns,); with ``sets`` that over data sets."""
    means = [_columns(part).mean(axis=0) for part in _by_set(values, sets)]
    mean: Array = np.mean(means, axis=0)
    return mean


def bootstrap_interval(
    values: ArrayLike,
    resamples: int,
    seed: int,
    sets: Sets = None,
    level: float = 0.95,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> tuple[Array, Array]:
    """Interval of the mean over problems, with one problem that was not seen.

    What another draw of as many problems could give, for the policies as they are: training seeds
    are not in it. The problem is the unit, since samples of one problem are not independent of each
    other. A Bayesian bootstrap (each resample weighs the problems at random, Dirichlet(1, ..., 1))
    in which one more problem takes part: for ``low`` its value is ``bounds[0]``, for ``high``
    ``bounds[1]``. So problems that all agree still leave room for others. For shares of right and
    wrong this is the interval of Clopper and Pearson (1934); for other values the one of
    Learned-Miller and Thomas (arXiv 1905.06208). With ``sets`` problems are weighed within each
    data set, and the mean is that of :func:`mean_over_sets`.

    Simulated coverage at 95 % (tests/test_coverage.py): at least 95 % for 8 to 180 problems, binary
    or pass@k-like, rare successes included, where the percentile bootstrap holds 15 to 96 %. The
    price is width: for pass@1 with 8 problems 1.3 times, with 180 1.07 times that bootstrap's; a
    mean over three sets of 8 is 1.5 times as wide, and held in 98 % of cases and more.

    Args:
        values: numbers per problem within ``bounds``.
        resamples: random weightings of the problems.
        seed: of these weightings.
        sets: data set of each problem, or None.
        level: of the interval.
        bounds: the smallest and the largest value that a problem can have.

    Returns:
        (low, high), each of shape (columns,).

    Raises:
        SageError: without problems, or for values outside ``bounds``.
    """
    smallest, largest = bounds
    low_draws, high_draws = [], []
    for number, part in enumerate(_by_set(values, sets)):
        if len(part) == 0:
            raise SageError("a bootstrap needs at least one problem")
        if (part < smallest).any() or (part > largest).any():
            raise SageError(
                f"a value from {part.min():g} to {part.max():g} lies outside the bounds "
                f"{smallest:g} and {largest:g}: give the smallest and the largest value "
                "that a problem can have"
            )
        rng = np.random.default_rng(seed + number)
        weights = rng.standard_exponential((resamples, len(part) + 1))
        weights /= weights.sum(axis=1, keepdims=True)
        seen, unseen = weights[:, :-1] @ _columns(part), weights[:, -1:]
        low_draws.append(seen + unseen * smallest)
        high_draws.append(seen + unseen * largest)
    tail = (1 - level) / 2
    low: Array = np.quantile(np.mean(low_draws, axis=0), tail, axis=0)
    high: Array = np.quantile(np.mean(high_draws, axis=0), 1 - tail, axis=0)
    return low, high


def mean_std(values: Sequence[float] | Array) -> tuple[float, float]:
    """Mean and standard deviation over seeds (ddof = 1; NaN for one seed, which has no spread)."""
    numbers = np.asarray(values, dtype=np.float64)
    spread = float(numbers.std(ddof=1)) if numbers.size > 1 else float("nan")
    return float(numbers.mean()), spread


# -- comparisons over seeds and problems -----------------------------------------------------------


def paired_difference(
    a: ArrayLike, b: ArrayLike, sets: Sets = None, level: float = 0.95
) -> tuple[Array, Array, Array]:
    """Mean of a - b with an interval that covers other training seeds and other problems.

    Seed s of ``a`` is compared with seed s of ``b`` on the same problems. The differences
    d (seeds, problems) are an effect + a part of each seed + a part of each problem + noise of
    each pair, and the error of their mean has two sources, estimated by moments:

    - seeds: variance over seeds of the seeds' means / seeds
    - problems: variance over problems of the problems' means / problems, less what noise alone
      would give there (it is in the first part already), and at least 0

    The interval is mean +- t * sqrt(seeds + problems), with Satterthwaite's degrees of freedom
    (two such parts: Hillis 2007, Statistics in Medicine 26, 596-619, for readers and cases). With
    ``sets`` the seeds' means are those of :func:`mean_over_sets`, and the other parts are added up
    over data sets, whose problems are independent. A percentile bootstrap over 3 seeds, nested or
    not, is too narrow: it has too few seeds to draw from.

    With one seed on both sides the first part cannot be known and is left out: the result then
    holds for *these two checkpoints* on other problems, not for the methods that made them.

    What the simulation covers (tests/test_coverage.py; seeds of spread 0.001 to 0.02 at pass@1, 3
    to 10 seeds, 24 to 180 problems of unequal difficulty, exact or from samples, methods with and
    without problems of their own): under no effect at 95 %, 3 to 8 % of intervals leave out 0 (2.9
    to 8.2 % in 4,500 worlds a design), and fewer, down to 1 %, where a handful of problems carries
    all differences (24 problems at the largest k). The percentile bootstrap over problems: 3 to
    92 %.

    Args:
        a: shape (seeds, problems, columns); of one checkpoint (problems, columns) or (problems,).
        b: the same for the same seeds in the same order, or one checkpoint, such as the base, that
            every seed is compared with (or the other way round).
        sets: data set of each problem, or None.
        level: of the interval.

    Returns:
        (mean, low, high), each of shape (columns,). ``low`` and ``high`` are NaN where all
        differences are the same, or a data set has one problem: nothing tells how sure they are.

    Raises:
        SageError: where ``a`` and ``b`` are not of the same problems, columns and seeds.
    """
    difference = _differences(a, b)
    error, degrees = _standard_error(difference, sets)
    mean = mean_over_sets(difference.mean(axis=0), sets)
    half = t.ppf(0.5 + level / 2, degrees) * error
    return mean, mean - half, mean + half


def minimum_detectable_effect(
    differences: ArrayLike, sets: Sets = None, power: float = 0.8, level: float = 0.95
) -> Array:
    """The smallest mean difference that :func:`paired_difference` would find with ``power``.

    From the error and the degrees of freedom of these differences, over seeds and problems alike:
    with as many of both and a true difference of this size, the interval leaves out 0 in a share
    ``power`` of cases (noncentral t). A measured difference below it is not evidence of no
    difference.

    Args:
        differences: shape (seeds, problems, columns); of two checkpoints (problems, columns) or
            (problems,): then for these two alone.
        sets: data set of each problem, or None.
        power: share of cases in which the effect is to be found.
        level: of the interval.

    Returns:
        Shape (columns,). NaN where all differences are the same: from no spread nothing can be
        estimated.

    Raises:
        SageError: where a mean is over fewer than two problems.
    """
    by_seed = _with_seeds(differences)
    if min(map(len, _by_set(by_seed[0], sets))) < 2:
        where = "" if sets is None else " of each data set"
        raise SageError(f"a minimum detectable effect needs at least two problems{where}")
    error, degrees = _standard_error(by_seed, sets)
    least = t.ppf(0.5 + level / 2, degrees)
    effect: Array = nctdtrinc(degrees, 1 - power, least) * error
    return effect


def crossing_interval(
    a: ArrayLike, b: ArrayLike, ks: Sequence[int], sets: Sets = None, level: float = 0.95
) -> dict[str, float]:
    """Where curve b passes curve a for the first time as k grows, on a log2 axis of k.

    The k that could be the crossing are those at which the interval of :func:`paired_difference`
    holds 0: with as much right as that interval, and for the same seeds and problems, the crossing
    lies between ``low`` and ``high``. Between two values of k the curves are straight lines over
    log2 k.

    Args:
        a: pass@k, shape (seeds, problems, len(ks)), or of one checkpoint (problems, len(ks)).
        b: the same of the other curve, for the same problems.
        ks: in rising order.
        sets: data set of each problem, or None.
        level: of the interval.

    Returns:
        ``k``, of the means (NaN, and so the rest, when b never comes from at or below to above a);
        ``low``, the last k before it at which b is still below a by more than chance, and ``high``,
        the first k after it at which b is above a by more than chance (each NaN where there is
        none); ``crosses``: whether both are there. Otherwise the crossing may be chance.

    Raises:
        SageError: where the curves are not of the same problems and ``ks``.
    """
    difference = _differences(b, a)
    if difference.shape[-1] != len(ks):
        raise SageError(
            f"a crossing needs two curves over {len(ks)} values of k, "
            f"not over {difference.shape[-1]}"
        )
    k = _first_crossing(mean_over_sets(difference.mean(axis=0), sets), ks)
    places = np.arange((len(ks) - 1) * _FINE + 1) / _FINE
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
    """k at which ``difference``, shape (len(ks),), goes from at most 0 to above 0; NaN if never.

    Between two values of k the difference is taken to be a straight line over log2 k.
    """
    for i in range(1, len(ks)):
        before, after = difference[i - 1], difference[i]
        if before <= 0 < after:
            share = -before / (after - before)
            log_k = np.log2(ks[i - 1]) + share * np.log2(ks[i] / ks[i - 1])
            return float(2**log_k)
    return float("nan")


def _with_seeds(values: ArrayLike) -> Array:
    """``values`` as (seeds, problems, columns); what has no axis of seeds is one checkpoint's."""
    numbers = np.asarray(values, dtype=np.float64)
    return numbers if numbers.ndim == 3 else _columns(numbers)[None]


def _differences(a: ArrayLike, b: ArrayLike) -> Array:
    """a - b, shape (seeds, problems, columns); a single checkpoint stays for every seed."""
    ours, theirs = _with_seeds(a), _with_seeds(b)
    if ours.shape[1:] != theirs.shape[1:]:
        raise SageError(
            "a paired difference needs the same problems on both sides, "
            f"not shapes {ours.shape[1:]} and {theirs.shape[1:]}"
        )
    seeds = {len(ours), len(theirs)} - {1}
    if len(seeds) > 1:
        raise SageError(
            "a paired difference needs the same seeds on both sides, or one checkpoint on one: "
            f"not {len(ours)} and {len(theirs)}"
        )
    return ours - theirs


def _standard_error(difference: Array, sets: Sets) -> tuple[Array, Array]:
    """Standard error of the mean of (seeds, problems, columns) and its degrees of freedom.

    Both by column, NaN where nothing varies. The model is that of :func:`paired_difference`.
    """
    seeds, columns = len(difference), difference.shape[-1]
    by_seed = [_by_set(one, sets) for one in difference]
    parts = [np.stack(of_set) for of_set in zip(*by_seed, strict=True)]  # one for each data set
    unknown = np.full(columns, np.nan)
    if min(part.shape[1] for part in parts) < 2:
        return unknown, unknown
    problems, noise, doubt_of_problems = np.zeros((3, columns))
    for part in parts:
        size, weight = part.shape[1], 1 / len(parts) ** 2
        of_problems = part.mean(axis=0)
        found = weight * of_problems.var(axis=0, ddof=1) / size
        problems += found
        doubt_of_problems += found**2 / (size - 1)
        if seeds > 1:
            rest = part - part.mean(axis=1, keepdims=True) - of_problems + part.mean(axis=(0, 1))
            mean_square = (rest**2).sum(axis=(0, 1)) / ((seeds - 1) * (size - 1))
            noise += weight * mean_square / (seeds * size)
    own = np.maximum(problems - noise, 0)
    kept = np.divide(own, problems, out=np.zeros(columns), where=problems > 0)
    variance, doubt = own, kept**2 * doubt_of_problems
    if seeds > 1:
        of_seeds = np.mean([part.mean(axis=1) for part in parts], axis=0)  # (seeds, columns)
        found = of_seeds.var(axis=0, ddof=1) / seeds
        variance, doubt = variance + found, doubt + found**2 / (seeds - 1)
    # Equal differences leave no more than what rounding makes of them.
    rounding = 1e-12 * np.abs(difference).max(axis=(0, 1))
    varies = variance > rounding**2
    degrees = np.divide(variance**2, doubt, out=unknown.copy(), where=varies)
    return np.where(varies, np.sqrt(variance), np.nan), degrees


def _columns(values: Array) -> Array:
    """``values`` as (problems, columns), whatever their shape behind the first axis."""
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
    return [numbers[rows] for rows in places.values()]


# -- votes, support, diversity ---------------------------------------------------------------------


def majority_at_k(
    answers: Sequence[Hashable | None], correct: Sequence[bool], k: int, draws: int, seed: int
) -> float:
    """maj@k of one problem: how often the most frequent answer among k samples is correct.

    The k samples are drawn without replacement, ``draws`` times. Samples without an answer (None)
    do not vote; a tie is broken at random, and k samples without any answer are wrong. Exact for k
    equal to the number of samples, up to ties.

    Raises:
        SageError: where there are fewer than k samples, or an answer is correct once and wrong
            another time.
    """
    if not 1 <= k <= len(answers) or len(answers) != len(correct):
        raise SageError(
            f"maj@{k} needs at least {k} samples with a verdict each, "
            f"not {len(answers)} and {len(correct)}"
        )
    verdicts = _verdicts(answers, correct)
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


def _verdicts(
    answers: Sequence[Hashable | None], correct: Sequence[bool]
) -> dict[Hashable | None, bool]:
    """Whether each different answer is correct, in order of first appearance."""
    verdicts: dict[Hashable | None, bool] = {}
    for answer, verdict in zip(answers, correct, strict=True):
        if verdicts.setdefault(answer, bool(verdict)) != bool(verdict):
            raise SageError(
                f"the answer {answer!r} is correct once and wrong once: "
                "verify answers before counting votes"
            )
    return verdicts


def unsolvable(problems: Sequence[str], c: ArrayLike) -> set[str]:
    """The k-rollout unsolvable set (exploration report, Section 2.1): problems with none correct.

    k is the number of samples drawn; ``c`` are the correct ones per problem, shape (problems,).
    """
    counts = np.asarray(c)
    return {problem for problem, count in zip(problems, counts, strict=True) if count == 0}


def empirical_support(probabilities: Mapping[str, float], epsilon: float) -> set[str]:
    """supp_eps of Definition 4.1: correct completions whose probability is above ``epsilon``."""
    return {completion for completion, p in probabilities.items() if p > epsilon}


def exclusive_regions(sets: Mapping[str, set[str]]) -> dict[tuple[str, ...], int]:
    """How many elements lie in exactly these sets, for every combination that occurs.

    The regions of a Venn diagram, the columns of an UpSet plot. Keys hold names in the order of
    ``sets``.
    """
    every: set[str] = set().union(*sets.values())
    regions: Counter[tuple[str, ...]] = Counter()
    for element in sorted(every):
        regions[tuple(name for name, members in sets.items() if element in members)] += 1
    return dict(regions)


def distinct_answers(answers: Sequence[Hashable | None]) -> int:
    """Answer diversity of one problem: how many different answers its samples gave, None aside."""
    return len(set(answers) - {None})
