"""The benchmarks of growth: powers by hand, and what a measuring process says."""

import numpy as np
import pandas as pd
import pytest

from sage_lib.errors import SageError
from sage_lib.pipeline import growth
from sage_lib.report import growth_figures, measured


def curve(name, sizes, seconds, peaks):
    columns = {"curve": name, "size": sizes, "CPU seconds": seconds, "peak MB": peaks}
    return pd.DataFrame(columns)


@pytest.fixture
def table():
    return pd.concat(
        [
            curve("linear, then quadratic", [1, 2, 4, 8], [1.0, 2.0, 8.0, 32.0], [5, 10, 20, 40]),
            curve("flat", [10, 20, 40], [3.0, 3.0, 3.0], [0.1, 0.2, 4.0]),
        ],
        ignore_index=True,
    )


def test_powers_are_those_of_a_doubling_and_stay_within_their_curve(table):
    found = growth.with_powers(table)
    nan = np.nan
    np.testing.assert_allclose(found["power"], [nan, 1, 2, 2, nan, 0, 0])
    np.testing.assert_allclose(found["memory power"], [nan, 1, 1, 1, nan, nan, nan])


def test_a_curve_is_linear_up_to_its_first_steeper_doubling(table):
    found = growth_figures.last_powers(growth.with_powers(table))
    assert found["linear"].tolist() == [2, 40] and found["largest"].tolist() == [8, 40]
    assert found["power"].tolist() == pytest.approx([2, 0])
    assert found["memory power"].tolist() == pytest.approx([1, np.nan], nan_ok=True)
    bent = curve("bent", [1, 2, 4, 8], [1.0, 2.0, 4.0, 4.0], [5, 9, 7, 12])
    found = growth_figures.last_powers(growth.with_powers(bent)).loc["bent"]
    assert found["power"] == pytest.approx(0.5), "over three sizes, not the last two"
    assert np.isnan(found["memory power"]), "a peak that falls on the way grows with no power"


def test_a_process_measures_its_cases_and_a_failure_says_what():
    few, many = growth.measure("metrics", [{"problems": n, "k": 16} for n in (10, 20_000)])
    assert 0 < few["CPU seconds"] < many["CPU seconds"] and few["peak MB"] <= many["peak MB"]
    # 1,000 resamples of the mean of 20,000 x 5 numbers hold more than a megabyte at a time.
    assert many["peak MB"] > 1
    with pytest.raises(SageError, match=r"metrics of .* could not be measured"):
        growth.measure("metrics", [{"problems": 10}])


def test_a_page_has_a_row_for_each_curve_in_words(table):
    rows = growth_figures.shown(growth.with_powers(table)).set_index("what grows")
    assert rows.loc["linear, then quadratic", "linear up to"] == "2"
    assert rows.loc["linear, then quadratic", "sizes"] == "1 to 8"
    assert (
        rows.loc["flat", "linear up to"] == "all of it"
        and rows.loc["flat", "power of time"] == "0.00"
    )


def test_the_runs_of_a_grid_and_the_processes_of_the_verifier_are_measured():
    few, many = growth.measure("grid", [{"runs": 2}, {"runs": 30}])
    assert 0 < few["CPU seconds"] < many["CPU seconds"]
    one, two = growth.measure("verifier", [{"workers": n, "answers": 64} for n in (1, 2)])
    assert one["CPU seconds"] > 0.5, "the seconds of processes that have ended count"
    assert 1.5 < two["peak MB"] / one["peak MB"] < 2.5, "each worker holds as much"


@pytest.mark.slow
def test_a_step_is_measured_with_each_trainer():
    for arm in (growth.STOCK, growth.BRANCH, growth.FORWARD):
        (found,) = growth.measure(
            "step", [{"arm": arm, "tokens": 8, "vocabulary": 200, "batch": 2}]
        )
        assert found["CPU seconds"] > 0 and found["parameters"] > 2 * 200 * growth.WIDTH
    (found,) = growth.measure("paired", [{**growth._TINY, "steps": 2}])
    assert {arm: len(seconds) for arm, seconds in found.items()} == dict.fromkeys(growth.ARMS, 2)


def test_every_curve_is_drawn_and_every_drawn_curve_is_measured():
    drawn = [name for names in growth_figures.PANELS.values() for name in names]
    assert sorted(drawn) == sorted(growth.CURVES)


def test_the_published_tables_are_of_these_sizes():
    kept = measured.benchmark("growth")
    for name, (_, grows, sizes, _) in growth.CURVES.items():
        found = kept.loc[kept["curve"] == name, "size"].tolist()
        assert grows == "width" or found == list(sizes)
        assert len(found) == len(sizes)
    kept = measured.benchmark("vocabulary")
    sizes = zip(kept["tokens"], kept["vocabulary"], kept["steps"], strict=True)
    assert [*sizes][::3] == growth.SIZES
