"""Outcomes of claims from planted intervals and planted runs."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sage_lib.errors import SageError
from sage_lib.experiment.profile import BASE, load_profile
from sage_lib.report import exact_tables, front_tables, measured, reported, verdict
from sage_lib.report.claims import CLAIMS, THIRDS, Claim, Comparison
from sage_lib.report.verdict import AGREES, DISAGREES, IN_PART, MISSING, OPEN


@pytest.mark.parametrize(
    ("expects", "low", "high", "expected"),
    [
        ("above", 0.001, 0.02, AGREES),
        ("above", -0.01, 0.004, DISAGREES),
        ("above", -0.01, 0.02, OPEN),
        ("below", -0.02, -0.001, AGREES),
        ("below", -0.004, 0.01, DISAGREES),
        ("equal", -0.004, 0.004, AGREES),
        ("equal", 0.006, 0.02, DISAGREES),
        ("equal", 0.001, 0.02, OPEN),
        ("not above", -0.02, 0.004, AGREES),
        ("not above", 0.001, 0.02, DISAGREES),
        ("not above", -0.001, 0.02, OPEN),
        ("not below", -0.004, 0.02, AGREES),
        ("not below", -0.02, -0.001, DISAGREES),
        ("above", 0.001, 0.004, DISAGREES),
        ("above", np.nan, np.nan, OPEN),
    ],
)
def test_what_an_interval_says_of_an_expectation(expects, low, high, expected):
    assert verdict.outcome(expects, low, high, margin=0.005) == expected


def test_no_interval_agrees_with_two_expectations_that_exclude_each_other():
    for low in np.linspace(-0.02, 0.02, 41):
        for high in np.linspace(low, 0.03, 21):
            found = {e: verdict.outcome(e, low, high, 0.005) for e in ("above", "equal", "below")}
            assert list(found.values()).count(AGREES) <= 1
            against = verdict.outcome("not above", low, high, 0.005)
            assert {against, found["above"]} != {AGREES}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(0, 0, OPEN), (1, 1, OPEN), (0.5, 0, AGREES), (1, 0.5, AGREES), (0.5, 0.5, DISAGREES)],
)
def test_a_floor_or_ceiling_of_both_arms_decides_nothing(countdown, ours, theirs, expected):
    profile = countdown({BASE: (0.3, 0.9), "grpo": (theirs, 0.8), "grpo_branch": (ours, 0.8)})
    one = Claim("floor", "", "", (Comparison("grpo_branch", "grpo", "pass@1", "above"),), "")
    assert verdict.comparisons(profile, [one]).iloc[0]["outcome"] == expected


def test_an_unknown_expectation_is_refused():
    with pytest.raises(SageError, match="above, below or equal, not 'higher'"):
        verdict.outcome("higher", 0, 1, 0.005)


@pytest.fixture
def countdown(monkeypatch):
    """Profile countdown whose exact evaluations are planted: mean pass@1 and pass@256 by method."""

    def plant(points, seeds=(1, 2, 3, 4)):
        found = {}
        for method, point in points.items():
            own = [None] if method == BASE else list(seeds)
            rng = np.random.default_rng(sum(map(ord, method)))
            noise = rng.normal(0, 0.001, (len(own), 30, 2))
            values = np.asarray(point) + noise - noise.mean(axis=(0, 1))
            rare = np.full((len(own), 30), 0.01) + noise[..., 0]
            found[method] = exact_tables.Exact(method, values, rare, ["both"] * 30, own)
        monkeypatch.setattr(exact_tables, "by_method", lambda *a, **k: found)
        monkeypatch.setattr(exact_tables, "evaluated", lambda profile: set(found))
        no_logs = pd.DataFrame(columns=["method", "seed", "step", "grad_norm"])
        monkeypatch.setattr(measured, "training", lambda profile: no_logs)
        return load_profile("countdown")

    return plant


def test_a_claim_agrees_only_where_all_its_comparisons_do(countdown):
    both = CLAIMS[0]
    for point, expected in {
        (0.32, 0.84): AGREES,
        (0.32, 0.79): IN_PART,
        (0.28, 0.84): IN_PART,
        (0.28, 0.79): DISAGREES,
    }.items():
        profile = countdown({BASE: (0.3, 0.85), "grpo": (0.31, 0.80), "grpo_branch": point})
        assert verdict.claims(profile, [both])["outcome"].tolist() == [expected]
    assert verdict.claims(countdown({"grpo": (0.3, 0.8)}), [both])["outcome"].tolist() == [MISSING]


def test_few_seeds_decide_nothing(countdown):
    profile = countdown({"grpo": (0.3, 0.8), "grpo_branch": (0.4, 0.9)}, seeds=(1, 2))
    assert verdict.claims(profile, CLAIMS[:1])["outcome"].tolist() == [OPEN]


def test_a_claim_without_comparisons_is_open_and_says_what_would_settle_it(countdown):
    claim = Claim("words", "Table 2", "more words", (), "a policy that writes")
    row = verdict.claims(countdown({"grpo": (0.3, 0.8)}), [claim]).iloc[0]
    assert (row["outcome"], row["settles"]) == (OPEN, "a policy that writes")


def test_the_papers_own_difference_stands_beside_the_measured_one(countdown):
    profile = countdown({"grpo": (0.3, 0.8), "grpo_branch": (0.3, 0.8)})
    table = verdict.comparisons(profile, CLAIMS[:1]).set_index("metric")
    printed = reported.load("sage_table1")
    average = (
        printed[printed["dataset"] == "Avg"].set_index(["row", "metric"])["mean"].astype(float)
    )
    for metric in ("pass@1", "pass@256"):
        expected = average["GRPO + Branch", metric] - average["GRPO", metric]
        assert table.loc[metric, "reported"] == pytest.approx(expected)


def test_gradient_norms_are_paired_by_seed(countdown, monkeypatch):
    profile = countdown({"grpo": (0.3, 0.8), "grpo_no_kl": (0.3, 0.8)})
    rows = [
        {"method": method, "seed": seed, "step": step, "grad_norm": seed + gap + 0.001 * seed}
        for method, gap in (("grpo", 0.5), ("grpo_no_kl", 0.0))
        for seed in (1, 2, 3)
        for step in (1, 2)
    ]
    monkeypatch.setattr(measured, "training", lambda profile: pd.DataFrame(rows))
    one = Claim(
        "g", "", "", (Comparison("grpo_no_kl", "grpo", "gradient norm, last third", "below"),), ""
    )
    row = verdict.comparisons(profile, [one]).iloc[0]
    assert row["difference"] == pytest.approx(-0.5) and row["seeds"] == 3 and row["beta"] == 1


def test_a_logged_metric_is_the_mean_over_its_part_of_the_steps(monkeypatch):
    log = pd.DataFrame({"method": "m", "seed": 1, "step": range(1, 10), "grad_norm": range(1, 10)})
    monkeypatch.setattr(measured, "training", lambda profile: log)
    thirds = [verdict.logged(None, f"gradient norm, {third} third").item() for third in THIRDS]
    assert thirds == [2, 5, 8], "of steps 1 to 9, whose norms are their numbers"


def test_every_comparison_names_methods_of_the_profile_countdown():
    profile = load_profile("countdown")
    known = {BASE, *profile.methods}
    for claim in CLAIMS:
        for one in claim.comparisons:
            assert {one.method, one.against} <= known, claim.name
            assert verdict.margin_of(one.metric) > 0, claim.name
            own = dataclasses.asdict(one)
            assert own["expects"] in ("above", "below", "equal", "not above", "not below")


def test_the_summary_says_what_the_planted_files_say(countdown):
    profile = countdown(
        {
            BASE: (0.30, 0.86),
            "grpo_no_kl": (0.32, 0.78),
            "grpo": (0.31, 0.84),
            "grpo_branch": (0.33, 0.85),
        }
    )
    first, second = verdict.summary(profile)
    assert first.startswith(
        "Our runs agree with the claim, and had little room: at beta 1, SAGE minus"
    )
    assert (
        " GRPO is +0.020" in first
        and " in pass@1 and +0.010 [" in first
        and first.endswith("] in pass@256 (4 seeds).")
    )
    weak, known = verdict._too_weak(verdict.comparisons(profile))
    assert second == (
        "They cannot rule a gain out: GRPO itself moves pass@1 only from 0.300 to 0.320, "
        f"and {weak} of {known} comparisons could not have seen a difference that matters."
    )
    split = {BASE: (0.30, 0.86), "grpo_no_kl": (0.32, 0.78), "grpo": (0.31, 0.84)}
    fallen = verdict.summary(countdown({**split, "grpo_branch": (0.28, 0.81)}))
    assert fallen[0].startswith("Our runs found no gain, ")
    apart = verdict.summary(countdown({**split, "grpo_branch": (0.33, 0.81)}))
    assert apart[0].startswith("Our runs support the claim in part, ")
    assert verdict.summary(countdown(split)) == ["SAGE and GRPO have not both been run yet."]


def test_a_comparison_is_too_weak_where_it_sees_only_more_than_the_margin():
    compared = pd.DataFrame(
        {"metric": ["pass@1", "pass@1, ood", "rare mass", "pass@256"],
         "detectable": [0.004, 0.006, 0.0004, np.nan]}
    )  # fmt: skip
    assert verdict._too_weak(compared) == (1, 3)


def test_few_seeds_tell_what_the_interval_over_seeds_alone_tells_as_well(countdown, monkeypatch):
    """An interval over seeds and problems may be narrower than that over the seeds' means."""
    profile = countdown({BASE: (0.30, 0.86), "grpo": (0.31, 0.84), "grpo_branch": (0.33, 0.85)})
    one = Claim("c", "", "", (Comparison("grpo_branch", "grpo", "pass@1", "above"),), "", None)
    assert verdict.claims(profile, [one])["outcome"].item() == AGREES
    monkeypatch.setattr(verdict, "over_seeds", lambda *_: (-0.01, 0.05))
    assert verdict.claims(profile, [one])["outcome"].item() == OPEN


