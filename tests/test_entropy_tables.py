"""Entropy and performance: fits against numbers put in, intervals against scipy, rules against
planted cases."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import load_profile
from sage_lib.files import append_line, write_json, write_text
from sage_lib.policy.token_groups import GROUPS
from sage_lib.report import entropy_figures, entropy_statements, entropy_tables, impact_tables
from sage_lib.report.entropy_statements import Statement, judged
from sage_lib.report.entropy_tables import (
    hinge,
    jackknife,
    law,
    over_seeds,
    weighed,
)

STEPS = 100


def test_the_law_is_found_again_and_is_what_curve_fit_finds():
    h = np.linspace(0.1, 1.0, 20)
    a, b = law(h, 0.9 - 0.3 * np.exp(h))
    assert (a, b) == pytest.approx((0.3, 0.9))
    r = 0.9 - 0.3 * np.exp(h) + np.random.default_rng(0).normal(0, 0.1, 20)
    expected, _ = optimize.curve_fit(lambda x, a, b: -a * np.exp(x) + b, h, r)
    assert law(h, r) == pytest.approx(tuple(expected), rel=1e-4)
    assert np.isnan(law([0.5, 0.5], [1.0, 0.0])).all()


def test_the_jackknife_of_a_mean_is_the_t_interval():
    values = np.array([0.1, 0.5, 0.3, 0.9])
    frames = [pd.DataFrame({"x": [v, v]}) for v in values]
    mean, low, high = jackknife(frames, lambda frame: [frame["x"].mean()])
    expected = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    assert (mean[0], low[0], high[0]) == pytest.approx((values.mean(), *expected))
    assert over_seeds(values)[1:] == pytest.approx(expected)
    assert np.isnan(jackknife(frames[:2], lambda frame: [frame["x"].mean()])[1]).all()
    assert np.isnan(over_seeds(values[:2])[1]) and np.isnan(over_seeds([])[0])


def test_a_planted_kink_is_found_and_noise_has_none():
    steps = np.arange(10, 310, 10)
    noise = np.random.default_rng(1).normal(0, 0.01, len(steps))
    found = hinge(steps, 0.2 + 0.003 * np.minimum(steps, 100) + noise)
    assert found.end == pytest.approx(100, abs=15) and found.bic > 20
    assert found.slope == pytest.approx(0.003, rel=0.15)
    without = [
        hinge(steps, np.random.default_rng(seed).normal(0.5, 0.01, len(steps))).bic > 0
        for seed in range(100)
    ]
    assert np.mean(without) < 0.2
    assert found.shape == entropy_tables.STAGED
    straight = [
        hinge(steps, 0.001 * steps + np.random.default_rng(seed).normal(0, 0.01, len(steps))).shape
        for seed in range(100)
    ]
    assert straight.count(entropy_tables.STILL_RISING) > 80, "no plateau is seen where none is"
    assert entropy_tables.LEVEL not in straight


def test_the_methods_of_a_seed_count_once():
    """Two methods of three seeds are three values, not six."""
    rows = [(m, s, s + shift) for m, shift in (("a", 0.0), ("b", 1.0)) for s in (1, 2, 3)]
    frame = pd.DataFrame(rows, columns=["method", "seed", "value"])
    means = entropy_tables.by_seed(frame, ["value"])["value"]
    assert means.tolist() == [1.5, 2.5, 3.5]
    per_seed = entropy_statements._per_seed(frame, lambda run: run["value"].item())
    assert per_seed == means.tolist()
    half = stats.t.ppf(0.975, 2) / np.sqrt(3)
    assert over_seeds(per_seed) == pytest.approx((2.5, 2.5 - half, 2.5 + half))


def test_an_error_that_all_seeds_share_widens_the_interval(profile):
    """1.96 errors and the t interval of the seeds, added in squares."""
    values = [1.0, 2.0, 3.0]
    one = Statement("s", "", "", "", lambda _: values, "above")
    alone, both = (
        entropy_statements.judged(profile, [dataclasses.replace(one, error=error)]).iloc[0]
        for error in (None, lambda _: 0.5)
    )
    half = stats.t.ppf(0.975, 2) / np.sqrt(3)
    assert alone["high"] == pytest.approx(2 + half)
    assert both["high"] == pytest.approx(2 + np.hypot(half, 0.98)) and both["value"] == 2


def test_runs_without_entropy_are_not_fitted(profile):
    log = pd.DataFrame({"method": "grpo", "seed": 1, "step": range(1, 61), "reward": 0.5})
    log["entropy"] = np.where(log["step"] <= 30, 0.1 + log["step"] / 100, np.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy_tables.measured, "training", lambda _: log)
        assert entropy_tables.points(profile)["step"].max() == 30
        patch.setattr(entropy_tables.measured, "training", lambda _: log.assign(entropy=np.nan))
        assert entropy_tables.laws(profile).empty


def test_groups_are_weighed_by_their_tokens():
    rows = [("kind", "number", 3, 1.0), ("kind", "word", 1, 0.0), ("all", "all", 4, 9.0)]
    frame = pd.DataFrame(rows, columns=["by", "group", "tokens", "before"])
    table = weighed(frame.assign(method="grpo", seed=1), "kind", ["before"])
    assert dict(zip(table["group"], table["share"], strict=True)) == {"number": 0.75, "word": 0.25}
    table = weighed(frame.assign(method="grpo", seed=1, group="x"), "kind", ["before"])
    assert table["before"].tolist() == [0.75]


def test_a_statement_is_judged_by_its_interval_alone():
    cases = {
        "agrees": [0.8, 0.9, 1.0],
        "disagrees": [-0.8, -0.9, -1.0],
        "cannot tell": [1.0, -1.0, 0.5],
        "not run": [],
    }
    made = [
        Statement(name, "", "", "", lambda profile, values=values: values, "above")
        for name, values in cases.items()
    ]
    made.append(Statement("cannot tell", "", "", "", lambda profile: [9.0, 9.1], "above"))
    made.append(Statement("agrees", "", "", "", lambda profile: [-9.0, -9.1, -9.2], "below", -1.0))
    table = judged(load_profile("smoke"), made)
    assert list(table["outcome"]) == list(table["statement"])


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """Three runs of GRPO whose reward follows the law, a = 2 and b = 3, and which have been read,
    replayed and probed."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    smoke = load_profile("smoke")
    methods = {"grpo": dataclasses.replace(smoke.methods["grpo"], seeds=(1, 2, 3))}
    made = dataclasses.replace(smoke, methods=methods)
    rng = np.random.default_rng(0)
    for _, _, run in runs.rl_runs(made):
        for step in range(1, STEPS + 1):
            h = float(rng.uniform(0.1, 0.3))
            row = {"step": step, "entropy": h, "reward": 3 - 2 * np.exp(h)}
            append_line(run.measured / "steps.jsonl", row)
        for step in (0, 50, 100):
            row = {"step": step, "dataset": "both", "problems": 3}
            names = ("pass@1", "pass@256", "common", "rare")
            append_line(run.measured / "exact.jsonl", row | dict.fromkeys(names, step / 1000))
    return made


