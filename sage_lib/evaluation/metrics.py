"""The metrics of both papers as pure functions: pass@k, votes, diversity.

Their uncertainty is in :mod:`intervals`, whose functions can be had from here, too.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from sage_lib.errors import SageError
from sage_lib.evaluation.intervals import Array
from sage_lib.evaluation.intervals import bootstrap_interval as bootstrap_interval
from sage_lib.evaluation.intervals import crossing_interval as crossing_interval
from sage_lib.evaluation.intervals import mean_over_sets as mean_over_sets
from sage_lib.evaluation.intervals import mean_std as mean_std
from sage_lib.evaluation.intervals import minimum_detectable_effect as minimum_detectable_effect
from sage_lib.evaluation.intervals import paired_difference as paired_difference
from sage_lib.evaluation.intervals import times_as_much as times_as_much


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Array:
    """Unbiased pass@k per problem: 1 - C(n-c, k) / C(n, k), shape (problems,).

    Chen et al. 2021; exploration report, eq. 2. ``n`` samples per problem, shape (problems,) or one
    number for all, ``c`` of them correct. SageError where k is not in 1..n, or c not in 0..n.
    """
    samples, correct = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    if samples.size == 0:
        raise SageError("pass@k needs at least one problem")
    whole = (np.mod(samples, 1) == 0).all() and (np.mod(correct, 1) == 0).all()
    if not (whole and (correct >= 0).all() and (correct <= samples).all()):
        raise SageError("counts must be whole numbers with 0 <= c <= n")
    fewest = samples.min()
    if k < 1 or k > fewest:
        raise SageError(
            f"pass@{k} needs {max(k, 1)} samples for every problem and some have {fewest}: "
            "draw more, or ask for a smaller k"
        )
    # The chance that k draws in a row are wrong is a product of one factor a draw.
    drawn_before = np.arange(k)
    wrong = (samples - correct)[..., None].astype(np.float64)
    wrong_left = np.clip(wrong - drawn_before, 0, None)
    found: Array = 1.0 - np.prod(wrong_left / (samples[..., None] - drawn_before), axis=-1)
    return found


def pass_at_k_curve(n: ArrayLike, c: ArrayLike, ks: Sequence[int]) -> Array:
    """:func:`pass_at_k` of every problem for every k, shape (problems, len(ks))."""
    return np.stack([pass_at_k(n, c, k) for k in ks], axis=1)


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
