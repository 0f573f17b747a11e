"""Outcomes of claims from planted intervals, planted logs and samples; and what the README says."""

import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import readme
from pydantic import ValidationError
from scipy import stats

from sage_lib.errors import SageError
from sage_lib.experiment.profile import BASE, load_profile
from sage_lib.experiment.results import Results, load_results
from sage_lib.paths import PUBLISHED, ROOT
from sage_lib.report import inference, outcomes, passk, reported
from sage_lib.report.inference import AGREES, CANNOT_TELL, DISAGREES, NOT_RUN, NOT_SEEN, SMALLER

METRICS = {*(f"pass@{k}" for k in (1, 8, 16, 256)), "right pass@1", "right pass@256"}
METRICS |= {*outcomes.LOGGED, outcomes.TAIL, outcomes.UNSOUND, outcomes.DIVERSITY}
METRICS |= {outcomes.BRANCHING}
COLUMNS = ["pass@1", "pass@256", "rare mass"]
WORDS = dict.fromkeys(("source", "statement"), "") | {"settles": "more seeds"}


def asking(*comparisons, name="one", primary=False, by="ours"):
    """One claim of these comparisons, with the margin of the file."""
    claim = {"claim": name, "by": by, "comparisons": comparisons, "primary": primary, **WORDS}
    return outcomes.Claims(margin=outcomes.load_claims().margin, claims=[claim])


#: GRPO at two more values of beta: the margin is a twentieth of what lies between them, 0.005.
LINE = {"front_beta0.02": (0.36, 0.75), "front_beta0.8": (0.26, 0.85)}


@pytest.fixture
def planted(monkeypatch):
    """A study whose exact values are planted: mean pass@1 and pass@256 by method."""

    def plant(points, seeds=(1, 2, 3, 4), name="planted"):
        found = {}
        for method, point in {**LINE, **points}.items():
            own = [None] if method == BASE else list(seeds)
            rng = np.random.default_rng(sum(map(ord, method)))
            noise = rng.normal(0, 0.001, (len(own), 30, 3))
            values = np.array([*point, 0.01]) + noise - noise.mean(axis=(0, 1))
            sets = ["both"] * 30
            found[method] = inference.Values(method, values, COLUMNS, sets, own)
        profile = load_profile("study")
        results = SimpleNamespace(profile=profile, name=name, label=profile.label, planted=found)
        results.base_of = partial(Results.base_of, results)
        monkeypatch.setattr(passk, "exact", lambda one, ks, ood: one.planted)
        return results

    return plant


def outcome(chosen, *results):
    return outcomes.claim_outcomes(chosen, outcomes.comparisons(chosen, *results))["outcome"].item()


BOTH = asking(
    ("grpo_branch", "grpo", "pass@1", "above"), ("grpo_branch", "grpo", "pass@256", "above")
)


def test_a_claim_of_the_paper_that_disagrees_is_not_seen_here(planted):
    results = planted({"grpo": (0.31, 0.80), "grpo_branch": (0.32, 0.79)})
    theirs = asking(*BOTH.claims[0].comparisons, by="paper")
    compared = outcomes.comparisons(theirs, results)
    assert compared["outcome"].tolist() == [AGREES, NOT_SEEN]
    judged = outcomes.claim_outcomes(theirs, compared).iloc[0]
    assert judged[["by", "outcome", "comparisons"]].tolist() == ["paper", NOT_SEEN, "1 of 2 agree"]
    with pytest.raises(ValidationError, match="Input should be 'paper' or 'ours'"):
        asking(by="theirs")


