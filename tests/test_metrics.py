"""Metrics against enumeration, hand-computed cases and simulation."""

from itertools import combinations

import numpy as np
import pytest

from sage_lib import metrics
from sage_lib.errors import SageError


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_enumeration_of_all_draws(n):
    for c in range(n + 1):
        correct = [i < c for i in range(n)]
        for k in range(1, n + 1):
            draws = list(combinations(correct, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert metrics.pass_at_k([n], [c], k)[0] == pytest.approx(expected, abs=1e-12)


def test_pass_at_1_is_the_mean_over_problems_of_their_own_share():
    # Two problems, 4 samples each: the last problem's sum over the number of problems would give 3/2.
    n, c = np.array([4, 4]), np.array([1, 3])
    assert metrics.pass_at_k(n, c, 1).mean() == pytest.approx(0.5)


def test_large_counts_stay_exact():
    assert metrics.pass_at_k([256], [0], 256)[0] == 0
    assert metrics.pass_at_k([256], [1], 256)[0] == 1
    assert metrics.pass_at_k([256], [1], 128)[0] == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k", "words"), [
    ([4, 3], [0, 0], 4, "pass@4 needs"), ([4], [5], 1, "0 <= c <= n"), ([4], [-1], 1, "0 <= c <= n"), ([4], [0.5], 1, "whole"), ([4], [1], 0, "pass@0"), ([], [], 1, "at least one"),
])
def test_impossible_counts_are_refused(n, c, k, words):
    with pytest.raises(SageError, match=words):
        metrics.pass_at_k(n, c, k)


def test_bootstrap_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng, hits, trials = np.random.default_rng(0), 0, 300
    for trial in range(trials):
        low, high = metrics.bootstrap_interval(rng.beta(0.5, 1.5, size=(60, 1)), 400, trial)
        hits += low[0] <= 0.25 <= high[0]
    assert 0.90 <= hits / trials <= 0.98


def test_bootstrap_spread_is_the_standard_error_of_the_mean():
    values = np.random.default_rng(1).normal(size=(50, 2))
    spread = metrics.bootstrap_means(values, 20000, 3).std(0)
    assert spread == pytest.approx(values.std(0) / np.sqrt(50), rel=0.03)


def test_ratio_interval_resamples_problems_not_samples():
    # All of a problem's samples agree: the interval must be as wide as that of 10 problems, not of 1,000 samples.
    counts, totals = np.array([100] * 2 + [0] * 8), np.full(10, 100)
    low, high = metrics.ratio_interval(counts, totals, 4000, 0)
    assert low == 0 and high >= 0.4


def test_paired_difference_cancels_what_problems_share():
    base = np.linspace(0, 1, 40)[:, None]
    mean, low, high = metrics.paired_difference(base + 0.1, base, 500, 0)
    assert mean[0] == pytest.approx(0.1) and low[0] == pytest.approx(0.1) and high[0] == pytest.approx(0.1)
    with pytest.raises(SageError, match="same problems"):
        metrics.paired_difference(base, base[:5], 10, 0)


def test_one_seed_has_no_spread():
    assert metrics.mean_std([0.5])[0] == 0.5 and np.isnan(metrics.mean_std([0.5])[1])
    assert metrics.mean_std([0.2, 0.4])[1] == pytest.approx(np.sqrt(0.02))
