"""The front over beta against planted points, and variants of methods and grids of runs."""

import dataclasses

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import minimize_scalar

from sage_lib.errors import SageError
from sage_lib.experiment.grid import load_grid
from sage_lib.experiment.profile import BASE, load_profile
from sage_lib.report import exact_tables, front_figures, front_tables, style

SEEDS = [1, 2, 3, 4, 5]
#: pass@1 and pass@256 of GRPO by beta, and of a method.
BASE_POINT = (0.30, 0.82)
GRPO = {0.0: (0.50, 0.60), 0.2: (0.48, 0.70), 1.0: (0.40, 0.80)}


def planted(method, point, seeds=SEEDS, spread=0.002):
    """Exact values whose mean over seeds and problems is ``point``."""
    rng = np.random.default_rng(sum(map(ord, method)))
    shape = (len(seeds), 40, 2)
    noise = rng.normal(0, spread, shape) + np.random.default_rng(0).normal(0, 0.1, (1, 40, 1))
    values = np.asarray(point) + noise - noise.mean(axis=(0, 1))
    return exact_tables.Exact(method, values, np.full(shape[:2], 0.03), ["both"] * 40, list(seeds))


@pytest.fixture
def profile(monkeypatch):
    """GRPO at three betas and one guided method, whose place the test gives."""
    countdown = load_profile("countdown")
    names = {0.0: "grpo_no_kl", 0.2: "grpo_front_beta0.2", 1.0: "grpo"}
    keys = [*names.values(), "grpo_branch"]
    chosen = {key: countdown.methods[key] for key in keys}

    def place(point, seeds=SEEDS):
        found = {names[beta]: planted(names[beta], at) for beta, at in GRPO.items()}
        found["grpo_branch"] = planted("grpo_branch", point, seeds)
        found[BASE] = planted(BASE, BASE_POINT, [None])
        monkeypatch.setattr(exact_tables, "by_method", lambda *a, **k: found)
        return dataclasses.replace(countdown, methods=chosen)

    return place


def test_the_front_is_grpo_at_every_beta_and_nothing_else():
    countdown = load_profile("countdown")
    front = front_tables.front_methods(countdown)
    betas = [front_tables.beta_of(countdown, key) for key in front]
    assert betas == [0, 0.05, 0.2, 0.5, 1, 1.4, 2] and front[0] == "grpo_no_kl"
    assert "grpo" in front and "choice_learning_rate0.002" not in front
    assert front_tables.front_methods(load_profile("smoke")) == ["grpo_no_kl", "grpo"]
    sequence = front_tables.front_methods(countdown, "sequence")
    assert [front_tables.beta_of(countdown, key) for key in sequence] == [0, 0.05, 0.2, 0.5, 1]


@pytest.mark.parametrize(
    ("point", "verdict"),
    [((0.46, 0.78), "outside"), ((0.42, 0.70), "inside"), ((0.44, 0.75), None)],
)
def test_the_excess_is_the_smallest_distance_over_the_whole_line(profile, point, verdict):
    """Scaled by what the line spans; the base is its end."""
    row = front_tables.outside(profile(point)).set_index("method").loc["grpo_branch"]
    corners = np.array([*GRPO.values(), BASE_POINT])
    scale = np.ptp(corners, axis=0)

    def larger(t):
        """Of a place on the line, 0 to 3 from corner to corner."""
        left = min(int(t), 2)
        at = corners[left] + (t - left) * (corners[left + 1] - corners[left])
        return ((np.asarray(point) - at) / scale).max()

    parts = [minimize_scalar(larger, bounds=(i, i + 1), method="bounded").fun for i in range(3)]
    assert row["excess"] == pytest.approx(min(parts), abs=0.02)
    assert row["low"] < row["excess"] < row["high"]
    if verdict is None:  # on the line itself
        assert abs(row["excess"]) < 0.02 and row["verdict"] == "not separated from the front"
    else:
        assert row["verdict"] == verdict


def test_outside_needs_the_interval_over_seeds_alone_to_say_so_too(profile, monkeypatch):
    values = [0.1, 0.3, 0.2, 0.6]
    known = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert front_tables.over_seeds(values) == pytest.approx((known.low, known.high))
    assert np.isnan(front_tables.over_seeds([0.1])).all()
    placed = profile((0.46, 0.78))
    judged = front_tables.outside(placed).set_index("method")["verdict"]
    assert judged["grpo_branch"] == "outside"
    monkeypatch.setattr(front_tables, "over_seeds", lambda means: (-1.0, 1.0))
    row = front_tables.outside(placed).set_index("method").loc["grpo_branch"]
    assert row["verdict"] == front_tables.UNTOLD and row["low"] > 0
    assert (row["low over seeds"], row["high over seeds"]) == (-1.0, 1.0), "and the table shows why"


def test_what_moves_along_the_line_adds_nothing_to_the_distance_from_it(profile, monkeypatch):
    """A method beside the steep part of the line, whose seeds lie apart along that part alone."""
    placed = profile((0.52, 0.66))
    found = {
        key: planted(key, one.values.mean((0, 1)), one.seeds, spread=0)
        for key, one in exact_tables.by_method().items()
    }
    along = np.subtract(GRPO[0.2], GRPO[0.0])
    ours = found["grpo_branch"]
    moved = ours.values + np.linspace(-0.5, 0.5, len(SEEDS))[:, None, None] * along
    found["grpo_branch"] = dataclasses.replace(ours, values=moved)
    monkeypatch.setattr(exact_tables, "by_method", lambda *a, **k: found)
    row = front_tables.outside(placed).set_index("method").loc["grpo_branch"]
    assert 0 < row["nearest"] < 0.2, "between two points"
    for end in ("low over seeds", "high over seeds"):
        assert row[end] == pytest.approx(row["excess"], abs=1e-9)
    assert row["pass@256 low"] < row["pass@256 difference"] - 0.01, "the seeds do lie apart"