def test_each_base_alone_says_what_its_seeds_say(planted):
    """Seeds 1 and 2 start from one base, 3 and 4 from another with twice the gain."""
    results = planted({"grpo": (0.31, 0.80)})
    gain = np.array([0.01, 0.012, 0.02, 0.024])[:, None, None] * np.array([1.0, -1.0, 0.0])
    grpo = results.planted["grpo"]
    branch = replace(grpo, method="grpo_branch", values=grpo.values + gain)
    results.planted["grpo_branch"] = branch
    names = [*(f"grpo-s{seed}" for seed in (1, 2)), *(f"other/grpo-s{seed}" for seed in (3, 4))]
    runs = [*zip(names, ["grpo"] * 4, [1, 2, 3, 4], strict=True), ("sft", BASE, None)]
    results.runs = pd.DataFrame(runs, columns=["run", "method", "seed"])
    chosen = asking(*BOTH.claims[0].comparisons, primary=True)
    rows = outcomes.by_base(outcomes.comparisons(chosen, results), results)
    assert rows["base"].tolist() == ["planted", "other"] * 2
    assert rows["difference"].tolist() == pytest.approx([0.011, 0.022, -0.011, -0.022])
    assert set(rows["seeds"]) == {2} and set(rows["outcome"]) == {CANNOT_TELL}, "two seeds"
    assert outcomes.by_base(outcomes.comparisons(BOTH, results), results).empty, "none is primary"


def test_of_a_base_the_interval_that_judges_is_shown_and_one_without_a_pair_left_out(planted):
    results = planted({"grpo": (0.31, 0.80)}, seeds=range(1, 9))
    gain = np.linspace(0.004, 0.016, 8)[:, None, None] * np.ones(3)
    grpo = results.planted["grpo"]
    branch = replace(grpo, method="grpo_branch", values=grpo.values + gain)
    results.planted["grpo_branch"] = branch.at_seeds([1, 2, 3, 4])
    names = [f"{'' if seed < 5 else 'other/'}grpo-s{seed}" for seed in range(1, 9)]
    runs = [*zip(names, ["grpo"] * 8, range(1, 9), strict=True), ("sft", BASE, None)]
    results.runs = pd.DataFrame(runs, columns=["run", "method", "seed"])
    compared = outcomes.comparisons(asking(*BOTH.claims[0].comparisons, primary=True), results)
    rows = outcomes.by_base(compared, results)
    assert rows["base"].tolist() == ["planted"] * 2, "the other base has no pair yet"
    for row, expects, margin in zip(
        rows.itertuples(), compared["expects"], compared["margin"], strict=True
    ):
        ours, theirs = (results.planted[m].at_seeds([1, 2, 3, 4]) for m in ("grpo_branch", "grpo"))
        both = inference.difference(ours, theirs).set_index("metric").loc[row.metric]
        low, high = inference.deciding_interval(both)
        assert (row.low, row.high) == pytest.approx((low, high)) and low < high
        assert row.outcome == inference.outcome(expects, low, high, margin)


def test_a_primary_comparison_that_was_not_run_counts_for_holms_rule(planted):
    points = {"grpo": (0.31, 0.80), "grpo_branch": (0.32, 0.80)}
    one, other = ((name, "grpo", "pass@1", "above") for name in ("grpo_branch", "full_grpo"))
    results = planted(points)
    alone = outcomes.comparisons(asking(one, primary=True), results).iloc[0]
    assert alone["judged_low"] == pytest.approx(min(alone["low"], alone["low_seeds"]))
    both = outcomes.comparisons(asking(one, other, primary=True), results)
    assert both.loc[1, "outcome"] == NOT_RUN
    assert both.loc[0, "judged_low"] < alone["judged_low"], "0.05/2 though one alone was run"


def test_what_was_not_run_and_few_seeds_are_said(planted):
    assert outcome(BOTH, planted({"grpo": (0.3, 0.8)})) == NOT_RUN
    apart = {"grpo": (0.3, 0.8), "grpo_branch": (0.4, 0.9)}
    assert outcome(BOTH, planted(apart, seeds=(1, 2))) == CANNOT_TELL
    results = planted(apart)
    results.planted["grpo"].seeds[:] = [5, 6, 7, 8]
    assert outcome(BOTH, results) == NOT_RUN, "no seed in common"
    lone = asking()
    row = outcomes.claim_outcomes(lone, outcomes.comparisons(lone, results)).iloc[0]
    assert (row["outcome"], row["settles"]) == (CANNOT_TELL, "more seeds")