def groups(**changed):
    """Every group with the same numbers, in which positive samples are half as uncertain."""
    names = {
        "all": ["all"],
        "kind": ["number", "word"],
        "position": range(1, 11),
        "entropy": range(1, 11),
        "perplexity": range(1, 6),
    }
    rows = [
        {**dict.fromkeys(GROUPS, 0.2), "by": by, "group": group, "sign": sign, "tokens": 10}
        | {"before": 0.1 if sign == "positive" else 0.2}
        | changed
        for by, values in names.items()
        for group in values
        for sign in ("positive", "negative")
    ]
    return pd.DataFrame(rows)


def measure(profile):
    """What the three stages would have left."""

    def keep(run, name, table):
        write_text(run.measured / f"{name}.csv", table.to_csv(index=False))
        write_json(run.record, {**dict.fromkeys(records.KEYS, ""), "seconds": 1.0})

    for number, run in enumerate(runs.dynamics_runs(profile)):
        both = [groups(after=0.3 + number / 100).assign(source=s) for s in ("base", "policy")]
        keep(run, "tokens", pd.concat(both))
        prompts = pd.DataFrame({"correct": [0.0, 0.5, 1.0], "entropy": [0.3, 0.2, 0.1]})
        keep(run, "prompts", prompts.assign(source="base", problem="p", completions=8))
    for number, run in enumerate(runs.replay_runs(profile)):
        moved = 0.001 * (1 + number)
        keep(
            run,
            "moves",
            pd.concat([groups(moved=moved).assign(step=s) for s in range(10, 101, 10)]),
        )
    for number, run in enumerate(runs.impact_runs(profile)):
        rows = [
            {"token": token, "perplexity_group": group, "kept": 1.0, "entropy": 1.0}
            | {"replaced": 0.1 * number if token == "early" else 0.9, "continuations": 10}
            | {"correct": True}
            for token in impact_tables.TOKENS
            for group in impact_tables.GROUPS
        ]
        keep(run, "impact", pd.DataFrame(rows))


