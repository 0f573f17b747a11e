"""Entropy and performance: fits against numbers put in, intervals against scipy."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

from sage_lib.experiment.profile import load_profile
from sage_lib.report import entropy
from sage_lib.report.entropy import jackknife, law, mean_over_seeds

SEEDS = (1, 2, 3)


def by_run(values):
    """A number of each run: {(method, seed): number}."""
    index = pd.MultiIndex.from_tuples(list(values), names=["method", "seed"])
    return pd.Series(list(values.values()), index=index, dtype=float)


def by_seed(*values):
    return by_run({("grpo", seed): value for seed, value in enumerate(values)})


# --- the law --------------------------------------------------------------------------------------


def test_the_law_is_found_again_and_is_what_curve_fit_finds():
    h = np.linspace(0.1, 1.0, 20)
    assert law(h, 0.9 - 0.3 * np.exp(h)) == pytest.approx((0.3, 0.9))
    r = 0.9 - 0.3 * np.exp(h) + np.random.default_rng(0).normal(0, 0.1, 20)
    expected, _ = optimize.curve_fit(lambda x, a, b: -a * np.exp(x) + b, h, r)
    assert law(h, r) == pytest.approx(tuple(expected), rel=1e-4)
    assert np.isnan(law([0.5, 0.5], [1.0, 0.0])).all()


def test_the_jackknife_of_a_mean_is_the_t_interval():
    values = np.array([0.1, 0.5, 0.3, 0.9])
    frame = pd.DataFrame({"seed": np.repeat(range(4), 2), "x": np.repeat(values, 2)})
    mean, low, high = jackknife(frame, lambda rows: [rows["x"].mean()])
    expected = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    assert (mean[0], low[0], high[0]) == pytest.approx((values.mean(), *expected))
    assert mean_over_seeds(by_seed(*values)) == pytest.approx((values.mean(), *expected))
    two = frame[frame["seed"] < 2]
    assert np.isnan(jackknife(two, lambda rows: [rows["x"].mean()])[1]).all()
    assert np.isnan([mean_over_seeds(by_seed(*values[:2]))[1], mean_over_seeds(by_seed())[0]]).all()


@pytest.fixture
def results():
    """Three runs of GRPO of 95 steps whose reward follows the law, a = 2 and b = 3; the base's log
    has neither entropy nor reward."""
    rng, frames = np.random.default_rng(0), []
    for seed in SEEDS:
        h = rng.uniform(0.1, 0.3, 95)
        log = pd.DataFrame({"step": range(1, 96), "entropy": h, "reward": 3 - 2 * np.exp(h)})
        frames.append(log.assign(run=f"grpo-s{seed}", method="grpo", seed=float(seed)))
    frames.append(pd.DataFrame({"run": ["sft"], "method": ["base"], "seed": [np.nan], "step": [1]}))
    exact = [
        {"run": f"grpo-s{seed}", "method": "grpo", "seed": seed, "step": step}
        | {"dataset": dataset, "problems": 3, "pass@1": step / 100 + shift}
        for seed in SEEDS
        for step in (0, 50, 95)
        for dataset, shift in (("both", 0.0), ("forward", 0.1))
    ]
    return SimpleNamespace(
        profile=load_profile("smoke"), steps=pd.concat(frames), exact=pd.DataFrame(exact)
    )


def test_planted_runs_give_back_what_was_put_in(results):
    table = entropy.points(results)
    assert list(table["step"].unique()) == [*range(10, 100, 10), 95], "blocks end with the run"
    first = results.steps.iloc[:10]
    expected = [first["entropy"].mean(), first["reward"].mean()]
    assert table.loc[0, ["H", "R"]].tolist() == pytest.approx(expected)
    grpo = entropy.laws(table).set_index("method").loc["grpo"]
    # The mean of exp(H) over a block is not exp of the mean: a little off, and no more.
    assert grpo["a"] == pytest.approx(2, rel=0.05) and grpo["b"] == pytest.approx(3, rel=0.05)
    assert grpo["low"] < grpo["a"] < grpo["high"] and grpo["seeds"] == 3
    fit = stats.linregress(np.exp(table["H"]), table["R"])
    assert grpo["r2"] == pytest.approx(fit.rvalue**2) and grpo["r2"] > 0.99
    alone = entropy.fits(table)
    assert len(alone) == 3 and (alone["law_error"] < alone["mean_error"] / 5).all()
    run = table[table["seed"] == 1]
    x, y = np.exp(run["H"].to_numpy()), run["R"].to_numpy()
    early = stats.linregress(x[:5], y[:5])  # which predicts the five points of the second half
    missed = y[5:] - early.intercept - early.slope * x[5:], y[5:] - y[:5].mean()
    expected = [np.sqrt(np.mean(gap**2)) for gap in missed]
    assert alone.loc[0, ["law_error", "mean_error"]].tolist() == pytest.approx(expected)


def test_exact_points_have_the_entropy_of_the_steps_before_them(results):
    exact = entropy.exact_points(results)
    blocks = entropy.points(results).set_index(["seed", "step"])
    assert len(exact) == 9
    assert exact["R"].tolist() == pytest.approx([0.05, 0.55, 1.0] * 3), "mean over data sets"
    expected = [blocks.loc[(seed, step), "H"] for seed in SEEDS for step in (10, 50, 95)]
    assert exact["H"].tolist() == pytest.approx(expected)


def test_the_law_over_prompts_and_its_error_are_those_of_a_linear_regression():
    rng = np.random.default_rng(0)
    h = rng.uniform(0, 1, 30)
    rows = pd.DataFrame({"run": "grpo-s1", "source": "base", "entropy": h})
    rows["correct"] = 0.9 - 0.2 * np.exp(h) + rng.normal(0, 0.1, 30)
    others = [rows.assign(source="policy", correct=1.0), rows.assign(run="grpo-s2", correct=0.0)]
    expected = stats.linregress(np.exp(h), rows["correct"])
    found = entropy.at_fixed_weights(pd.concat([rows, *others]))
    assert found == pytest.approx((-expected.slope, expected.stderr))


# --- tokens ---------------------------------------------------------------------------------------


GROUPS = pd.DataFrame(
    [
        ("kind", "number", "positive", 3, 1.0),
        ("kind", "number", "negative", 1, 5.0),
        ("kind", "word", "positive", 4, 0.0),
        ("all", "all", "positive", 7, 9.0),
    ],
    columns=["by", "group", "sign", "tokens", "before"],
).assign(method="grpo", seed=1)


def test_groups_are_weighed_by_their_tokens():
    def mean(**chosen):
        return entropy.mean_over_tokens(GROUPS, "before", "kind", **chosen).tolist()

    assert mean() == [1.0], "(3 + 5 + 0) / 8"
    assert mean(group="number") == [2.0] == mean(group=["number"])
    assert mean(group="number", sign="negative") == [5.0]
    assert mean(group="operator") == []
    assert entropy.mean_over_tokens(GROUPS, "before").tolist() == [9.0]
    shares = entropy.share_of_sum(GROUPS.assign(before=1.0), "before", "kind", ["word"])
    assert shares.tolist() == [0.5]


def test_the_square_of_an_impact_is_unbiased():
    """All outcomes of 4 continuations from p = 0.7 and from 0.2, weighed by their probability."""
    k, p, q = 4, 0.7, 0.2
    kept, other = np.meshgrid(np.arange(k + 1), np.arange(k + 1), indexing="ij")
    weight = (stats.binom.pmf(kept, k, p) * stats.binom.pmf(other, k, q)).ravel()
    frame = pd.DataFrame({"kept": kept.ravel() / k, "replaced": other.ravel() / k})
    found = entropy.with_impact(frame.assign(continuations=k))
    assert (found["impact"] * weight).sum() == pytest.approx(p - q)
    assert (found["square"] * weight).sum() == pytest.approx((p - q) ** 2)


# --- statements -----------------------------------------------------------------------------------


def test_the_methods_of_a_seed_count_once():
    """Two methods of three seeds are three values, not six."""
    values = by_run({(m, s): s + shift for m, shift in (("a", 0), ("b", 1)) for s in SEEDS})
    half = stats.t.ppf(0.975, 2) / np.sqrt(3)
    assert mean_over_seeds(values) == pytest.approx((2.5, 2.5 - half, 2.5 + half))


def test_a_statement_is_judged_by_its_interval_alone():
    rows = [
        ("agrees", "above", 0, by_seed(0.8, 0.9, 1.0)),
        ("disagrees", "above", 0, by_seed(-0.8, -0.9, -1.0)),
        ("cannot tell", "above", 0, by_seed(1.0, -1.0, 0.5)),
        ("not run", "above", 0, by_seed()),
        ("cannot tell", "above", 0, by_seed(9.0, 9.1)),  # two seeds
        ("agrees", "below", -1, by_seed(-9.0, -9.1, -9.2)),
        ("disagrees", "below", -9.5, by_seed(-9.0, -9.1, -9.2)),
        ("cannot tell", "above", 0, by_run({(m, 1): 9.0 for m in "abc"})),  # three runs, one seed
    ]
    table = entropy.statements(rows)
    assert list(table["outcome"]) == list(table["statement"])
    assert table["expects"].iloc[5] == "below -1"


def test_an_error_that_all_seeds_share_widens_the_interval():
    """1.96 errors and the t interval of the seeds, added in squares."""
    values = by_seed(1.0, 2.0, 3.0)
    table = entropy.statements([("s", "above", 0, values), ("s", "above", 0, values, 0.5)])
    half = stats.t.ppf(0.975, 2) / np.sqrt(3)
    assert table["high"].tolist() == pytest.approx([2 + half, 2 + np.hypot(half, 0.98)])
    assert table["low"].tolist() == pytest.approx([2 - half, 2 - np.hypot(half, 0.98)])