def test_the_margin_is_a_share_of_grpos_own_range(planted):
    results = planted({"grpo": (0.31, 0.80), "grpo_branch": (0.32, 0.80)})
    rows = outcomes.comparisons(BOTH, results)
    assert rows["margin"].tolist() == pytest.approx([0.05 * 0.1] * 2, abs=2e-4)
    floored = BOTH.model_copy(update={"floor": {"pass@1": 0.002, "pass@256": 0.02}})
    rows = outcomes.comparisons(floored, results)
    assert rows["margin"].tolist() == pytest.approx([0.005, 0.02], abs=2e-4), "the larger one"
    assert outcomes.load_claims().floor == {"pass@256": 0.01}
    results.planted.pop("front_beta0.02"), results.planted.pop("front_beta0.8")
    rows = outcomes.comparisons(floored, results)
    assert rows["margin"].isna().all(), "one beta has no range"
    assert set(rows["outcome"]) == {CANNOT_TELL}


def test_without_a_share_the_floor_is_the_margin_also_of_right_answers(planted, monkeypatch):
    results = planted({"grpo": (0.31, 0.80), "grpo_branch": (0.33, 0.82)})
    right = {
        name: replace(one, columns=[f"right {column}" for column in COLUMNS])
        for name, one in results.planted.items()
    }
    monkeypatch.setattr(passk, "right", lambda one, ks, ood: right)
    pair = ("grpo_branch", "grpo")
    claims = asking((*pair, "right pass@1", "above"), (*pair, "pass@1", "above"))
    claims.margin, claims.floor = 0.0, {"right pass@1": 0.05, "pass@1": 0.004}
    claims.claims[0].table = "sage_table1"
    del results.planted["front_beta0.02"], results.planted["front_beta0.8"]
    rows = outcomes.comparisons(claims, results)
    assert rows["margin"].tolist() == [0.05, 0.004], "also where GRPO has one beta, and no range"
    assert rows["outcome"].tolist() == [SMALLER, AGREES]
    assert rows["reported"].tolist() == pytest.approx([0.018] * 2, abs=1e-9)


def test_primary_outcomes_are_corrected_and_the_others_are_not(planted):
    """A difference that is sure at 95 % alone, and no more so beside one that is not sure."""
    results = planted({"grpo": (0.31, 0.80)}, seeds=(1, 2, 3, 4, 5))
    grpo, seeds = results.planted["grpo"], np.array([0.2, 0.5, 1.0, 1.5, 1.8])[:, None, None]
    for method, gap in (("grpo_branch", seeds), ("grpo_token", seeds - 0.9)):
        results.planted[method] = replace(grpo, method=method, values=grpo.values + 0.01 * gap)
    pairs = [("grpo_branch", "grpo", "pass@1", "above"), ("grpo_token", "grpo", "pass@1", "above")]
    alone = outcomes.comparisons(asking(pairs[0], primary=True), results).iloc[0]
    known = stats.ttest_1samp(0.01 * seeds.ravel(), 0).pvalue
    assert alone["error_rate"] == pytest.approx(known, rel=1e-3) and 0.025 < known < 0.05
    assert alone["outcome"] == AGREES and alone["kept"] < 5
    rows = outcomes.comparisons(asking(*pairs, primary=True), results)
    assert rows["outcome"].tolist() == [CANNOT_TELL] * 2, "0.05/2 is the first step of Holm's"
    wide = stats.ttest_1samp(0.01 * seeds.ravel(), 0).confidence_interval(0.975)
    first = rows.loc[0, ["judged_low", "judged_high", "low_seeds"]].tolist()
    assert first[:2] == pytest.approx([wide.low, wide.high], rel=1e-3) and first[0] < 0 < first[2]
    for row in rows.itertuples():
        told = inference.outcome(row.expects, row.judged_low, row.judged_high, row.margin)
        assert row.outcome == told, "what is printed is what judges"
    rows = outcomes.comparisons(asking(*pairs), results)
    assert rows["outcome"].tolist() == [AGREES, CANNOT_TELL] and rows["error_rate"].isna().all()