def test_planted_runs_give_back_what_was_put_in(profile):
    measure(profile)
    laws = entropy_tables.laws(profile).set_index("performance")
    reward = laws.loc["training reward"]
    # The mean of exp(H) over a block is not exp of the mean: a little off, and no more.
    assert reward["a"] == pytest.approx(2, rel=0.05) and reward["runs"] == 3
    assert reward["a low"] < reward["a"] < reward["a high"]
    assert reward["law_error"] < reward["mean_error"] / 5
    assert laws.loc["exact pass@1", "points"] == 9
    judged_ = entropy_statements.statements(profile).set_index("statement")
    gap = judged_.loc["negative samples have the higher entropy"]
    assert gap["value"] == pytest.approx(0.1) and gap["outcome"] == "agrees"
    still = judged_.loc["an update moves few probabilities on the plateau"]
    assert still["value"] == pytest.approx(0.998) and still["outcome"] == "agrees"
    # Equal sums in every tenth: a fifth of them is a fifth, and not half.
    falls = judged_.loc["updates fall on the tokens of high entropy"]
    assert falls["value"] == pytest.approx(0.2) and falls["outcome"] == "disagrees"
    without_kl = judged_.loc["the law holds for held-out performance, without KL"]
    assert without_kl["outcome"] == "not run", "the profile has no such method"
    assert set(judged_["seeds"].drop(without_kl.name)) == {3}
    assert entropy_tables.missing(profile) == "" == impact_tables.missing(profile)


def test_impacts_are_differences_without_the_noise_of_few_continuations(profile):
    measure(profile)
    table = impact_tables.impacts(profile).set_index(["token", "perplexity"])
    assert table.loc[("early", "low"), "impact"] == pytest.approx(0.9)
    assert table.loc[("late", "low"), "impact"] == pytest.approx(0.1)
    # 0.1² less 0.9 · 0.1 / 9 = 0.01: nothing is left
    assert table.loc[("late", "low"), "size"] == pytest.approx(0, abs=1e-6)
    judged_ = impact_tables.statements(profile).set_index("statement")
    for group in impact_tables.GROUPS:
        name = f"early tokens decide the outcome, late ones do not: {group} perplexity"
        assert judged_.loc[name, "outcome"] == "agrees"


def test_the_square_of_an_impact_is_unbiased():
    """All outcomes of 4 continuations from p = 0.7 and from 0.2, weighed by their probability."""
    k, p, q = 4, 0.7, 0.2
    kept, other = np.meshgrid(np.arange(k + 1), np.arange(k + 1), indexing="ij")
    weight = stats.binom.pmf(kept, k, p) * stats.binom.pmf(other, k, q)
    frame = pd.DataFrame({"kept": kept.ravel() / k, "replaced": other.ravel() / k})
    with pytest.MonkeyPatch.context() as patch:
        found = frame.assign(continuations=k)
        patch.setattr(impact_tables.measured, "explored", lambda *names: found)
        square = impact_tables.replaced(load_profile("smoke"))["square"]
    assert (square * weight.ravel()).sum() == pytest.approx((p - q) ** 2)


@pytest.mark.parametrize("name", ["law", "stages", "tokens", "impact"])
@pytest.mark.parametrize("there", [True, False])
def test_figures_are_drawn_with_and_without_what_is_measured(profile, name, there):
    if there:
        measure(profile)
    figure = getattr(entropy_figures, name)(profile)
    assert figure.axes
    texts = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert any("nothing measured yet" in text for text in texts) == (not there and name != "law")
    figure.canvas.draw()


def test_what_is_missing_is_said_in_one_sentence(profile):
    for told in (entropy_tables.missing(profile), impact_tables.missing(profile)):
        assert "sage-companion stage" in told and told.count("\n") == 0