def test_grpos_own_points_stand_against_the_front_without_them(profile):
    table = front_tables.outside(profile((0.42, 0.70))).set_index("method")
    own = table[table["on_front"]]
    assert set(own.index) == {"grpo_front_beta0.2", "grpo"}, "the ends have nothing beside them"
    assert own.loc["grpo_front_beta0.2", "excess"] > 0.05, "the line bulges there"


def test_only_seeds_that_both_have_are_paired(profile):
    table = front_tables.outside(profile((0.45, 0.79), [2, 3, 9])).set_index("method")
    row = table.loc["grpo_branch"]
    assert (row["seeds"], row["verdict"]) == (2, "too few seeds")
    assert "grpo_branch" not in set(front_tables.outside(profile((0.45, 0.79), [8, 9]))["method"])
    with pytest.raises(SageError, match="no seed that all have"):
        front_tables.paired(profile((0.45, 0.79), [8, 9]), "grpo", ["grpo_branch"])
    one = front_tables.paired(profile((0.45, 0.79), [2]), "grpo", ["grpo_branch"])
    assert set(one["seeds"]) == {1} and one["detectable"].isna().all(), "one seed stays one"


def test_paired_differences_are_found_and_say_what_they_could_have_seen(profile):
    table = front_tables.paired(profile((0.41, 0.80)), "grpo", ["grpo_branch", "grpo_random"])
    assert set(table["method"]) == {"grpo_branch"}
    by_metric = table.set_index("metric")
    assert by_metric.loc["pass@1", "difference"] == pytest.approx(0.01)
    assert by_metric.loc["pass@1", "low"] > 0 and by_metric.loc["pass@256", "low"] < 0
    assert 0 < by_metric.loc["pass@1", "detectable"] < 0.01
    assert np.isnan(by_metric.loc["rare mass", "low"])


def test_a_front_says_who_was_trained_for_other_numbers_of_steps(profile):
    same = profile((0.42, 0.79))
    assert "steps:" not in style.described(front_figures.front(same))
    short = dataclasses.replace(same.methods["grpo_branch"], rl={"max_steps": 4})
    other = dataclasses.replace(same, methods={**same.methods, "grpo_branch": short})
    said = style.described(front_figures.front(other))
    assert "steps: 300, but 4 of GRPO + Branch" in said


def test_vary_makes_a_method_for_each_combination(tmp_path):
    text = """
name: mine
extends: laptop
methods:
  swept:
    label: Swept
    vary: {rl.beta: [0.1, 1], guide.threshold: [1.0]}
    guide: {name: branch, threshold_quantile: null, clamp_quantile: null, ratio: 0.3}
  twice: {label: Twice, seeds: [5, 6]}
"""
    (tmp_path / "mine.yaml").write_text(text)
    mine = load_profile(tmp_path / "mine.yaml")
    assert [key for key in mine.methods if key.startswith("swept")] == [
        "swept_beta0.1_threshold1.0",
        "swept_beta1_threshold1.0",
    ]
    one = mine.methods["swept_beta1_threshold1.0"]
    assert one.label == "Swept, beta 1, threshold 1.0"
    assert one.rl == {"beta": 1} and one.guide["threshold"] == 1.0
    assert mine.seeds_of("twice") == (5, 6) and mine.seeds_of("grpo") == mine.seeds
    (tmp_path / "mine.yaml").write_text(text.replace("[0.1, 1]", "0.1"))
    with pytest.raises(SageError, match="vary lists values of settings"):
        load_profile(tmp_path / "mine.yaml")


def test_a_grid_orders_runs_by_block_and_seed_each_once(tmp_path):
    grid = load_grid("countdown")
    order = grid.order()
    names = [(profile.name, method, seed) for profile, method, seed in order]
    assert len(set(names)) == len(names)
    front = grid.block("front").order()
    assert [seed for _, _, seed in front] == sorted(seed for _, _, seed in front)
    methods = grid.block("front").methods
    assert {method for _, method, _ in front[: len(methods)]} == set(methods)
    assert {seed for _, _, seed in front} < set(front[0][0].seeds_of("grpo"))
    (tmp_path / "own.yaml").write_text(
        "name: own\nabout: one\nblocks:\n"
        "  - {name: a, about: some, profile: smoke+rl.beta=0.2, methods: [grpo]}\n"
    )
    own = load_grid(tmp_path / "own.yaml")
    assert [(p.rl["beta"], m, s) for p, m, s in own.order()] == [(0.2, "grpo", 3407)]
    for wrong, sentence in {
        "methods: [grop]": "has no method 'grop'",
        "families: [mian]": "has no family 'mian'",
        "seed: [1]": "unknown key 'seed'",
        "methods: ": "methods is a list, not None",
        "methods: [grpo], seeds: [1]": "no method of it has the seed 1",
    }.items():
        (tmp_path / "own.yaml").write_text(
            f"name: own\nabout: one\nblocks:\n  - {{name: a, about: b, profile: smoke, {wrong}}}\n"
        )
        with pytest.raises(SageError, match=sentence):
            load_grid(tmp_path / "own.yaml")
    with pytest.raises(SageError, match="there is no grid 'coutndown'"):
        load_grid("coutndown")