def test_the_papers_own_difference_stands_beside_the_measured_one(planted):
    claims = asking(*BOTH.claims[0].comparisons)
    claims.claims[0].table = "sage_table1"
    rows = outcomes.comparisons(claims, planted({"grpo": (0.3, 0.8), "grpo_branch": (0.3, 0.8)}))
    printed = reported.read_table("sage_table1").query("dataset == 'Avg'")
    printed = printed.set_index(["row", "metric"])["mean"]
    for row in rows.itertuples():
        expected = printed["GRPO + Branch", row.metric] - printed["GRPO", row.metric]
        assert row.reported == pytest.approx(expected)
    ood = load_profile("paper_ood")  # its own table has one data set, and no average
    results = SimpleNamespace(profile=ood, label=ood.label)
    pair = outcomes.Comparison("grpo_branch", "grpo", "pass@1", "above")
    printed = reported.read_table("sage_table9").set_index(["row", "metric"])["mean"]
    expected = printed["GRPO + Branch", "pass@1"] - printed["GRPO", "pass@1"]
    assert outcomes._reported(results, "sage_table1", pair) == pytest.approx(expected)


def test_a_logged_metric_is_the_mean_over_its_part_of_the_steps_paired_by_seed(planted):
    """Of steps 1 to 9 the norm is the step's number, and the base's log is none of RL."""
    results = planted({"grpo": (0.3, 0.8)})
    rows = [
        {"method": method, "seed": seed, "step": step, "grad_norm": step + gap * seed}
        for method, gap in (("grpo", 1.0), ("grpo_no_kl", 0.9), ("matched", 1.5), (BASE, 7.0))
        for seed in (1, 2, 3)
        for step in range(1, 10)
    ]
    results.steps = pd.DataFrame(rows)
    names = [f"gradient norm, {third} third" for third in ("first", "middle", "last")]
    of_grpo = [outcomes.logged(name, results)["grpo"].loc[1] for name in names]
    assert of_grpo == [2 + 1, 5 + 1, 8 + 1]
    for name, column in (("entropy",) * 2, ("reward",) * 2, ("length", "completions/mean_length")):
        others = SimpleNamespace(steps=results.steps.rename(columns={"grad_norm": column}))
        assert outcomes.logged(name, others)["grpo"].loc[1] == 8.5 + 1, "steps 8 and 9"
    assert BASE not in outcomes.logged(names[0], results)
    chosen = asking(("grpo_no_kl", "grpo", names[2], "below"), ("rft", "grpo", names[2], "below"))
    row, missing = outcomes.comparisons(chosen, results).to_dict("records")
    known = stats.ttest_1samp([-0.1, -0.2, -0.3], 0).confidence_interval(0.95)
    assert row["difference"] == pytest.approx(-0.2) and row["seeds"] == 3 and row["beta"] == 0.2
    assert row["margin"] == pytest.approx(0.05 * 0.5 * 2), "of the means at two betas"
    assert (row["low"], row["high_seeds"]) == pytest.approx((known.low, known.high))
    assert (row["outcome"], missing["outcome"]) == (CANNOT_TELL, NOT_RUN)
    pairs = [("rft", "grpo"), ("grpo_no_kl", "grpo")]
    [found] = outcomes.differences(results, names[2], pairs).to_dict("records")
    assert (found.pop("method"), found.pop("against")) == ("grpo_no_kl", "grpo")
    expected = {"difference": -0.2, "low": known.low, "high": known.high, "seeds": 3}
    assert found == pytest.approx(expected)


def test_a_seed_that_decides_a_logged_metric_is_not_kept(planted):
    results, gains = planted({}), [0.11] * 5 + [0.06]
    rows = [{"seed": s, "step": 1, "grpo_no_kl": x, "grpo": 0.0} for s, x in enumerate(gains)]
    results.steps = pd.DataFrame(rows).melt(["seed", "step"], None, "method", "entropy")
    chosen = asking(("grpo_no_kl", "grpo", "entropy", "above"))
    chosen.margin, chosen.floor = 0.0, {"entropy": 0.105}
    [row] = outcomes.comparisons(chosen, results).itertuples()
    assert (row.outcome, row.kept) == (SMALLER, 5), "without 0.06 the mean reaches the margin"


