"""Differences, intervals and outcomes against scipy, closed forms and planted values."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.report import inference
from sage_lib.report.inference import (
    AGREES,
    CANNOT_TELL,
    DISAGREES,
    NOT_RUN,
    NOT_SEEN,
    SMALLER,
    Values,
)


def planted(method, values, seeds, sets="aabb"):
    return Values(method, np.asarray(values, float), ["x"], list(sets), list(seeds))


def by_seed(method, numbers, seeds):
    """Values that are the same for all problems, but for what problems differ by."""
    one = np.asarray(numbers, float)[:, None, None] + np.array([0.1, 0.2, 0.6, 0.8])[:, None]
    return planted(method, one, seeds)


def test_values_of_a_frame_stand_by_seed_and_problem_whatever_its_order():
    rows = [
        {"method": "m", "seed": seed, "dataset": "d", "problem": problem, "x": 10 * seed + number}
        for seed in (2, 1)
        for number, problem in enumerate("pq")
    ]
    again = [{**rows[0], "x": x} for x in (30, np.nan)]  # the mean of the numbers there are
    frame = pd.DataFrame([*rows, *again]).astype({"seed": "Int64"})
    found = Values.by_method(frame, ["x"])["m"]
    assert found.seeds == [1, 2] and found.values[..., 0].tolist() == [[10, 11], [25, 21]]
    lacking = frame.iloc[:3].assign(method="n", seed=[1, 1, 2])
    with pytest.raises(SageError, match="n was evaluated on 1 problems and others on 2"):
        Values.by_method(pd.concat([frame, lacking]), ["x"])


def test_seeds_are_paired_by_number_and_the_interval_over_them_is_scipys():
    ours = by_seed("a", [0.5, 0.9, 0.7, 0.1], [4, 2, 3, 9])
    theirs = by_seed("b", [0.3, 0.1, 0.2], [2, 3, 4])
    [row] = inference.difference(ours, theirs).to_dict("records")
    apart = [0.9 - 0.3, 0.7 - 0.1, 0.5 - 0.2]
    assert row["difference"] == pytest.approx(np.mean(apart)) and row["seeds"] == 3
    known = stats.ttest_1samp(apart, 0).confidence_interval(0.95)
    assert (row["low_seeds"], row["high_seeds"]) == pytest.approx((known.low, known.high))
    assert row["ours"] == pytest.approx(np.mean([0.5, 0.9, 0.7]) + (0.15 + 0.7) / 2)
    wide = metrics.paired_difference(ours.values[[0, 1, 2]], theirs.values[[2, 0, 1]], ours.sets)
    assert (row["low"], row["high"]) == pytest.approx((wide[1][0], wide[2][0]))


def test_methods_without_a_common_seed_are_refused_and_the_base_goes_with_each():
    ours, theirs = by_seed("a", [0.5, 0.9], [1, 2]), by_seed("b", [0.3], [3])
    with pytest.raises(SageError, match="a and b share no seed"):
        inference.difference(ours, theirs)
    base = by_seed("base", [0.2], [None])
    [row] = inference.difference(ours, base).to_dict("records")
    assert row["difference"] == pytest.approx(0.5) and row["seeds"] == 2
    [one] = inference.difference(theirs, base).to_dict("records")
    assert np.isnan([one["detectable"], one["low_seeds"]]).all(), "how seeds differ is not known"


def test_what_could_be_seen_is_what_the_differences_say():
    rng = np.random.default_rng(0)
    ours = planted("a", rng.random((4, 4, 1)), range(4))
    theirs = planted("b", rng.random((4, 4, 1)), range(4))
    row = inference.difference(ours, theirs).iloc[0]
    known = metrics.minimum_detectable_effect(ours.values - theirs.values, ours.sets)
    assert row["detectable"] == pytest.approx(known[0])
    lone = planted("a", rng.random((4, 4, 1)), range(4), sets="aaab")
    assert np.isnan(inference.difference(lone, theirs).iloc[0]["detectable"]), "of one problem"


def test_differences_leave_out_the_reference_the_base_and_what_was_not_evaluated():
    values = {m: by_seed(m, [0.1, 0.2], [1, 2]) for m in ("grpo", "x", "y")}
    values["base"] = by_seed("base", [0.1], [None])
    assert list(inference.differences(values, "grpo")["method"]) == ["x", "y"]
    assert list(inference.differences(values, "base", ["y", "z"])["method"]) == ["y"]
    assert inference.differences(values, "grpo", []).empty, "none is not all"
    with pytest.raises(SageError, match="z was not evaluated: choose one of grpo, x, y, base"):
        inference.differences(values, "z")


@pytest.mark.parametrize(
    ("expects", "low", "high", "expected"),
    [
        ("above", 0.001, 0.02, AGREES),
        ("above", 0.001, 0.008, SMALLER),  # the estimate is 0.0045
        ("above", 0.001, 0.004, SMALLER),
        ("above", -0.01, 0.004, DISAGREES),
        ("above", -0.02, -0.006, DISAGREES),
        ("above", -0.01, 0.02, CANNOT_TELL),
        ("above", np.nan, np.nan, CANNOT_TELL),
        ("below", -0.02, -0.001, AGREES),
        ("below", -0.008, -0.001, SMALLER),
        ("below", -0.004, 0.01, DISAGREES),
        ("equal", -0.004, 0.004, AGREES),
        ("equal", 0.001, 0.004, AGREES),  # real and smaller than the margin: what it claims
        ("equal", 0.006, 0.02, DISAGREES),
        ("equal", -0.02, -0.006, DISAGREES),
        ("equal", 0.001, 0.02, CANNOT_TELL),
        ("not above", -0.02, 0.004, AGREES),
        ("not above", 0.001, 0.004, AGREES),
        ("not above", 0.001, 0.02, DISAGREES),
        ("not above", 0.001, 0.008, SMALLER),
        ("not above", -0.001, 0.02, CANNOT_TELL),
        ("not below", -0.004, 0.02, AGREES),
        ("not below", -0.02, -0.001, DISAGREES),
    ],
)
def test_what_an_interval_says_of_an_expectation(expects, low, high, expected):
    assert inference.outcome(expects, low, high, margin=0.005) == expected


def test_no_interval_agrees_with_two_expectations_that_exclude_each_other():
    for low in np.linspace(-0.02, 0.02, 41):
        for high in np.linspace(low, 0.03, 21):
            found = {e: inference.outcome(e, low, high, 0.005) for e in ("above", "equal", "below")}
            assert list(found.values()).count(AGREES) <= 1 and SMALLER not in {found["equal"]}
            against = inference.outcome("not above", low, high, 0.005)
            assert (against == DISAGREES) == (found["above"] == AGREES)


@pytest.mark.parametrize("expects", ["above", "below", "equal", "not above", "not below"])
def test_an_outcome_that_is_lost_as_intervals_widen_does_not_come_back(expects):
    """So an error rate can be searched by halving."""
    for middle in np.linspace(-0.01, 0.01, 21):
        said = [
            inference.outcome(expects, middle - half, middle + half, 0.005)
            for half in np.linspace(0.0003, 0.03, 100)
        ]
        changes = sum(a != b for a, b in pairwise(said))
        assert changes == len(set(said)) - 1, (middle, said)


def test_the_error_rate_of_a_small_gain_is_that_at_which_it_may_be_none():
    """Of one interval over 5 seeds: its p-value against 0."""
    gains = np.array([1.0, 2.0, 3.0, 4.0, 5.0]) / 1000
    mean, error = gains.mean(), gains.std(ddof=1) / np.sqrt(5)

    def at(level):
        half = stats.t.ppf(0.5 + level / 2, 4) * error
        return {"low": mean - half, "high": mean + half, "seeds": 5}

    assert inference.row_outcome("above", at(0.95), 0.01) == SMALLER
    known = stats.ttest_1samp(gains, 0).pvalue
    assert inference.error_rate("above", at, 0.01) == pytest.approx(known, rel=1e-3)
    assert inference.row_outcome("above", at(1 - 0.99 * known), 0.01) == DISAGREES, (
        "no gain is left"
    )


def test_each_outcome_is_judged_at_the_rate_of_its_step():
    """Holm's example: 0.01 and 0.02 stand at 0.05/4 and 0.05/3, 0.04 fails at 0.05/2."""
    rates = [0.04, 0.01, 0.045, 0.0166]
    steps = [0.05 / 2, 0.05 / 4, 0.05 / 2, 0.05 / 3]
    assert inference.holm(rates) == pytest.approx(steps)
    stands = [rate <= step for rate, step in zip(rates, inference.holm(rates), strict=True)]
    assert stands == [False, True, False, True]
    assert inference.holm([0.03, 0.03]) == [0.025, 0.025], "the first fails, so the second does"
    assert inference.holm([]) == []


