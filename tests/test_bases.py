"""Seeds of a second base, pooled: each difference within one base, against a computation by hand.
The two bases lie 0.1 apart, so that an arm held against the wrong base would be seen."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import BASE, load_profile
from sage_lib.report import (
    arm_figures,
    arm_tables,
    bases,
    exact_tables,
    measured,
    sft_rl_tables,
    style,
    verdict,
)
from sage_lib.report.claims import Claim, Comparison
from sage_lib.report.verdict import AGREES, OPEN

FIRST, SECOND = (3407, 3408, 3409), (3410, 3411)
SETS = ["a"] * 20 + ["b"] * 10


@pytest.fixture(scope="module")
def profiles():
    """The grid's profile and that of its second base, with the seeds of these tests."""
    found = []
    for name, seeds in (("countdown", FIRST), ("countdown" + bases.SECOND, SECOND)):
        profile = load_profile(name)
        methods = {
            key: dataclasses.replace(profile.methods[key], seeds=seeds)
            for key in ("grpo", "rft", "pass_at_k_beta1.0")
        }
        found.append(dataclasses.replace(profile, methods=methods, seeds=seeds))
    return found


@pytest.fixture
def planted(monkeypatch, profiles):
    """(profile name, method) -> exact values, and step logs whose entropies are noise."""
    rng, exact, logs = np.random.default_rng(5), {}, {}
    for shift, profile in zip((0.0, 0.1), profiles, strict=True):
        found, rows = {}, []
        for key, level in {BASE: 0.3, "grpo": 0.32, "rft": 0.34, "pass_at_k_beta1.0": 0.35}.items():
            seeds = [None] if key == BASE else list(profile.seeds_of(key))
            values = level + shift + rng.normal(0, 0.004, (len(seeds), len(SETS), 2))
            found[key] = exact_tables.Exact(key, values, values[..., 0] / 9, SETS, seeds)
            for seed in seeds if key != BASE else ():
                ends = {"method": key, "seed": seed, "entropy": level + rng.normal(0, 0.01)}
                rows += [{**ends, "step": step} for step in range(1, 11)]
        exact[profile.name], logs[profile.name] = found, pd.DataFrame(rows)
    monkeypatch.setattr(exact_tables, "by_method", lambda one, *_: exact[one.name])
    monkeypatch.setattr(exact_tables, "evaluated", lambda one: set(exact[one.name]))
    monkeypatch.setattr(measured, "training", lambda one: logs[one.name])
    return exact, logs


def test_the_second_base_differs_from_the_first_in_its_first_weights_alone():
    one, other = (load_profile(name) for name in ("countdown", "countdown" + bases.SECOND))
    flat = [profile.flat(methods=False) for profile in (one, other)]
    differ = {key for key in flat[0] | flat[1] if flat[0].get(key) != flat[1].get(key)}
    assert differ == {"name", "description", "model.seed", "seeds", "train"}
    for key, method in other.methods.items():
        assert dataclasses.replace(method, seeds=None) == dataclasses.replace(
            one.methods[key], seeds=None
        )
        assert not {*one.seeds_of(key)} & {*other.seeds_of(key)} or key in {
            "grpo",
            "grpo_no_kl",
            "grpo_branch",
            "branch_strong",
        }


def test_a_pooled_difference_is_taken_within_each_base(profiles, planted):
    exact, _ = planted
    against = {"rft": BASE, "pass_at_k_beta1.0": "grpo"}
    for method, other in against.items():
        one = Comparison(method, other, "pass@256", "above")
        row = verdict.comparisons(profiles[0], [Claim("", "", "", (one,), "")], profiles[1:])
        apart = np.concatenate(
            [exact[p.name][method].values - exact[p.name][other].values for p in profiles]
        )
        mean, low, high = metrics.paired_difference(apart, np.zeros_like(apart), SETS)
        assert row["seeds"].item() == len(FIRST + SECOND)
        found = row[["difference", "low", "high"]].to_numpy(dtype=float)[0]
        assert found == pytest.approx((mean[1], low[1], high[1]))
        by_seed = (apart[:, :20, 1].mean(1) + apart[:, 20:, 1].mean(1)) / 2
        assert found[0] == pytest.approx(by_seed.mean())
        alone = stats.ttest_1samp(by_seed, 0).confidence_interval(0.95)
        of_seeds = row[["low over seeds", "high over seeds"]].to_numpy(dtype=float)[0]
        assert of_seeds == pytest.approx((alone.low, alone.high))
        table = arm_tables.comparisons(profiles[0], [Claim("", "", "", (one,), "")], profiles[1:])
        assert table[[*arm_tables.BASES]].to_numpy()[0] == pytest.approx(
            (by_seed[:3].mean(), by_seed[3:].mean())
        )