def test_a_reader_is_shown_labels_and_each_difference_with_its_interval(planted):
    results = planted({"grpo": (0.31, 0.80), "grpo_branch": (0.32, 0.78)})
    chosen = asking(*BOTH.claims[0].comparisons, ("rft", BASE, "pass@1", "above"))
    shown = outcomes.readable(compared := outcomes.comparisons(chosen, results), results)
    assert list(shown["comparison"]) == [*["GRPO + Branch - GRPO"] * 2, "RFT - Base Model"]
    first, second, missing = shown["difference"]
    assert re.fullmatch(r"\+0\.0100 \[\+0\.009\d, \+0\.010\d\]", first)
    assert second.startswith("-0.0200 [-0.02") and missing == "" and [*shown["seeds"]] == [4, 4, 0]
    compared["judged_low"] = np.nan  # as with one seed
    assert outcomes.readable(compared, results)["difference"][0] == "+0.0100"


def test_any_k_can_be_asked_beside_the_two_of_every_table(monkeypatch):
    monkeypatch.setattr(passk, "exact", lambda one, ks, ood: (ks, ood))
    results = SimpleNamespace(profile=load_profile("study"))
    assert outcomes.values(results, "pass@16", "ood") == ([1, 16, 256], True)


def test_a_tail_is_the_share_beyond_the_bases_upper_twentieth_and_unsound_a_share(planted):
    results = planted({})
    base = [{"method": BASE, "seed": None, "perplexity": 1 + i / 100} for i in range(100)]
    ours = [{"method": "grpo", "seed": 1, "perplexity": p} for p in (1.0, 1.93, 1.95, 9.0)]
    where = [{"dataset": "both", "problem": f"p{i % 2}"} for i in range(104)]
    results.scores = pd.DataFrame([{**a, **b} for a, b in zip(base + ours, where, strict=True)])
    found = outcomes.tail(results)
    assert found[BASE].values.mean() == pytest.approx(0.05)
    assert found["grpo"].values[0, :, 0].tolist() == [0.5, 0.5], "1.95 of p0 and 9.0 of p1"
    results.scores = results.scores.query("method != @BASE")
    with pytest.raises(SageError, match="the base was not evaluated: call sage-companion stage"):
        outcomes.tail(results)
    counts = pd.DataFrame({"problem": ["a", "b"], "c": [5, 2], "valid_common": [3, 0]})
    results.counts = counts.assign(method="grpo", seed=1, dataset="both", n=8, valid_rare=[1, 2])
    assert outcomes.unsound(results)["grpo"].values.ravel().tolist() == [1 / 8, 0]


def test_diversity_is_the_effective_number_of_valid_completions_and_branching_a_mean(planted):
    results = planted({})
    masses = {(BASE, None): ([0.2, 0.2], [0.1, 0.3]), ("grpo", 1): ([0.4, 0.0], [2e-3, 1e-3, 5e-3])}
    rows = [
        (method, method, seed, "both", f"p{i}", p)
        for (method, seed), of_problems in masses.items()
        for i, of_problem in enumerate(of_problems)
        for p in of_problem
    ]
    frame = pd.DataFrame(rows, columns=["run", "method", "seed", "dataset", "problem", "p"])
    with np.errstate(divide="ignore"):
        results.support = frame.assign(logp=np.log(frame["p"]))
    found = outcomes.diversity(results)
    for (method, _), of_problems in masses.items():
        expected = [np.exp(stats.entropy(p)) for p in of_problems]
        assert found[method].values[0, :, 0] == pytest.approx(expected), "2 and 1 of the first"
    results.scores = frame.assign(branching=[1.0, 2.0, 1.0, np.nan, 1.0, 4.0, 3.0, 3.0, 6.0])
    found = outcomes.branching(results)
    assert found[BASE].values.ravel().tolist() == [1.5, 1.0]
    assert found["grpo"].values.ravel().tolist() == [2.5, 4.0]


