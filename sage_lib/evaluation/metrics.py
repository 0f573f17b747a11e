"""The metrics of both papers as pure functions: pass@k and its uncertainty, votes, diversity, unsolvable sets, token signals.

Nothing here knows of models or files: counts, answers, tokens and probabilities in, numbers out.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from scipy.stats import norm

from sage_lib.errors import SageError


def pass_at_k(n: np.ndarray, c: np.ndarray, k: int) -> np.ndarray:
    """Unbiased pass@k per problem: 1 - C(n-c, k)/C(n, k) (Chen et al. 2021; exploration report eq. 2).

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
    if (
        not (np.equal(np.mod(n, 1), 0).all() and np.equal(np.mod(c, 1), 0).all())
        or (c < 0).any()
        or (c > n).any()
    ):
        raise SageError(
            "counts must be whole numbers with 0 <= c <= n: check the samples they come from"
        )
    if k < 1 or k > n.min():
        raise SageError(
            f"pass@{k} needs at least {max(k, 1)} samples for every problem and some have {n.min()}: draw more, or ask for a smaller k"
        )
    # C(n-c, k)/C(n, k) as a product over the k draws; a factor is 0 as soon as fewer than k samples are wrong.
    draws = np.arange(k)
    remaining = (n - c)[..., None].astype(np.float64) - draws
    return 1.0 - np.prod(np.clip(remaining, 0, None) / (n[..., None] - draws), axis=-1)


def pass_at_k_curve(n: np.ndarray, c: np.ndarray, ks: tuple[int, ...]) -> np.ndarray:
    """pass@k of every problem for every k, shape (problems, len(ks))."""
    return np.stack([pass_at_k(n, c, k) for k in ks], axis=1)


def mean_over_sets(values: np.ndarray, sets: Sequence[Hashable] | None = None) -> np.ndarray:
    """Mean over problems by column, for values of shape (problems, columns). ``sets`` names the data set of each problem: then
    the mean over data sets of their means, the paper's "Avg", in which a small set weighs as much as a large one."""
    values = np.asarray(values, dtype=np.float64)
    return np.mean(
        [part.reshape(len(part), -1).mean(axis=0) for part in _by_set(values, sets)], axis=0
    )


def _by_set(values: np.ndarray, sets: Sequence[Hashable] | None) -> list[np.ndarray]:
    if sets is None:
        return [values]
    places: dict[Hashable, list[int]] = {}
    for place, name in enumerate(sets):
        places.setdefault(name, []).append(place)
    return [values[rows] for rows in places.values()]


def bootstrap_means(
    values: np.ndarray, resamples: int, seed: int, sets: Sequence[Hashable] | None = None
) -> np.ndarray:
    """Means over problems drawn with replacement: shape (resamples, columns) for values of shape (problems, columns).

    The problem is the unit: samples of one problem are not independent of each other. With ``sets`` the means are those of
    :func:`mean_over_sets`, and problems are drawn within each data set.
    """
    values = np.asarray(values, dtype=np.float64)
    if sets is not None:
        return np.mean(
            [
                bootstrap_means(part, resamples, seed + i)
                for i, part in enumerate(_by_set(values, sets))
            ],
            axis=0,
        )
    problems = values.shape[0]
    weights = np.random.default_rng(seed).multinomial(
        problems, np.full(problems, 1 / problems), size=resamples
    )
    return weights @ values.reshape(problems, -1) / problems