def test_two_seeds_of_the_second_base_count_with_three_of_the_first(profiles, planted):
    claim = Claim("c", "", "", (Comparison("rft", BASE, "pass@1", "above"),), "")
    assert verdict.claims(profiles[1], [claim])["outcome"].item() == OPEN, "two seeds alone"
    assert verdict.claims(profiles[0], [claim], profiles[1:])["outcome"].item() == AGREES
    lacking = dataclasses.replace(profiles[1], name="not run")
    planted[0][lacking.name] = {}
    assert verdict.comparisons(profiles[0], [claim], [lacking])["seeds"].item() == len(FIRST)


def test_a_logged_metric_pools_the_pairs_of_both_bases(profiles, planted):
    _, logs = planted
    one = Comparison("pass_at_k_beta1.0", "grpo", "entropy", "above")
    row = verdict.comparisons(profiles[0], [Claim("", "", "", (one,), "")], profiles[1:]).iloc[0]
    ends = pd.concat(logs.values()).groupby(["method", "seed"])["entropy"].mean()
    known = stats.ttest_rel(ends["pass_at_k_beta1.0"], ends["grpo"]).confidence_interval(0.95)
    assert (row["low"], row["high"]) == pytest.approx((known.low, known.high))
    assert row["seeds"] == len(FIRST + SECOND)


def test_statements_of_sft_and_rl_pool_the_bases_too(profiles, monkeypatch):
    rng, frames = np.random.default_rng(3), {}
    for shift, profile in zip((0.0, 0.1), profiles, strict=True):
        rows = []
        for key, level in {BASE: 0.8, "more_sft": 0.83}.items():
            for seed in [None] if key == BASE else profile.seeds:
                for problem, name in enumerate(SETS):
                    p = level + shift + rng.normal(0, 0.01)
                    rows.append((key, seed, name, str(problem), p))
        columns = ["method", "seed", "dataset", "problem", "pass@256"]
        frames[profile.name] = pd.DataFrame(rows, columns=columns)
    monkeypatch.setattr(sft_rl_tables, "arms", lambda profile: [BASE, "more_sft"])
    monkeypatch.setattr(sft_rl_tables, "SAID", sft_rl_tables.SAID[:1])
    monkeypatch.setattr(sft_rl_tables, "measures", lambda one: {"pass@256": frames[one.name]})
    whole = sft_rl_tables.statements(profiles[0], {"pass@256": frames["countdown"]}, profiles[1:])
    row = whole.set_index(["statement", "method"]).loc[("SFT widens pass@k", "more_sft")]
    means = []
    for frame in frames.values():
        level = frame.groupby(["method", "dataset"])["pass@256"].mean().groupby("method").mean()
        means.append(level["more_sft"] - level[BASE])
    assert tuple(row[[*arm_tables.BASES]]) == pytest.approx(tuple(means))
    assert row["difference"] == pytest.approx((3 * means[0] + 2 * means[1]) / 5)
    assert row["seeds"] == 5 and row["outcome"] == AGREES


def test_the_figure_marks_what_the_second_base_says(profiles, planted):
    table = arm_tables.differences(profiles[0], [("pass_at_k_beta1.0", "grpo")], profiles[1:])
    figure = arm_figures.differences(profiles[0], table)
    assert "the second base alone" in style.described(figure)
    marked = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    expected = table.set_index("metric").loc["pass@1", arm_tables.BASES[1]]
    assert marked[0].get_xdata() == pytest.approx([expected])
    alone = arm_tables.differences(profiles[0], [("pass_at_k_beta1.0", "grpo")])
    assert "diamonds" not in style.described(arm_figures.differences(profiles[0], alone))


def test_there_is_no_second_base_but_where_a_profile_has_one(profiles, planted):
    assert [one.name for one in bases.others(load_profile("countdown"))] == ["countdown_rebased"]
    assert bases.others(load_profile("smoke")) == []
    said = bases.sentence(profiles[0], ["rft"])
    assert said == (
        "from the first base (countdown) 1 arm of seeds 3407, 3408, 3409; "
        "from the second base (countdown_rebased) 1 arm of seeds 3410, 3411"
    )


def test_what_the_second_base_overturns_is_said(profiles, planted, monkeypatch):
    claim = Claim("raises it", "", "", (Comparison("rft", "grpo", "pass@1", "above"),), "")
    monkeypatch.setattr(bases, "others", lambda main: profiles[1:])
    assert bases.changed(profiles[0], [claim]) == [
        "no outcome changes with the seeds of the second base"
    ]
    exact = planted[0][profiles[1].name]["rft"]
    exact.values[...] -= 0.08  # there it lowers it
    [line] = bases.changed(profiles[0], [claim])
    assert (
        line
        == "by the first base's seeds alone agrees, over the seeds of both cannot tell: raises it"
    )
    monkeypatch.setattr(bases, "others", lambda main: [])
    assert bases.changed(profiles[0], [claim]) == []