def test_without_exact_probabilities_pass_at_k_is_that_of_the_samples():
    results = load_results("smollm")
    row = outcomes.comparisons(asking(("grpo", BASE, "pass@8", "above")), results).iloc[0]
    missed = [math.comb(n - c, 8) / math.comb(n, 8) for n, c in results.counts[["n", "c"]].values]
    means = results.counts.assign(missed=missed).groupby("method")["missed"].mean()
    assert row["difference"] == pytest.approx(means[BASE] - means["grpo"]) and row["seeds"] == 3
    right = outcomes.comparisons(asking(("grpo", BASE, "right pass@8", "above")), results)
    assert right["difference"].item() == row["difference"], "samples count right answers"


@pytest.mark.parametrize(
    ("name", "profile", "primary", "papers"),
    [
        ("claims", "study", 6, 14),
        ("exploration_claims", "study", 0, 25),
        ("operating_point_claims", "operating_point", 4, 5),
        ("smollm_paper_claims", "smollm_paper", 4, 1),
        ("smollm_aimless_claims", "smollm_aimless", 4, 2),
    ],
)
def test_the_claims_name_methods_and_metrics_that_there_are(name, profile, primary, papers):
    claims, known = outcomes.load_claims(name), {BASE, *load_profile(profile).methods}
    assert len({claim.claim for claim in claims.claims}) == len(claims.claims)
    assert sum(claim.by == "paper" for claim in claims.claims) == papers
    for claim in claims.claims:
        assert claim.source.startswith(("ours", "prediction")) == (claim.by == "ours"), claim.claim
        for one in claim.comparisons:
            assert {one.method, one.against} <= known, claim.claim
            assert one.metric in METRICS
    assert sum(len(claim.comparisons) for claim in claims.claims if claim.primary) == primary


def test_the_claims_of_a_file_are_those_of_its_questions():
    every, parts = outcomes.load_claims("exploration_claims"), ("shaping", "rft", "sft", "rivals")
    found = {part: outcomes.load_claims("exploration_claims", part) for part in parts}
    assert all({one.question for one in found[part].claims} == {part} for part in parts)
    assert sum(len(one.claims) for one in found.values()) == len(every.claims)
    assert found["sft"].margin == every.margin
    assert outcomes.load_claims("claims", "sft").claims == []
    with pytest.raises(ValidationError, match="Input should be 'above'"):
        asking(("grpo", BASE, "pass@1", "higher"))


@pytest.fixture(scope="module")
def published():
    results, claims = load_results("study"), outcomes.load_claims()
    compared = outcomes.comparisons(claims, results)
    return results, claims, compared, outcomes.claim_outcomes(claims, compared)


def test_the_published_verdict_follows_from_the_published_frames(published):
    _, _, compared, _ = published
    stored = pd.read_csv(PUBLISHED / "study" / "comparisons.csv")
    pd.testing.assert_frame_equal(compared, stored, check_dtype=False, rtol=1e-6)


def test_the_published_outcomes_follow_from_the_printed_intervals(published):
    _, _, compared, _ = published
    for row in compared.itertuples():
        told = inference.outcome(row.expects, row.judged_low, row.judged_high, row.margin)
        told = NOT_SEEN if (row.by, told) == ("paper", DISAGREES) else told
        assert row.outcome in (told, CANNOT_TELL), "few seeds and shares near 0 tell nothing"
    primary = compared[compared["error_rate"].notna()]
    widened = primary["judged_high"] - primary["judged_low"] > primary["high"] - primary["low"]
    assert widened.sum() == len(primary) - 1, "Holm's last step is at 95 %"


def test_the_readme_says_what_the_published_frames_say(published):
    text = (ROOT / "README.md").read_text()
    assert readme.filled(text, "result", readme.result()) == text


def test_a_claim_that_cannot_be_judged_here_is_no_failure(planted):
    results = planted({"grpo": (0.3, 0.8), "grpo_branch": (0.28, 0.7)})
    claims = asking(("grpo_branch", "grpo", "pass@1", "above"), by="paper")
    compared = outcomes.comparisons(claims, results)
    assert outcomes.claim_outcomes(claims, compared)["outcome"].item() == NOT_SEEN
    claims.claims[0].testable = False
    outcome = outcomes.claim_outcomes(claims, compared).iloc[0]
    assert (outcome["outcome"], outcome["settles"]) == (inference.NOT_TESTABLE, "more seeds")
    assert compared["outcome"].item() == NOT_SEEN
