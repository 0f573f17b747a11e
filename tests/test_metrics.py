"""Metrics against enumeration, hand-computed cases and simulation."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_1samp
from scipy.stats import t as student

from sage_lib.errors import SageError
from sage_lib.evaluation import bands, metrics


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_enumeration_of_all_draws(n):
    for c in range(n + 1):
        correct = [i < c for i in range(n)]
        for k in range(1, n + 1):
            draws = list(combinations(correct, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert metrics.pass_at_k([n], [c], k)[0] == pytest.approx(expected, abs=1e-12)


def test_large_counts_stay_exact():
    assert metrics.pass_at_k([256], [0], 256)[0] == 0
    assert metrics.pass_at_k([256], [1], 256)[0] == 1
    assert metrics.pass_at_k([256], [1], 128)[0] == pytest.approx(0.5)


def test_impossible_counts_are_refused():
    for n, c, k, words in (
        ([4, 3], [0, 0], 4, "pass@4 needs"),
        ([4], [5], 1, "0 <= c <= n"),
        ([4], [-1], 1, "0 <= c <= n"),
        ([4], [0.5], 1, "whole"),
        ([4], [1], 0, "k of 1 or more, not 0"),
        ([4], [1], 1.5, "k of 1 or more, not 1.5"),
        ([4], [1], np.nan, "k of 1 or more, not nan"),
        ([np.nan], [1], 1, "whole"),
        ([], [], 1, "at least one"),
    ):
        with pytest.raises(SageError, match=words):
            metrics.pass_at_k(n, c, k)
    with pytest.raises(SageError, match="at least one k"):
        metrics.pass_at_k_curve([4], [1], [])
    assert metrics.pass_at_k([4], [1], 2.0).tolist() == [0.5], "a whole number of another type"


@pytest.mark.parametrize(("n", "c"), [(8, 0), (8, 1), (24, 5), (60, 60)])
def test_the_interval_of_a_share_is_that_of_clopper_and_pearson(n, c):
    low, high = metrics.bootstrap_interval([1] * c + [0] * (n - c), 40_000, 0)
    exact = binomtest(c, n).proportion_ci(method="exact")
    assert (low[0], high[0]) == pytest.approx((exact.low, exact.high), abs=0.006)


def test_problems_that_all_agree_leave_an_interval_with_width():
    for value in (0.0, 0.3, 1.0):
        low, high = metrics.bootstrap_interval(np.full(8, value), 4000, 0)
        assert low[0] <= value <= high[0] and high[0] - low[0] > 0.2
    for value in (3.0, -0.1, np.nan):
        with pytest.raises(SageError, match=f"from 0 to 1 of every problem, not {value:g}"):
            metrics.bootstrap_interval([0.1, value], 10, 0)


def test_with_many_problems_the_interval_is_that_of_the_mean():
    values = np.random.default_rng(1).beta(1, 2, (2000, 2))
    low, high = metrics.bootstrap_interval(values, 4000, 3)
    error = values.std(axis=0, ddof=1) / np.sqrt(2000)
    assert (high - low) / (2 * 1.96) == pytest.approx(error, rel=0.05)


def test_paired_difference_cancels_what_problems_share():
    base = np.linspace(0, 1, 40)[:, None]
    shift = np.tile([0.05, 0.15], 20)[:, None]
    mean, low, high = metrics.paired_difference(base + shift, base)
    assert mean == pytest.approx(0.1)
    assert (low[0], high[0]) == pytest.approx(ttest_1samp(shift[:, 0], 0).confidence_interval())
    with pytest.raises(SageError, match="same problems"):
        metrics.paired_difference(base, base[:5])
    verdicts, others = [True, True, False, True], [False, True, False, False]
    assert metrics.paired_difference(verdicts, others)[0].tolist() == [0.5]


def test_a_column_with_a_missing_number_is_missing_and_no_other():
    ours = np.random.default_rng(0).random((3, 20, 2))
    ours[1, 4, 0] = np.nan
    found = np.array(metrics.paired_difference(ours, 0 * ours[0]))
    assert np.isnan(found[:, 0]).all() and np.isfinite(found[:, 1]).all()


def test_equal_differences_have_no_interval():
    base = np.linspace(0, 1, 40)[:, None]
    for ours in (base, base + 0.1):
        mean, low, high = metrics.paired_difference(ours, base)
        assert mean == pytest.approx(ours[0] - base[0]) and np.isnan([low, high]).all()
        assert np.isnan(metrics.minimum_detectable_effect(ours - base)).all()
    effect = metrics.minimum_detectable_effect(np.array([[0.0, 0.1], [0.0, -0.1], [0.0, 0.2]]))
    assert np.isnan(effect[0]) and effect[1] > 0


def test_seeds_alone_give_the_t_interval_of_their_means():
    """Where problems hardly differ, what is left is Student's interval over seeds."""
    rng = np.random.default_rng(0)
    of_seeds = np.array([0.10, 0.13, 0.17])[:, None, None]
    ours = of_seeds + rng.normal(0, 1e-6, (3, 200, 1))
    _, low, high = metrics.paired_difference(ours, np.zeros((200, 1)))
    expected = ttest_1samp(of_seeds.ravel(), 0).confidence_interval()
    assert (low[0], high[0]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5, 2.0])