def bootstrap_interval(
    values: np.ndarray,
    resamples: int,
    seed: int,
    sets: Sequence[Hashable] | None = None,
    level: float = 0.95,
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of the mean over problems, by column: (low, high) for values of shape (problems, columns); ``sets`` as
    in :func:`bootstrap_means`."""
    tail = (1 - level) / 2
    low, high = np.quantile(
        bootstrap_means(values, resamples, seed, sets), [tail, 1 - tail], axis=0
    )
    return low, high


def ratio_interval(
    counts: np.ndarray, totals: np.ndarray, resamples: int, seed: int, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of sum(counts)/sum(totals), resampling problems: for shares of samples such as the rare way's."""
    means = bootstrap_means(np.stack([counts, totals], axis=1), resamples, seed)
    tail = (1 - level) / 2
    low, high = np.quantile(means[:, 0] / means[:, 1], [tail, 1 - tail])
    return float(low), float(high)


def paired_difference(
    a: np.ndarray,
    b: np.ndarray,
    resamples: int,
    seed: int,
    sets: Sequence[Hashable] | None = None,
    level: float = 0.95,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of a - b over the same problems with its interval, by column: (mean, low, high); ``sets`` as in :func:`bootstrap_means`."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise SageError(
            f"a paired difference needs the same problems on both sides, not shapes {a.shape} and {b.shape}"
        )
    low, high = bootstrap_interval(a - b, resamples, seed, sets, level)
    return mean_over_sets(a - b, sets), low, high


def mean_std(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds (ddof = 1; NaN for a single seed, which has no spread)."""
    values = np.asarray(values, dtype=np.float64)
    return float(values.mean()), float(values.std(ddof=1)) if values.size > 1 else float("nan")


def minimum_detectable_effect(
    differences: np.ndarray,
    sets: Sequence[Hashable] | None = None,
    power: float = 0.8,
    level: float = 0.95,
) -> np.ndarray:
    """The smallest mean difference that a paired comparison of this size would find with ``power``, by column.

    Normal approximation from the spread of the per-problem ``differences``, shape (problems, columns): (z_level + z_power)
    standard errors of their mean, with ``sets`` of that over data sets. A measured difference below it is not evidence of no
    difference. NaN where no problem differs: from no spread nothing can be estimated.
    """
    parts = _by_set(np.asarray(differences, dtype=np.float64), sets)
    if min(map(len, parts)) < 2:
        raise SageError(
            "a minimum detectable effect needs at least two problems"
            + ("" if sets is None else " of each data set")
        )
    factor = norm.ppf(0.5 + level / 2) + norm.ppf(power)
    error = np.sqrt(
        sum(part.reshape(len(part), -1).var(axis=0, ddof=1) / len(part) for part in parts)
    ) / len(parts)
    return np.where(error > 0, factor * error, np.nan)


def crossing_interval(
    a: np.ndarray,
    b: np.ndarray,
    ks: tuple[int, ...],
    resamples: int,
    seed: int,
    sets: Sequence[Hashable] | None = None,
    level: float = 0.95,
) -> dict[str, float]:
    """Where curve b passes curve a for the first time as k grows, on a log2 axis of k, with its bootstrap interval.

    Args:
        a, b: pass@k of the same problems, shape (problems, len(ks)).
        sets: as in :func:`bootstrap_means`.
    Returns:
        ``k`` (of the means; NaN when b never comes from at or below to above a), ``low`` and ``high`` (percentiles among the
        resamples that cross) and ``crosses``, the share of resamples that do: an interval without that share says nothing.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.shape[1] != len(ks):
        raise SageError(
            f"a crossing needs two curves of the same problems over {len(ks)} values of k, not shapes {a.shape} and {b.shape}"
        )
    means = bootstrap_means(b - a, resamples, seed, sets)
    found = np.array([_first_crossing(m, ks) for m in means])
    crossed = found[~np.isnan(found)]
    tail = (1 - level) / 2
    low, high = np.quantile(crossed, [tail, 1 - tail]) if len(crossed) else (np.nan, np.nan)
    return {
        "k": _first_crossing(mean_over_sets(b - a, sets), ks),
        "low": float(low),
        "high": float(high),
        "crosses": len(crossed) / resamples,
    }


def _first_crossing(difference: np.ndarray, ks: tuple[int, ...]) -> float:
    """k at which ``difference`` goes from at most 0 to above 0, interpolated in log2 k; NaN when it does not."""
    for i in range(1, len(ks)):
        if difference[i - 1] <= 0 < difference[i]:
            share = -difference[i - 1] / (difference[i] - difference[i - 1])
            return float(2 ** (np.log2(ks[i - 1]) + share * np.log2(ks[i] / ks[i - 1])))
    return float("nan")


def majority_at_k(
    answers: Sequence[Hashable | None], correct: Sequence[bool], k: int, draws: int, seed: int
) -> float:
    """maj@k of one problem: how often the most frequent answer among k samples, drawn without replacement, is correct.

    Samples without an answer (None) do not vote; a tie is broken at random, and k samples without any answer are wrong.
    Estimated from ``draws`` seeded draws; exact for k equal to the number of samples, up to ties.
    """
    if not 1 <= k <= len(answers) or len(answers) != len(correct):
        raise SageError(
            f"maj@{k} needs at least {k} samples with a verdict each, not {len(answers)} and {len(correct)}"
        )
    right = {}
    for answer, ok in zip(answers, correct, strict=True):
        if right.setdefault(answer, bool(ok)) != bool(ok):
            raise SageError(
                f"the answer {answer!r} is correct once and wrong once: verify answers before counting votes"
            )
    values = list(right)
    index = np.array([values.index(a) for a in answers])
    rng, wins = np.random.default_rng(seed), 0.0
    votable = np.array([v is not None for v in values])
    for _ in range(draws):
        votes = np.bincount(rng.permutation(index)[:k], minlength=len(values)) * votable
        if votes.max() > 0:
            leaders = np.flatnonzero(votes == votes.max())
            wins += right[values[rng.choice(leaders)]]
    return wins / draws


def unsolvable(problems: Sequence[str], c: np.ndarray) -> set[str]:
    """The k-rollout unsolvable set (exploration report, Section 2.1), k the samples drawn: problems with none correct."""
    return {p for p, correct in zip(problems, c, strict=True) if correct == 0}


def empirical_support(probabilities: dict[str, float], epsilon: float) -> set[str]:
    """supp_eps of Definition 4.1: the correct completions whose probability is above ``epsilon``."""
    return {
        completion for completion, probability in probabilities.items() if probability > epsilon
    }


def exclusive_regions(sets: dict[str, set[str]]) -> dict[tuple[str, ...], int]:
    """How many elements lie in exactly these sets, for every combination that occurs: what a Venn diagram or an UpSet plot shows."""
    members = sorted(set().union(*sets.values()))
    return dict(Counter(tuple(name for name, s in sets.items() if m in s) for m in members))


def distinct_answers(answers: Sequence[Hashable | None]) -> int:
    """Answer diversity of one problem: how many different answers its samples gave; None is no answer."""
    return len({a for a in answers if a is not None})


def ngram_redundancy(tokens: Sequence[Hashable], n: int = 3) -> float:
    """Share of n-grams that repeat an earlier one, 1 - distinct/all; 0 for a text shorter than n (exploration report, 4.4)."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
