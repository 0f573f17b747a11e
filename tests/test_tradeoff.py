"""The front over beta against planted points and a linear programme; variants and grids of runs."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import linprog, minimize_scalar

from sage_lib.errors import SageError
from sage_lib.experiment.profile import BASE, load_profile
from sage_lib.experiment.results import load_results
from sage_lib.files import SAME
from sage_lib.report import inference, passk, tradeoff
from sage_lib.report.inference import Values

SEEDS = [1, 2, 3, 4, 5]
COLUMNS = ["pass@1", "pass@256", "rare mass"]
#: pass@1 and pass@256 of GRPO by beta, and of the base.
BASE_POINT = (0.30, 0.82)
GRPO = {0.0: (0.50, 0.60), 0.2: (0.48, 0.70), 0.8: (0.40, 0.80)}
NAMES = {0.0: "grpo_no_kl", 0.2: "grpo", 0.8: "front_beta0.8"}


def planted(method, point, seeds=SEEDS, spread=0.002):
    """Values whose mean over seeds and problems is ``point``."""
    rng = np.random.default_rng(sum(map(ord, method)))
    shape = (len(seeds), 40, 3)
    noise = rng.normal(0, spread, shape) + np.random.default_rng(0).normal(0, 0.1, (1, 40, 1))
    values = np.array([*point, 0.03]) + noise - noise.mean(axis=(0, 1))
    return Values(method, values, COLUMNS, ["both"] * 40, list(seeds))


@pytest.fixture
def placed(monkeypatch):
    """A study of GRPO at three betas and one guided method, whose place the test gives."""

    def place(point, seeds=SEEDS, **changed):
        found = {BASE: planted(BASE, BASE_POINT, [None])}
        found |= {NAMES[beta]: planted(NAMES[beta], at) for beta, at in GRPO.items()}
        found["grpo_branch"] = planted("grpo_branch", point, seeds)
        monkeypatch.setattr(passk, "exact", lambda *a, **k: {**found, **changed})
        return SimpleNamespace(profile=load_profile("study"), name="planted")

    return place


def test_the_front_is_grpo_at_every_beta_and_nothing_else():
    results = load_profile("study")
    methods = tradeoff.curve_methods(results)
    own = [tradeoff.beta_of(results, key) for key in methods]
    assert own == [0, 0.02, 0.05, 0.07, 0.1, 0.2, 0.25, 0.28, 0.4, 0.55, 0.8], "no guides"
    assert methods[0] == "grpo_no_kl" and "grpo" in methods, "not a rival at the same beta"
    assert tradeoff.curve_methods(results, kl_form="sequence") == ["grpo_no_kl", "sequence"]
    assert tradeoff.curve_methods(load_profile("smoke")) == ["grpo_no_kl", "grpo"]
    few = {"grpo", "grpo_branch", "grpo_no_kl"}
    assert tradeoff.curve_methods(results, few) == ["grpo_no_kl", "grpo"]
    assert np.isnan([tradeoff.beta_of(results, "base"), tradeoff.beta_of(results, "rft")]).all()


@pytest.mark.parametrize("point", [(0.5, 0.9), (0.3, 0.5), (1.3, 0.1), (0.7, 0.55)])
def test_the_chord_weighs_each_axis_by_the_other_ones_slope(point):
    """The excess is a linear programme, whose multipliers say how much each axis counts."""
    left, right = np.array([0.2, 1.0]), np.array([1.0, 0.2 - 0.3])
    step = right - left
    solved = linprog(
        [0, 1],
        A_ub=[[-step[0], -1], [-step[1], -1]],
        b_ub=-(np.array(point) - left),
        bounds=[(0, 1), (None, None)],
    )
    excess, _, share, weights = tradeoff.nearest_point(np.array(point), np.array([left, right]))
    assert excess == pytest.approx(solved.fun, abs=0.03), "on a line of 51 points"
    assert share == pytest.approx(solved.x[0], abs=0.02)
    assert weights == pytest.approx(-solved.ineqlin.marginals, abs=1e-9)


def test_at_a_corner_and_on_a_rising_line_the_larger_difference_alone_counts():
    corners = np.array([[0.0, 1.0], [1.0, 0.0]])
    excess, _, share, weights = tradeoff.nearest_point(np.array([1.5, 0.1]), corners)
    assert (excess, share) == pytest.approx((0.5, 1)) and weights.tolist() == [1, 0]
    rising = np.array([[0.0, 0.0], [1.0, 1.0]])
    _, _, _, weights = tradeoff.nearest_point(np.array([0.2, 0.5]), rising)
    assert weights.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("point", "verdict"),
    [
        ((0.50, 0.82), "outside"),
        ((0.42, 0.70), "inside"),
        ((0.44, 0.75), "not separated from the curve"),  # on the line itself
    ],
)
def test_the_excess_is_the_smallest_distance_over_the_whole_line(placed, point, verdict):
    """Scaled by what the line spans; the base is its end."""
    row = tradeoff.positions(placed(point)).set_index("method").loc["grpo_branch"]
    corners = np.array([*GRPO.values(), BASE_POINT])
    scale = np.ptp(corners, axis=0)

    def larger(t):
        """Of a place on the line, 0 to 3 from corner to corner."""
        left = min(int(t), 2)
        at = corners[left] + (t - left) * (corners[left + 1] - corners[left])
        return ((np.asarray(point) - at) / scale).max()

    parts = [minimize_scalar(larger, bounds=(i, i + 1), method="bounded").fun for i in range(3)]
    assert row["excess"] == pytest.approx(min(parts), abs=0.02)
    assert row["low"] < row["excess"] < row["high"] and row["verdict"] == verdict


def test_outside_needs_the_interval_over_seeds_alone_to_say_so_too(placed, monkeypatch):
    results = placed((0.50, 0.82))
    judged = tradeoff.positions(results).set_index("method")["verdict"]
    assert judged["grpo_branch"] == "outside"
    values = passk.exact(results)
    line = [values[key] for key in (*NAMES.values(), BASE)]
    asked = values["grpo_branch"], line, list(NAMES)
    row = tradeoff.position(*asked)
    bound = (row["low"] + row["excess"]) / 2
    assert tradeoff.position(*asked, bound)["verdict"] == "outside", "the excess reaches the bound"
    monkeypatch.setattr(inference, "over_seeds", lambda means: (-1.0, 1.0))
    row = tradeoff.positions(results).set_index("method").loc["grpo_branch"]
    assert row["verdict"] == tradeoff.NOT_SEPARATED and row["low"] > 0
    assert (row["low_seeds"], row["high_seeds"]) == (-1.0, 1.0), "and the table shows why"


def test_what_moves_along_the_line_adds_nothing_to_the_distance_from_it(placed):
    """A method beside the steep part of the line, whose seeds lie apart along that part alone."""
    still = {NAMES[beta]: planted(NAMES[beta], at, spread=0) for beta, at in GRPO.items()}
    still[BASE] = planted(BASE, BASE_POINT, [None], spread=0)
    along = np.append(np.subtract(GRPO[0.2], GRPO[0.0]), 0)
    ours = planted("grpo_branch", (0.52, 0.66), spread=0)
    moved = ours.values + np.linspace(-0.5, 0.5, len(SEEDS))[:, None, None] * along
    still["grpo_branch"] = dataclasses.replace(ours, values=moved)
    row = tradeoff.positions(placed((0.5, 0.5), **still)).set_index("method").loc["grpo_branch"]
    # By hand: (0.02 + 0.02 t)/0.2 = (0.06 - 0.1 t)/0.22 at the place t between two points.
    assert row["nearest"] == pytest.approx(0.3115 * 0.2, abs=0.003)
    for end in ("low_seeds", "high_seeds"):
        assert row[end] == pytest.approx(row["excess"], abs=1e-9)
    assert row["pass@256 low"] < row["pass@256 difference"] - 0.01, "the seeds do lie apart"


def test_grpos_own_points_stand_against_the_front_without_them(placed):
    table = tradeoff.positions(placed((0.42, 0.70))).set_index("method")
    own = table[table["on_front"]]
    assert set(own.index) == {"grpo", "front_beta0.8"}, "the ends have nothing beside them"
    assert own.loc["grpo", "excess"] > 0.05, "the line bulges there"


def test_the_line_alone_sets_the_scale(placed):
    """By hand: a method far to the right of a line that spans 0.2 and 0.22. Its own point, were it
    to count, would stretch the first axis to 0.6 and shrink the excess to a third."""
    row = tradeoff.positions(placed((0.90, 0.60))).set_index("method").loc["grpo_branch"]
    assert row["excess"] == pytest.approx((0.90 - 0.50) / 0.20, abs=0.02)
    corner = [planted("corner", GRPO[0.0], spread=0), planted(BASE, BASE_POINT, [None], spread=0)]
    row = tradeoff.position(planted("far", (0.30, 1.04), spread=0), corner, [0.0])
    assert row["excess"] == pytest.approx((1.04 - 0.82) / 0.22, abs=1e-6)


def test_a_method_is_outside_only_beyond_what_grpos_own_points_reach(placed):
    """GRPO at 0.2 and 0.8, each held out, lies beyond the line through the others: by hand."""
    corners = {**GRPO, "base": BASE_POINT}
    scale = np.ptp([point for beta, point in corners.items() if beta != 0.2], axis=0)

    def larger(share):
        """Of GRPO at 0.2 over a place between beta 0 and 0.8."""
        at = (1 - share) * np.array(GRPO[0.0]) + share * np.array(GRPO[0.8])
        return ((np.array(GRPO[0.2]) - at) / scale).max()

    reached = minimize_scalar(larger, bounds=(0, 1), method="bounded").fun
    table = tradeoff.positions(placed((0.46, 0.78))).set_index("method")
    assert table.loc["grpo", "excess"] == pytest.approx(reached, abs=0.02)
    assert table.loc["grpo", "verdict"] == "outside" and table.loc["grpo", "bound"] == 0
    ours = table.loc["grpo_branch"]
    assert ours["bound"] == table.loc[table["on_front"], "excess"].max()
    assert 0 < ours["low"] < ours["excess"] < ours["bound"] and ours["verdict"] == tradeoff.AS_GRPO
    alone = tradeoff.positions(placed((0.50, 0.82)), ["grpo_branch"])
    assert alone["verdict"].item() == "outside"


def test_only_seeds_that_all_have_count(placed):
    table = tradeoff.positions(placed((0.45, 0.79), [2, 3, 9])).set_index("method")
    assert table.loc["grpo_branch", ["seeds", "verdict"]].tolist() == [2, "too few seeds"]
    assert "grpo_branch" not in set(tradeoff.positions(placed((0.45, 0.79), [8, 9]))["method"])


def test_a_point_of_the_line_that_lacks_seeds_is_left_out_and_costs_none(placed):
    few = {NAMES[0.8]: planted(NAMES[0.8], (0.9, 0.99), SEEDS[:2])}  # a point that nothing beats
    table = tradeoff.positions(placed((0.50, 0.82), **few)).set_index("method")
    assert table.loc["grpo_branch", ["seeds", "verdict"]].tolist() == [len(SEEDS), "outside"]


def test_on_the_last_stretch_the_share_of_the_base_says_where(placed):
    row = tradeoff.positions(placed((0.35, 0.81))).set_index("method").loc["grpo_branch"]
    assert row["nearest"] == 0.8 and row["to_base"] == pytest.approx(0.5, abs=0.05)
    row = tradeoff.positions(placed((0.29, 0.9))).set_index("method").loc["grpo_branch"]
    assert row["nearest"] == np.inf and row["to_base"] == 1


def test_a_front_of_one_point_is_refused(placed):
    results = placed((0.4, 0.8))
    grpo = {"grpo": results.profile.methods["grpo"]}
    results.profile = dataclasses.replace(results.profile, methods=grpo)
    with pytest.raises(SageError, match="has 1 evaluated points of GRPO's trade-off curve"):
        tradeoff.positions(results)


def test_without_the_base_the_line_has_no_end(placed):
    results = placed((0.4, 0.8))
    values = passk.exact(results)
    del values[BASE]
    with pytest.raises(SageError, match="the base was not evaluated: call sage-companion stage"):
        tradeoff.positions_of(results.profile, values)


def test_the_points_follow_from_the_published_frames():
    """From the completions' probabilities by other code; a study may have several bases."""
    results = load_results("study")
    stored = tradeoff.points(results).set_index("method")
    of_method = results.support[results.support["method"] == "grpo_branch"]
    sets = [data.label for data in results.profile.evaluation.data if not data.ood]
    of_method = of_method[of_method["dataset"].isin(sets)]
    p = np.exp(of_method["logp"]).groupby([of_method[c] for c in ("dataset", "seed", "problem")])
    for k in (1, 256):
        by_set = (1 - (1 - p.sum()) ** k).groupby(level="dataset").mean()
        assert by_set.mean() == pytest.approx(stored.loc["grpo_branch", f"pass@{k}"], rel=SAME)
    assert stored.loc["grpo_branch", ["beta", "anchor", "guide"]].tolist() == [0.2, "k3", "branch"]
