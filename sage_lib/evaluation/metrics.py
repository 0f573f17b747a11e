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
from scipy.stats import norm

from sage_lib.errors import SageError

Array = NDArray[np.float64]
Sets = Sequence[Hashable] | None


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


def bootstrap_means(values: ArrayLike, resamples: int, seed: int, sets: Sets = None) -> Array:
    """Means over problems drawn with replacement, by column: shape (resamples, columns).

    The problem is the unit: samples of one problem are not independent of each other. With ``sets``
    problems are drawn within each data set, and the means are those of :func:`mean_over_sets`.
    """
    if sets is None:
        return _bootstrap_means(np.asarray(values, dtype=np.float64), resamples, seed)
    by_set = [
        _bootstrap_means(part, resamples, seed + number)
        for number, part in enumerate(_by_set(values, sets))
    ]
    means: Array = np.mean(by_set, axis=0)
    return means


def _bootstrap_means(values: Array, resamples: int, seed: int) -> Array:
    problems = len(values)
    if problems == 0:
        raise SageError("a bootstrap needs at least one problem")
    rng = np.random.default_rng(seed)
    alike = np.full(problems, 1 / problems)
    times_drawn = rng.multinomial(problems, alike, size=resamples)
    means: Array = times_drawn @ _columns(values) / problems
    return means


def bootstrap_interval(
    values: ArrayLike, resamples: int, seed: int, sets: Sets = None, level: float = 0.95
) -> tuple[Array, Array]:
    """Percentile interval of the mean over problems: (low, high), each of shape (columns,)."""
    means = bootstrap_means(values, resamples, seed, sets)
    low, high = np.quantile(means, _percentiles(level), axis=0)
    return low, high


def ratio_interval(
    counts: ArrayLike, totals: ArrayLike, resamples: int, seed: int, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval (low, high) of sum(counts) / sum(totals), resampling problems.

    For shares of samples, such as the rare way's; ``counts`` and ``totals`` have shape (problems,).
    """
    both = np.stack([np.asarray(counts), np.asarray(totals)], axis=1)
    means = bootstrap_means(both, resamples, seed)
    low, high = np.quantile(means[:, 0] / means[:, 1], _percentiles(level))
    return float(low), float(high)


def paired_difference(
    a: ArrayLike,
    b: ArrayLike,
    resamples: int,
    seed: int,
    sets: Sets = None,
    level: float = 0.95,
) -> tuple[Array, Array, Array]:
    """Mean of a - b over the same problems with its interval: (mean, low, high) by column.

    Raises:
        SageError: where ``a`` and ``b`` are not of the same problems and columns.
    """
    ours, theirs = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if ours.shape != theirs.shape:
        raise SageError(
            "a paired difference needs the same problems on both sides, "
            f"not shapes {ours.shape} and {theirs.shape}"
        )
    difference = ours - theirs
    low, high = bootstrap_interval(difference, resamples, seed, sets, level)
    return mean_over_sets(difference, sets), low, high


def minimum_detectable_effect(
    differences: ArrayLike, sets: Sets = None, power: float = 0.8, level: float = 0.95
) -> Array:
    """The smallest mean difference that a comparison of this size would find with ``power``.

    Normal approximation from the spread of the ``differences`` per problem: (z_level + z_power)
    standard errors of their mean, with ``sets`` of that over data sets. A measured difference below
    it is not evidence of no difference.

    Returns:
        Shape (columns,). NaN where no problem differs: from no spread nothing can be estimated.

    Raises:
        SageError: where a mean is over fewer than two problems.
    """
    parts = _by_set(differences, sets)
    if min(map(len, parts)) < 2:
        where = "" if sets is None else " of each data set"
        raise SageError(f"a minimum detectable effect needs at least two problems{where}")
    squared_errors = [_columns(part).var(axis=0, ddof=1) / len(part) for part in parts]
    error = np.sqrt(sum(squared_errors)) / len(parts)
    factor = norm.ppf(0.5 + level / 2) + norm.ppf(power)
    return np.where(error > 0, factor * error, np.nan)


def crossing_interval(
    a: ArrayLike,
    b: ArrayLike,
    ks: Sequence[int],
    resamples: int,
    seed: int,
    sets: Sets = None,
    level: float = 0.95,
) -> dict[str, float]:
    """Where curve b passes curve a for the first time as k grows, on a log2 axis of k.

    Args:
        a: pass@k per problem, shape (problems, len(ks)).
        b: the same of the other curve, for the same problems.
        ks: in rising order.

    Returns:
        ``k`` (of the means; NaN when b never comes from at or below to above a), ``low`` and
        ``high`` (percentiles among the resamples that cross), and ``crosses``, the share of
        resamples that do: an interval without that share says nothing.

    Raises:
        SageError: where the curves are not of the same problems and ``ks``.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape or first.shape[1] != len(ks):
        raise SageError(
            f"a crossing needs two curves of the same problems over {len(ks)} values of k, "
            f"not shapes {first.shape} and {second.shape}"
        )
    difference = second - first
    means = bootstrap_means(difference, resamples, seed, sets)
    crossings = np.array([_first_crossing(mean, ks) for mean in means])
    crossed = crossings[~np.isnan(crossings)]
    low, high = np.nan, np.nan
    if len(crossed):
        low, high = np.quantile(crossed, _percentiles(level))
    return {
        "k": _first_crossing(mean_over_sets(difference, sets), ks),
        "low": float(low),
        "high": float(high),
        "crosses": len(crossed) / resamples,
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


def mean_std(values: Sequence[float] | Array) -> tuple[float, float]:
    """Mean and standard deviation over seeds (ddof = 1; NaN for one seed, which has no spread)."""
    numbers = np.asarray(values, dtype=np.float64)
    spread = float(numbers.std(ddof=1)) if numbers.size > 1 else float("nan")
    return float(numbers.mean()), spread


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


def _percentiles(level: float) -> list[float]:
    tail = (1 - level) / 2
    return [tail, 1 - tail]


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


def ngram_redundancy(tokens: Sequence[Hashable], n: int = 3) -> float:
    """Share of n-grams that repeat an earlier one, 1 - distinct / all (exploration report, 4.4).

    0 for a text of fewer than n tokens.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