def test_two_sources_and_their_noise_by_hand(noise):
    """A design of 3 seeds and 4 problems whose parts can be worked out with pencil and paper. The
    rest, whose rows and columns add up to 0, gives the mean the variance ``noise``."""
    seeds, problems = np.array([-1.0, 0.0, 1.0]), np.array([-3.0, -1.0, 1.0, 3.0])
    rest = np.outer([1.0, -2.0, 1.0], [1.0, -1.0, -1.0, 1.0])
    freedom = 2 * 3
    rest *= np.sqrt(noise * 12 * freedom / (rest**2).sum())
    d = (10 + seeds[:, None] + problems + rest)[..., None]
    of_seeds, of_problems = 1 / 3, max((20 / 3) / 4 - noise, 0)
    doubt_of_seeds = of_seeds**2 / 2 if of_seeds > noise else noise**2 / freedom
    error = np.sqrt(max(of_seeds, noise) + of_problems)
    degrees = error**4 / (doubt_of_seeds + of_problems**2 / 3)
    mean, low, high = metrics.paired_difference(d, np.zeros_like(d))
    half = student.ppf(0.975, degrees) * error
    assert (mean[0], low[0], high[0]) == pytest.approx((10, 10 - half, 10 + half))


def test_a_base_without_seeds_stays_and_other_numbers_of_seeds_are_refused():
    ours = np.random.default_rng(0).random((3, 20, 2))
    base = ours[0]
    alone, repeated = (metrics.paired_difference(ours, b) for b in (base, np.stack([base] * 3)))
    assert np.array_equal(alone, repeated)
    with pytest.raises(SageError, match="not 3 and 2"):
        metrics.paired_difference(ours, ours[:2])


def test_data_sets_weigh_the_same_whatever_their_size():
    """The paper's "Avg", against the mean and the variance of independent sets."""
    rng = np.random.default_rng(1)
    parts = [rng.beta(1, 2, (n, 1)) for n in (60, 40, 134)]
    values, sets = np.concatenate(parts), [f"set {i}" for i, p in enumerate(parts) for _ in p]
    shuffled = rng.permutation(len(values))  # problems of the sets in any order
    ours, names = values[shuffled], [sets[i] for i in shuffled]
    mean, low, high = metrics.paired_difference(ours, ours * 0, names)
    assert mean[0] == pytest.approx(np.mean([p.mean() for p in parts]))
    error = np.sqrt(sum(p.var(ddof=1) / len(p) for p in parts)) / 3
    assert (high[0] - low[0]) / (2 * 1.96) == pytest.approx(error, rel=0.02)
    detectable = (1.959964 + 0.841621) * error
    assert metrics.minimum_detectable_effect(values, sets)[0] == pytest.approx(detectable, rel=0.02)
    several = np.stack([ours, ours])  # the seeds do not differ: the same as one
    assert np.allclose(metrics.paired_difference(several, several * 0, names), (mean, low, high))
    with pytest.raises(SageError, match="two problems of each data set"):
        metrics.minimum_detectable_effect(values[:3], ["a", "a", "b"])


