"""Metrics against enumeration, hand-computed cases and simulation."""

import itertools
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_enumeration_of_all_draws(n):
    for c in range(n + 1):
        correct = [i < c for i in range(n)]
        for k in range(1, n + 1):
            draws = list(combinations(correct, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert metrics.pass_at_k([n], [c], k)[0] == pytest.approx(expected, abs=1e-12)


def test_pass_at_1_is_the_mean_over_problems_of_their_own_share():
    # Two problems, 4 samples each: the last one's sum over the number of problems would give 3/2.
    n, c = np.array([4, 4]), np.array([1, 3])
    assert metrics.pass_at_k(n, c, 1).mean() == pytest.approx(0.5)


def test_large_counts_stay_exact():
    assert metrics.pass_at_k([256], [0], 256)[0] == 0
    assert metrics.pass_at_k([256], [1], 256)[0] == 1
    assert metrics.pass_at_k([256], [1], 128)[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("n", "c", "k", "words"),
    [
        ([4, 3], [0, 0], 4, "pass@4 needs"),
        ([4], [5], 1, "0 <= c <= n"),
        ([4], [-1], 1, "0 <= c <= n"),
        ([4], [0.5], 1, "whole"),
        ([4], [1], 0, "pass@0"),
        ([], [], 1, "at least one"),
    ],
)
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
    # All of a problem's samples agree: the interval must be as wide as that of 10 problems.
    counts, totals = np.array([100] * 2 + [0] * 8), np.full(10, 100)
    low, high = metrics.ratio_interval(counts, totals, 4000, 0)
    assert low == 0 and high >= 0.4, "and not that of 1,000 samples"


def test_paired_difference_cancels_what_problems_share():
    base = np.linspace(0, 1, 40)[:, None]
    for number in metrics.paired_difference(base + 0.1, base, 500, 0):
        assert number == pytest.approx(0.1)
    with pytest.raises(SageError, match="same problems"):
        metrics.paired_difference(base, base[:5], 10, 0)


def test_data_sets_weigh_the_same_whatever_their_size():
    """The paper's "Avg", against the mean and the variance of independent sets."""
    rng = np.random.default_rng(1)
    parts = [rng.beta(1, 2, (n, 1)) for n in (60, 40, 134)]
    values, sets = np.concatenate(parts), [f"set {i}" for i, p in enumerate(parts) for _ in p]
    shuffled = rng.permutation(len(values))  # problems of the sets in any order
    ours, names = values[shuffled], [sets[i] for i in shuffled]
    mean, low, high = metrics.paired_difference(ours, ours * 0, 20000, 0, names)
    assert mean[0] == pytest.approx(np.mean([p.mean() for p in parts]))
    error = np.sqrt(sum(p.var(ddof=1) / len(p) for p in parts)) / 3
    assert (high[0] - low[0]) / (2 * 1.96) == pytest.approx(error, rel=0.03)
    detectable = (1.959964 + 0.841621) * error
    assert metrics.minimum_detectable_effect(values, sets)[0] == pytest.approx(detectable, rel=1e-5)
    without_a_name = metrics.bootstrap_means(parts[0], 50, 3)
    assert np.array_equal(without_a_name, metrics.bootstrap_means(parts[0], 50, 3, ["one"] * 60))
    with pytest.raises(SageError, match="two problems of each data set"):
        metrics.minimum_detectable_effect(values[:3], ["a", "a", "b"])


def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(SageError, match="at least one problem"):
        metrics.bootstrap_means(np.zeros((0, 2)), 10, 0)
    with pytest.raises(SageError, match="3 problems need as many names of data sets, not 2"):
        metrics.mean_over_sets(np.zeros((3, 1)), ["a", "b"])


def test_verdicts_and_single_columns_are_accepted():
    ours, theirs = [True, True, False, True], [False, True, False, False]
    mean, low, high = metrics.paired_difference(ours, theirs, 200, 0)
    assert mean.shape == low.shape == high.shape == (1,) and mean[0] == 0.5


def test_one_seed_has_no_spread():
    assert metrics.mean_std([0.5])[0] == 0.5 and np.isnan(metrics.mean_std([0.5])[1])
    assert metrics.mean_std([0.2, 0.4])[1] == pytest.approx(np.sqrt(0.02))


def test_minimum_detectable_effect_is_found_with_its_power():
    rng = np.random.default_rng(0)
    of_4000 = metrics.minimum_detectable_effect(rng.normal(0, 1, (4000, 1)))[0]
    of_50 = of_4000 * np.sqrt(4000 / 50)
    found = []
    for differences in rng.normal(of_50, 1, (4000, 50)):
        error = differences.std(ddof=1) / np.sqrt(50)
        found.append(abs(differences.mean()) > 1.96 * error)
    assert np.mean(found) == pytest.approx(0.8, abs=0.03)
    with pytest.raises(SageError, match="at least two"):
        metrics.minimum_detectable_effect(np.zeros((1, 2)))


def test_crossing_of_two_curves_and_its_certainty():
    ks = (1, 4, 16)
    a, b = np.tile([0.5, 0.6, 0.7], (40, 1)), np.tile([0.3, 0.6 + 1e-9, 0.9], (40, 1))
    found = metrics.crossing_interval(a, b, ks, 200, 0)
    assert found["k"] == pytest.approx(4, rel=1e-6) and found["crosses"] == 1
    assert found["low"] == pytest.approx(found["high"])
    never = metrics.crossing_interval(b, a, ks, 200, 0)
    assert np.isnan(never["k"]) and never["crosses"] == 0 and np.isnan(never["low"])
    flat, rising = np.tile([0.5, 0.5, 0.5], (2, 1)), np.tile([0.4, 0.4, 0.6], (2, 1))
    halfway = metrics.crossing_interval(flat, rising, ks, 10, 0)
    assert halfway["k"] == pytest.approx(8), "halfway between 4 and 16 on a log axis"
    with pytest.raises(SageError, match="same problems"):
        metrics.crossing_interval(a, b[:3], ks, 10, 0)


def test_majority_vote_against_every_subset():
    answers, correct = ["4", "4", "5", None, "5", "5"], [True, True, False, False, False, False]
    for k in (1, 2, 3, 5):
        exact = []
        for subset in itertools.combinations(range(6), k):
            votes = Counter(answers[i] for i in subset if answers[i] is not None)
            most = max(votes.values(), default=0)
            best = [answer for answer, n in votes.items() if n == most]
            exact.append(np.mean([answer == "4" for answer in best]) if best else 0.0)
        found = metrics.majority_at_k(answers, correct, k, 20_000, 1)
        assert found == pytest.approx(np.mean(exact), abs=0.015)
    assert metrics.majority_at_k([None, None], [False, False], 2, 10, 0) == 0
    with pytest.raises(SageError, match="maj@7"):
        metrics.majority_at_k(answers, correct, 7, 10, 0)
    with pytest.raises(SageError, match="correct once and wrong once"):
        metrics.majority_at_k(["1", "1"], [True, False], 1, 10, 0)


def test_unsolvable_sets_and_their_regions():
    sets = {
        "base": metrics.unsolvable(["a", "b", "c"], np.array([0, 0, 3])),
        "grpo": metrics.unsolvable(["a", "b", "c"], np.array([0, 1, 0])),
    }
    assert sets == {"base": {"a", "b"}, "grpo": {"a", "c"}}
    assert metrics.exclusive_regions(sets) == {("base", "grpo"): 1, ("base",): 1, ("grpo",): 1}


def test_diversity_and_redundancy_by_hand():
    assert metrics.distinct_answers(["1", "1", None, "2"]) == 2
    assert metrics.distinct_answers([None]) == 0
    assert metrics.ngram_redundancy(list("abcabca")) == pytest.approx(1 - 3 / 5)
    assert metrics.ngram_redundancy(["a", "b"]) == 0


def test_empirical_support_is_above_epsilon_not_at_it():
    assert metrics.empirical_support({"a": 0.2, "b": 0.1, "c": 0.01}, 0.1) == {"a"}


def test_no_spread_gives_no_detectable_effect():
    effect = metrics.minimum_detectable_effect(np.array([[0.0, 0.1], [0.0, -0.1], [0.0, 0.2]]))
    assert np.isnan(effect[0]) and effect[1] > 0