CLEAR = {"low": 0.1, "high": 0.2, "low_seeds": 0.1, "high_seeds": 0.2, "seeds": 3}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (0.001, 0.002, CANNOT_TELL),
        (0.999, 0.998, CANNOT_TELL),
        (0.5, 0.0, AGREES),
        (1.0, 0.5, AGREES),
        (3.0, 2.0, AGREES),  # no shares, which have no ceiling
    ],
)
def test_a_floor_or_ceiling_of_both_methods_decides_nothing_and_of_one_it_does(
    ours, theirs, expected
):
    row = {**CLEAR, "ours": ours, "theirs": theirs}
    assert inference.row_outcome("above", row, margin=0.005) == expected


def test_few_seeds_decide_nothing_and_the_wider_interval_judges():
    assert inference.row_outcome("above", CLEAR, 0.005) == AGREES
    assert inference.row_outcome("above", {**CLEAR, "seeds": 2}, 0.005) == CANNOT_TELL
    assert inference.row_outcome("above", {**CLEAR, "low_seeds": -0.1}, 0.005) == CANNOT_TELL
    assert inference.row_outcome("above", {**CLEAR, "low": -0.1}, 0.005) == CANNOT_TELL
    narrow = {**CLEAR, "low": -0.001, "high": 0.004, "low_seeds": 0.001, "high_seeds": 0.002}
    assert inference.deciding_interval(narrow) == (-0.001, 0.004)
    assert inference.row_outcome("above", narrow, 0.005) == DISAGREES, "small, and perhaps none"
    assert inference.row_outcome("above", {**CLEAR, "low_seeds": np.nan}, 0.005) == CANNOT_TELL
    logged = {"low": 0.1, "high": 0.2, "seeds": 3}
    assert inference.row_outcome("above", logged, 0.005) == AGREES, "one interval, over seeds"


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([AGREES, AGREES], AGREES),
        ([AGREES, DISAGREES], DISAGREES),
        ([AGREES, CANNOT_TELL], CANNOT_TELL),
        ([AGREES, NOT_RUN], NOT_RUN),
        ([DISAGREES, NOT_RUN], DISAGREES),
        ([AGREES, SMALLER], SMALLER),
        ([SMALLER, CANNOT_TELL], CANNOT_TELL),
        ([SMALLER, NOT_SEEN], NOT_SEEN),
        ([], CANNOT_TELL),
    ],
)
def test_a_claim_agrees_only_where_all_its_comparisons_do(outcomes, expected):
    assert inference.worst_outcome(outcomes) == expected