def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(SageError, match="at least one problem"):
        metrics.bootstrap_interval(np.zeros((0, 2)), 10, 0)
    with pytest.raises(SageError, match="at least two"):
        metrics.minimum_detectable_effect(np.zeros((1, 2)))
    with pytest.raises(SageError, match="3 problems need as many names of data sets, not 2"):
        metrics.mean_over_sets(np.zeros((3, 1)), ["a", "b"])


def test_seeds_that_agree_by_luck_leave_the_error_of_the_problems():
    noise = np.random.default_rng(5).normal(size=(3, 50, 1))
    lucky = noise - noise.mean(axis=1, keepdims=True)  # all seeds have the same mean, 0
    _, low, high = metrics.paired_difference(lucky, np.zeros_like(lucky))
    alone = ttest_1samp(lucky.mean(axis=0)[:, 0], 0).confidence_interval(0.95)
    assert (low[0], high[0]) == pytest.approx((alone.low, alone.high), rel=0.05)


def test_an_interval_of_shares_has_no_end_beyond_them_and_none_from_two_seeds():
    values = np.random.default_rng(0).beta(0.2, 2.0, (3, 6, 2))
    mean, low, high = metrics.paired_difference(values, 0 * values)
    assert (low < 0).any()
    found = metrics.interval_of_shares(values)
    assert np.array_equal(found, (mean, np.maximum(low, 0), np.minimum(high, 1)))
    mean, low, high = metrics.interval_of_shares(values[:2])
    assert np.isnan([low, high]).all() and mean == pytest.approx(values[:2].mean(axis=(0, 1)))
    assert np.isfinite(metrics.interval_of_shares(values[0])).all(), "one seed: over problems"


def test_crossing_of_two_curves_and_its_certainty():
    ks, noise = (1, 4, 16), np.random.default_rng(0).normal(0, 1e-3, (40, 1))
    a, b = np.tile([0.5, 0.6, 0.7], (40, 1)), np.tile([0.3, 0.6 + 1e-9, 0.9], (40, 1)) + noise
    found = bands.crossing_interval(a, b - noise.mean(), ks)
    assert found["k"] == pytest.approx(4, rel=1e-3) and found["crosses"]
    assert 3.5 < found["low"] < 4 < found["high"] < 4.5
    never = bands.crossing_interval(b, a, ks)
    assert np.isnan([never["k"], never["low"], never["high"]]).all() and not never["crosses"]
    wide = np.random.default_rng(0).normal(0, 1, (40, 1))
    unsure = bands.crossing_interval(a, b + wide - wide.mean(), ks)
    assert unsure["k"] == pytest.approx(4, rel=0.1) and not unsure["crosses"]
    assert np.isnan(unsure["low"]) and np.isnan(unsure["high"])
    flat, rising = np.tile([0.5, 0.5, 0.5], (2, 1)), np.tile([0.4, 0.4, 0.6], (2, 1))
    halfway = bands.crossing_interval(flat, rising, ks)
    assert halfway["k"] == pytest.approx(8), "halfway between 4 and 16 on a log axis"
    touching = np.tile([0.5, 0.5, 0.6], (2, 1))
    assert bands.crossing_interval(flat, touching, ks)["k"] == 4, "equal until there"
    twice = np.tile([0.7, 0.3, 0.7], (40, 1)) + noise  # above, below, and above again
    found = bands.crossing_interval(np.tile(flat[:1], (40, 1)), twice - noise.mean(), ks)
    assert 7 < found["low"] < found["k"] < found["high"] < 9
    with pytest.raises(SageError, match="same problems"):
        bands.crossing_interval(a, b[:3], ks)


def test_a_band_is_never_narrower_than_its_intervals():
    """Columns that are alike have nothing to correct for, and the simulated level scatters about
    that of the intervals."""
    values = np.random.default_rng(0).normal(size=(40, 1)) * [0.01, 0.011, 0.012]
    levels = [
        bands.simultaneous_band(values, 0 * values, draws=500, seed=seed)[2] for seed in range(8)
    ]
    assert min(levels) >= 0.95
