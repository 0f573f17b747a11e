"""What notebooks 16 to 19 share: pairs within a base, the end of a run, outcomes, the figure."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sage_lib.report import inference, rivals
from sage_lib.report.inference import Values

SETS = ["both"] * 20 + ["forward"] * 20


def planted(shift, seeds, level=0.5, column="pass@256", spread=0.001):
    rng = np.random.default_rng(len(seeds) + int(1000 * (level + shift)))
    of_problem = np.random.default_rng(0).uniform(-0.1, 0.1, 40)
    values = level + shift + of_problem + rng.normal(0, spread, (len(seeds), 40))
    return Values("m", values[..., None], [column], SETS, seeds)


@pytest.fixture
def logs(monkeypatch):
    """Step logs of two bases: entropy 9 before the last fifth, then by method and seed."""

    def study(seeds, base):
        rows = []
        for method, gain, steps in (("grpo", 0.0, 10), ("rival", 0.004, 40)):
            for seed in seeds:
                for step in range(1, steps + 1):
                    late = 0.04 + 0.01 * base + gain + 1e-4 * (seed % 3) * (method == "rival")
                    value = late if step > 0.8 * steps else 9.0
                    run = f"{method}-s{seed}"
                    rows.append((run, method, seed, step, value))
        rows.append(("sft", "base", None, 1, 1.0))
        frame = pd.DataFrame(rows, columns=["run", "method", "seed", "step", "entropy"])
        return SimpleNamespace(steps=frame)

    both = [study((1, 2, 3), 0), study((4, 5), 1)]
    monkeypatch.setattr(rivals, "bases", lambda one: both)
    return rivals.at_the_end(both[0])


def test_the_end_is_the_last_fifth_of_the_steps_of_each_run_of_each_base(logs):
    assert logs["grpo", 0, 1] == pytest.approx(0.04) and logs["grpo", 1, 4] == pytest.approx(0.05)
    assert logs["rival", 1, 5] == pytest.approx(0.05 + 0.004 + 2e-4)
    assert "base" not in logs.index.levels[0], "SFT is not of this length"


def test_a_number_a_seed_is_paired_within_its_base_with_the_t_interval(logs):
    said = [("raises", "rival", "grpo", "entropy", "above")]
    [row] = rivals.statements(said, {}, {"entropy": logs}).to_dict("records")
    known = stats.ttest_rel(logs["rival"], logs["grpo"]).confidence_interval(0.95)
    assert (row["low"], row["high"]) == pytest.approx((known.low, known.high))
    assert row["seeds"] == 5 and row["outcome"] == inference.AGREES
    off = logs.copy()
    off["rival"] = off["rival"].to_numpy() - 0.004 + 0.001
    [row] = rivals.statements(said, {}, {"entropy": off}).to_dict("records")
    assert row["high"] < 0.002 and row["outcome"] == inference.DISAGREES, "too small to matter"


def test_an_outcome_needs_three_seeds_and_what_was_not_run_says_so():
    values = {"new": planted(0.02, [1, 2, 3]), "old": planted(0.0, [1, 2, 3])}
    few = values | {"new": planted(0.02, [1, 2])}
    said = [("s", "new", "old", "pass@256", "above"), ("s", "lost", "old", "pass@256", "above")]
    row, lost = rivals.statements(said, values, {}).to_dict("records")
    assert row["difference"] == pytest.approx(0.02, abs=1e-3)
    assert row["outcome"] == inference.AGREES
    assert lost["outcome"] == inference.NOT_RUN and np.isnan(lost["difference"])
    assert rivals.statements(said, few, {})["outcome"][0] == inference.CANNOT_TELL
    assert rivals.in_short(rivals.statements(said, {}, {}))["difference"].tolist() == ["", ""]


def test_numbers_that_are_no_shares_have_no_ceiling_at_1():
    seeds = [1, 2, 3]
    tall = {
        name: planted(shift, seeds, level=1.3, column="diversity")
        for name, shift in (("new", 0.1), ("old", 0.0))
    }
    said = [("s", "new", "old", "diversity", "below")]
    assert rivals.statements(said, tall, {})["outcome"][0] == inference.DISAGREES
    top = {
        name: Values("m", np.full((3, 40, 1), level), ["pass@256"], SETS, seeds)
        for name, level in (("new", 0.999), ("old", 0.998))
    }
    said = [("s", "new", "old", "pass@256", "equal")]
    assert rivals.statements(said, top, {})["outcome"][0] == inference.CANNOT_TELL


def test_a_difference_in_short_has_its_interval_and_its_seeds():
    values = {"new": planted(0.02, [1, 2, 3]), "old": planted(0.0, [1, 2, 3])}
    table = rivals.statements([("s", "new", "old", "pass@256", "above")], values, {})
    [row] = rivals.in_short(table).to_dict("records")
    assert list(row) == rivals.SHOWN
    number, low, _ = (float(one.strip("[,]")) for one in row["difference"].split()[:3])
    assert number == pytest.approx(table["difference"][0], abs=1e-4)
    assert low == pytest.approx(table["low"][0], abs=1e-4) and "3 seeds" in row["difference"]


def test_a_row_far_off_is_a_number_at_the_edge_and_does_not_squeeze_the_others():
    at = [0.01, -0.02, 0.015, -0.8]
    table = pd.DataFrame({"method": list("abcd"), "metric": "pass@1", "difference": at})
    table = table.assign(low=table["difference"] - 0.01, high=table["difference"] + 0.01)
    [axis] = rivals.forest(SimpleNamespace(label=str.upper), table).axes
    low, high = axis.get_xlim()
    assert -0.05 < low < -0.03 and 0.025 < high < 0.05
    [text] = axis.texts
    assert text.get_text() == "-0.800" and text.get_position()[1] == 3
    assert [one.get_text() for one in axis.get_yticklabels()] == list("ABCD")
    plt.close("all")