def test_seeds_left_out_are_counted_where_the_outcome_stays():
    """Of five gains the interval over seeds has 0 once a large one is left out."""
    gains = [0.02, 0.021, 0.022, 0.023, -0.01]
    zero = by_seed("b", [0.0] * 5, range(5))
    ours = by_seed("a", gains, range(5))
    whole = inference.row_outcome("above", inference.difference(ours, zero).iloc[0], 0.005)
    known = []
    for left in range(5):
        rest = [gain for place, gain in enumerate(gains) if place != left]
        low, high = stats.ttest_1samp(rest, 0).confidence_interval(0.95)
        known.append(inference.outcome("above", low, high, 0.005) == whole)

    def at(*sides):
        return inference.difference(*sides).iloc[0]

    assert inference.stable_seeds(at, ours, zero, "above", 0.005) == sum(known) == 4
    assert ours.at_seeds([4, 1]).seeds == [1, 4]
    base = by_seed("base", [0.2], [None])
    assert base.at_seeds([1]) is base


def test_the_base_goes_with_a_run_as_the_one_that_it_starts_from():
    own = {1: np.full((4, 1), 0.1), 2: np.full((4, 1), 0.5)}
    base = Values("base", np.full((1, 4, 1), 0.3), ["x"], list("aabb"), [None], own)
    (_, of_base), seeds = inference.at_common_seeds(by_seed("a", [0.0, 0.0], [2, 1]), base)
    assert seeds == [2, 1] and of_base[:, 0, 0].tolist() == [0.5, 0.1], "not their mean"