def test_the_interval_over_seeds_is_the_t_interval_of_their_means():
    rng = np.random.default_rng(0)

    def planted(seeds):
        values = rng.uniform(size=(len(seeds), 6, 2))
        return exact_tables.Exact("m", values, values[..., 0] / 9, ["a"] * 4 + ["b"] * 2, seeds)

    ours, theirs = planted([1, 2, 3, 4]), planted([2, 3, 4])
    apart = ours.values[1:, :, 1] - theirs.values[:, :, 1]
    means = (apart[:, :4].mean(1) + apart[:, 4:].mean(1)) / 2
    expected = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    found = verdict.over_seeds(*front_tables.pair(ours, theirs), ours.sets, "pass@256")
    assert found == pytest.approx((expected.low, expected.high))
    of_one = front_tables.pair(planted([1]), planted([1]))
    assert all(np.isnan(verdict.over_seeds(*of_one, ours.sets, "rare mass")))


def test_methods_beside_the_base_are_counted_and_those_with_seeds_are_named():
    profile = load_profile("smoke")
    keys = ["grpo", "grpo_no_kl", "dapo_no_kl"]
    rows = pd.DataFrame({"method": keys, "low": [0.1, 0.1, -0.1], "high": 0.2, "seeds": [3, 1, 1]})
    assert verdict.beside_base(profile, rows, "more than", "less than", "like") == [
        "    more than the base: 2; of 3 seeds or more: GRPO",
        "    like the base: 1; of 3 seeds or more: none",
    ]


def test_what_could_not_have_been_shown_is_counted(countdown):
    profile = countdown({BASE: (0.30, 0.86), "grpo": (0.31, 0.84), "grpo_branch": (0.33, 0.85)})
    compared = verdict.comparisons(profile, CLAIMS[:1])
    compared["detectable"] = [0.004, 0.006]  # the least that matters is 0.005
    moved, weak = verdict.limits(profile, compared)
    assert moved.endswith("pass@1 +0.010 and pass@256 -0.020")
    assert weak.startswith("of 2 comparisons 1 would find only more")
    none = verdict.limits(profile, compared.assign(detectable=np.nan))[1]
    assert none.startswith("of 0 comparisons 0 ")
