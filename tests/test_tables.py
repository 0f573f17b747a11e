"""Tables from counts written by hand: several seeds, unequal data sets, and missing files."""

import dataclasses
import gzip
import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import nct as noncentral_t
from scipy.stats import t as student

from sage_lib.errors import SageError
from sage_lib.evaluation import counts
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Data, Method, load_profile
from sage_lib.report import (
    countdown_tables,
    exact_tables,
    measured,
    reported,
    result_tables,
    sample_tables,
    training_tables,
)
from sage_lib.tasks.countdown import COUNTED
from sage_lib.tasks.prompts import answer_turn
from sage_lib.tasks.table import check_settings

SIZES = {"both": 4, "forward": 6, "reverse": 14}
SAMPLES = 8


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """Three seeds of GRPO and of Branch, and a base; nothing is measured yet."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    laptop = load_profile("laptop")
    methods = {key: laptop.methods[key] for key in ("grpo", "grpo_branch")}
    inside = tuple(data for data in laptop.evaluation.data if not data.ood)
    changed = dataclasses.replace(laptop, seeds=(1, 2, 3), methods=methods)
    return with_evaluation(
        changed, samples=SAMPLES, ks=(1, 2, 4, 8), methods=None, resamples=2000, data=inside
    )


def with_evaluation(profile, **changes):
    return dataclasses.replace(
        profile, evaluation=dataclasses.replace(profile.evaluation, **changes)
    )


def write(profile, correct, only=lambda run: True):
    """``correct(method, seed, dataset, problem)`` of 8 samples: the text "good", the others "bad".

    Of a data set that is not countdown's no ways are counted.
    """
    sizes = {d.label: SIZES.get(d.label, 3) for d in profile.evaluation.data}
    ways = {d.label: 0 if d.name == "countdown" else None for d in profile.evaluation.data}
    for method, seed, run, _ in runs.evaluations(profile):
        run.measured.mkdir(parents=True, exist_ok=True)
        if not only(run):
            continue
        rows, saved = [], []
        for dataset, size in sizes.items():
            for i in range(size):
                problem, c = f"p{i}", correct(method, seed, dataset, i)
                rows.append((dataset, problem, SAMPLES, c, 0, *[ways[dataset]] * 3))
                saved.append(samples_row(dataset, problem, c))
        table = pd.DataFrame(rows, columns=[*counts.COLUMNS, *COUNTED])
        table.to_csv(run.measured / "counts.csv", index=False)
        lines = "".join(json.dumps(row) + "\n" for row in saved)
        (run.measured / "samples.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def samples_row(dataset, problem, c):
    texts = ["we denote x" if k < c else "w" for k in range(SAMPLES)]
    return {
        "dataset": dataset,
        "problem": problem,
        "completions": [answer_turn(text, str(k)) for k, text in enumerate(texts)],
        "tokens": [3] * SAMPLES,
        "finished": [True] * SAMPLES,
        "correct": [k < c for k in range(SAMPLES)],
    }


def write_scores(profile, perplexity):
    """Scores of every sample; ``perplexity(method)`` draws one number."""
    columns = ["dataset", "problem", "number", "correct", "tokens"]
    columns += ["perplexity", "entropy", "branching"]
    for method, _, run, _ in runs.evaluations(profile):
        rows = []
        for dataset, size in SIZES.items():
            for i in range(size):
                for n in range(SAMPLES):
                    rows.append((dataset, f"p{i}", n, True, 5, perplexity(method), 1.0, 1.0))
        pd.DataFrame(rows, columns=columns).to_csv(run.measured / "scores.csv", index=False)


def write_support(profile, dataset, size):
    """One valid completion of the common way a problem, with probability 0.2."""
    rows = [(dataset, f"p{i}", "L", 0, np.log(0.2)) for i in range(size)]
    table = pd.DataFrame(rows, columns=["dataset", "problem", "way", "completion", "logp"])
    for _, _, run, _ in runs.evaluations(profile):
        table.to_csv(run.measured / "support.csv", index=False)


def write_steps(profile):
    """Six RL steps a run, whose gradient norms are 1 to 6."""
    times = dict.fromkeys(training_tables.TIMES, 1.0)
    for _, _, run in runs.rl_runs(profile):
        run.measured.mkdir(parents=True, exist_ok=True)
        steps = [{"step": step, "grad_norm": float(step), **times} for step in range(1, 7)]
        lines = "".join(json.dumps(row) + "\n" for row in steps)
        (run.measured / "steps.jsonl").write_text(lines)


# --- numbers --------------------------------------------------------------------------------------


def test_differences_and_crossings_speak_of_the_mean_over_data_sets(profile):
    # Pooled over problems the sign of the difference is another one.
    gain = {"both": 2, "forward": 0, "reverse": -1}
    extra = [1, -1]  # and of every two problems one gains and one loses

    def correct(method, seed, dataset, i):
        more = gain[dataset] + extra[i % 2] if method == "grpo_branch" else 0
        return 3 + i % 2 + more

    write(profile, correct)
    found = result_tables.differences(profile, "grpo").set_index("metric").loc["pass@1"]
    assert (found["method"], found["against"], found["seeds"]) == ("grpo_branch", "grpo", 3)
    assert found["difference"] == pytest.approx((2 / 8 + 0 - 1 / 8) / 3)
    # Within a data set of n problems the differences are +-1/8 about their mean; seeds are alike.
    parts = {n: 1 / 64 / (n - 1) / 9 for n in SIZES.values()}
    error = np.sqrt(sum(parts.values()))
    degrees = error**4 / sum(part**2 / (n - 1) for n, part in parts.items())
    least = student.ppf(0.975, degrees)
    assert found["high"] - found["low"] == pytest.approx(2 * least * error)
    assert found["holds_for"] == "the methods (3 seeds)"

    crossing = result_tables.crossings(profile).set_index("method").loc["grpo_branch"]
    assert crossing["against"] == "grpo"
    power = 1 - noncentral_t.cdf(least, degrees, crossing["detectable at 1"] / error)
    assert power == pytest.approx(0.8, abs=1e-6)

    frame = measured.evaluations(profile)
    accuracy = frame.assign(avg=frame["c"] / frame["n"])
    averaged = result_tables.means_with_intervals(profile, accuracy, {"avg": (0, 1)})
    table = result_tables.table1(profile)
    first = table[(table["dataset"] == "Avg") & (table["metric"] == "pass@1")]
    expected = first.set_index("method")["mean"].to_dict()
    assert averaged.set_index("method")["mean"].to_dict() == pytest.approx(expected), (
        "the same accuracy as in Table 1"
    )


def test_seeds_that_disagree_widen_every_comparison(profile):
    """The same seed-averaged counts from seeds that agree and from seeds that do not."""

    def agreeing(method, seed, dataset, i):
        return 3 + i % 2 + (method == "grpo_branch")

    def disagreeing(method, seed, dataset, i):
        apart = 0 if seed is None else (seed - 2) * (2 if method == "grpo" else -1)
        return agreeing(method, seed, dataset, i) + apart

    found = []
    for correct in (agreeing, disagreeing):
        write(profile, lambda *place, of=correct: of(*place) + (place[3] % 3 == 0))
        rows = result_tables.compared(profile)
        found.append(rows[rows["metric"] == "pass@1"].reset_index(drop=True))
    alike, apart = found
    assert alike["difference"].tolist() == pytest.approx(apart["difference"].tolist())
    assert (apart["low"] < 0).all() and (apart["high"] > 0).all(), "seeds differ by 2 of 8 and more"
    assert alike["low"].isna().all() or (alike["low"] > 0).all()


def test_seeds_are_paired_by_number_whatever_their_order(profile):
    write(profile, lambda method, seed, dataset, i: (seed or 2) + i % 2)
    frame = measured.evaluations(profile)
    turned = frame.iloc[::-1].reset_index(drop=True)
    for method in ("grpo", "grpo_branch"):
        values, _, seeds = result_tables.curves(turned, method, (1,))
        assert seeds == [1, 2, 3]
        assert values.mean(axis=(1, 2)) == pytest.approx([1.5 / 8, 2.5 / 8, 3.5 / 8], abs=0.05)
    values, sets, seeds = result_tables.curves(frame, "base", (1,))
    assert seeds == [None] and values.shape == (1, len(sets), 1)


def test_only_common_seeds_are_compared():
    one, other = np.arange(3.0)[:, None], np.arange(4.0)[:, None]
    (a, b, base), seeds = result_tables.common_seeds(
        [(one, [1, 2, 3]), (other, [4, 3, 2, 5]), (np.zeros((1, 1)), [None])]
    )
    assert seeds == [2, 3] and base.shape == (1, 1)
    assert a.ravel().tolist() == [1, 2] and b.ravel().tolist() == [2, 1]
    (a, b), seeds = result_tables.common_seeds([(one, [1, 2, 3]), (other[:1], [2])])
    assert seeds == [2] and a.ravel().tolist() == [1], "one trained seed is no base"
    with pytest.raises(SageError, match=r"no seed that all have, of \[1, 2\] and of \[3, 4\]"):
        result_tables.common_seeds([(one[:2], [1, 2]), (one[:2], [3, 4])])


def test_with_one_seed_every_comparison_speaks_of_two_checkpoints(profile):
    one = dataclasses.replace(profile, seeds=(1,))
    write(one, lambda method, seed, dataset, i: 1 + i % 3 + (method == "grpo") * (i % 2))
    rng = np.random.default_rng(0)
    write_scores(one, lambda key: rng.lognormal())
    for table in (
        result_tables.compared(one),
        result_tables.crossings(one),
        sample_tables.tails(one),
        countdown_tables.mode_differences(one),
    ):
        assert set(table["holds_for"]) == {"these two checkpoints"}


def test_data_sets_that_all_agree_still_have_an_interval(profile):
    write(profile, lambda method, seed, dataset, i: 0 if dataset == "reverse" else 8)
    table = result_tables.table1(profile)
    assert (table["low"] <= table["mean"]).all() and (table["mean"] <= table["high"]).all()
    assert (table["high"] - table["low"] > 0.05).all()
    modes = countdown_tables.modes(profile)
    assert (modes["rare_share"] == 0).all() and (modes["rare_high"] > 0.1).all()


def test_modes_are_compared_over_seeds_and_problems(profile):
    write(profile, lambda method, seed, dataset, i: i % 3)
    for method, seed, run, _ in runs.evaluations(profile):
        table = counts.read(run.measured / "counts.csv")
        place = np.arange(len(table))
        table["rare"] = place % 2 + (method == "grpo_branch") * (2 + place % 3)
        table["rare"] += (seed or 0) * (method == "grpo")
        table.to_csv(run.measured / "counts.csv", index=False)
    found = countdown_tables.mode_differences(profile)
    found = found[found["metric"] == "rare_share"].set_index("method")
    assert found.loc["grpo_branch", "low"] > 0.2 and (found["problems"] == 24).all()
    assert found.loc["grpo", "difference"] == pytest.approx(2 / 8)
    assert found.loc["grpo", "low"] < 0, "its seeds are at 1, 2 and 3 of 8: t with 2 degrees"


def test_samples_are_held_against_the_exact_numbers_of_their_own_problems(profile):
    """8 samples of the first 4 problems of 10; 2 of 10 valid are expected, and 1 in 8 was drawn."""
    inside = tuple(data for data in profile.evaluation.data if data.label == "both")
    one = with_evaluation(profile, data=inside, methods=())
    write(one, lambda *_: 1)
    write_support(one, "both", 10)
    for _, _, run, _ in runs.evaluations(one):
        table = counts.read(run.measured / "counts.csv")
        table["valid_common"] = 1
        table.to_csv(run.measured / "counts.csv", index=False)
        support = pd.read_csv(run.measured / "support.csv")
        support.loc[4:, "logp"] = np.log(0.9)  # of problems that nobody sampled
        support.to_csv(run.measured / "support.csv", index=False)
    [row] = exact_tables.checked_by_samples(one).to_dict("records")
    assert (row["problems"], row["samples"]) == (4, 32)
    assert row["exact"] == pytest.approx(0.2) and row["sampled"] == pytest.approx(1 / 8)
    assert row["z"] == pytest.approx((4 - 32 * 0.2) / np.sqrt(32 * 0.2 * 0.8))
    whole = exact_tables.exact(one).set_index("dataset").loc["both"]
    assert whole["problems"] == 10, "and the exact table stands on all of them"
    assert whole["pass@1"] == pytest.approx((4 * 0.2 + 6 * 0.9) / 10)
    assert whole["pass@8"] == pytest.approx((4 * (1 - 0.8**8) + 6 * (1 - 0.1**8)) / 10)
    assert whole["common"] == pytest.approx(whole["pass@1"]) and whole["rare"] == 0


def reachable(seeds, total, squares, most):
    """Whether ``seeds`` whole numbers from 0 to ``most`` have this sum and this sum of squares."""
    if seeds == 0:
        return total == squares == 0
    if squares * seeds < total**2:
        return False
    middle = total / seeds
    width = np.sqrt((squares - total**2 / seeds) * (seeds - 1) / seeds) + 1e-9
    values = range(max(0, int(np.ceil(middle - width))), min(most, int(middle + width)) + 1)
    return any(reachable(seeds - 1, total - x, squares - x * x, most) for x in values)


@pytest.mark.parametrize(("table", "cells"), [("1", 42), ("3", 30), ("4", 18)])
def test_the_papers_spread_is_that_of_five_counts_of_problems(table, cells):
    """What notebook 08 says of the paper's ±: five whole counts, the deviation with ddof = 1."""

    def fits(mean, std, problems, seeds, ddof):
        half, places = 0.0005 + 1e-9, problems * seeds
        totals = range(int((mean - half) * places), int((mean + half) * places) + 2)
        for total in (t for t in totals if abs(t / places - mean) <= half):
            least, most = (
                (max(std + side, 0) * problems) ** 2 * (seeds - ddof) + total**2 / seeds
                for side in (-half, half)
            )
            squares = range(int(np.ceil(least - 1e-9)), int(most + 1e-9) + 1)
            if any(reachable(seeds, total, found, problems) for found in squares):
                return True
        return False

    problems = {"AIME": 60, "AMC23": 40, "MATH-500": 134}
    printed = reported.load(f"sage_table{table}").dropna(subset="std")
    assert len(printed) == cells

    def fitting(seeds, ddof):
        return sum(
            fits(cell.mean, cell.std, problems[cell.dataset], seeds, ddof)
            for cell in printed[["mean", "std", "dataset"]].itertuples(name="Cell")
        )

    assert fitting(5, 1) == cells
    assert max(fitting(5, 0), fitting(4, 1), fitting(3, 1)) < 0.7 * cells


def test_unsolvable_sets_have_the_same_number_of_rollouts_whatever_the_seeds(profile):
    # Every seed solves others; the base is one run.
    solved = {None: {0, 1}, 1: {0, 1}, 2: {2}, 3: {3}}
    write(profile, lambda method, seed, dataset, i: int(i in solved[seed]))
    sets = result_tables.unsolvable(profile, ["base", "grpo", "grpo_branch"])
    assert list(sets) == ["base", "grpo", "grpo_branch"]
    assert sets["base"] == sets["grpo"] == sets["grpo_branch"]
    assert len(sets["base"]) == sum(SIZES.values()) - 6


def test_eq_13_ranges_over_problems_and_not_over_seeds(profile):
    write(
        profile,
        lambda method, seed, dataset, i: 2 if i == 0 or (i == 1 and seed in (None, 2)) else 0,
    )
    found = sample_tables.patterns(profile)
    assert (found["problems"] == 6).all()
    assert (found["dropped"] == sum(SIZES.values()) - 6).all()
    assert (found["constraint setup"] == 1).all()
    hits = sample_tables.pattern_hits(profile, "constraint setup")
    assert len(hits) == 2 * (6 + 2 * (3 + 6 + 3)), "two a solved problem, over all runs"


def test_tails_are_compared_problem_by_problem(profile):
    rng = np.random.default_rng(0)
    write(profile, lambda *_: 1)
    write_scores(profile, lambda key: rng.lognormal() * (4 if key == "grpo_branch" else 1))
    found = sample_tables.tails(profile).set_index("method")
    base, branch, grpo = found.loc["base"], found.loc["grpo_branch"], found.loc["grpo"]
    assert base["tail"] == pytest.approx(0.05, abs=0.02)
    assert base["difference"] == 0 and np.isnan(base["low"]), "compared with itself"
    assert branch["low"] > 0.1 and branch["seeds"] == 3
    assert branch["difference"] == pytest.approx(branch["tail"] - base["tail"])
    assert grpo["low"] < 0 < grpo["high"], "drawn as the base's"


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.1, 0.2, "higher than"),
        (-0.2, -0.1, "lower than"),
        (-0.1, 0.1, "not separated from"),
        (0.0, 0.0, "not separated from"),
        (np.nan, np.nan, "not separated from"),
    ],
)
def test_an_interval_of_differences_in_words(low, high, words):
    assert result_tables.verdict(low, high) == words


def test_an_interval_as_text_says_when_there_is_none():
    shown = result_tables.interval_text(0.1, -0.05, 0.25, "+.1%")
    assert shown == "+10.0%, 95 % [-5.0%, +25.0%]"
    none = result_tables.interval_text(0.0, float("nan"), float("nan"))
    assert "nan" not in none and "no interval" in none


def test_table_5_has_a_mean_for_each_third_of_the_steps(profile):
    write_steps(profile)
    found = training_tables.table5(profile)
    assert list(found["method"]) == ["grpo", "grpo_branch"]
    assert found[["early", "mid", "late"]].values.tolist() == [[1.5, 3.5, 5.5]] * 2
    assert (found["early_std"] == 0).all() and (found["seeds"] == 3).all()
    times = training_tables.time_split(profile)
    assert times["method"].tolist() == ["grpo", "grpo_branch"] and times["runs"].tolist() == [3, 3]
    whole = "sampling 100%, scoring 100%, loss, gradient and update -200% of a step of 1.00 s"
    assert training_tables.time_takeaway(times, "grpo") == whole
    log = measured.training(profile)
    assert training_tables.late(log, 0.5).groupby(["method", "seed"]).size().tolist() == [3] * 6


def test_updates_share_the_seconds_of_their_draw_and_several_draws_add_up(profile):
    write_steps(profile)
    shared = {**profile.methods["grpo"].rl, "steps_per_generation": 4, "num_iterations": 2}
    rounds = {"grpo": dataclasses.replace(profile.methods["grpo"], rl=shared)}
    profile = dataclasses.replace(profile, methods={**profile.methods, **rounds})
    log = measured.training(profile).assign(**{"sampling/rounds": np.nan})
    log.loc[log["method"] == "grpo_branch", "sampling/rounds"] = 3.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "training", lambda _: log)
        times = training_tables.time_split(profile).set_index("method")
    batches = profile.rl["gradient_accumulation_steps"]
    expected = {"grpo": batches / 8, "grpo_branch": 3.0}
    for method, seconds in expected.items():
        assert times.loc[method, "time/generation"] == pytest.approx(seconds)
        assert times.loc[method, "time/loss"] == times.loc[method, "step_time"] == 1.0


def test_runs_of_different_lengths_end_at_their_own_last_step():
    steps = {"short": [0, 100], "long": [0, 100, 400]}
    rows = [
        (method, seed, step, step / 1000, 1 - step / 1000, 0.5)
        for method, found in steps.items()
        for seed in (1, 2)
        for step in found
    ]
    columns = ["method", "seed", "step", "pass@1", "pass@256", "rare"]
    ends = exact_tables.ends(pd.DataFrame(rows, columns=columns))
    assert ends["method"].tolist() == ["short"] * 2 + ["long"] * 2
    assert ends["steps"].tolist() == [100, 100, 400, 400]
    assert ends["pass@1"].tolist() == [0.1, 0.1, 0.4, 0.4] and (ends["pass@1 before"] == 0).all()
    assert ends["pass@256 before"].tolist() == [1.0] * 4
    log = pd.DataFrame({"method": ["a"] * 2 + ["b"] * 4, "seed": 1, "step": [1, 2, 1, 2, 3, 4]})
    assert training_tables.late(log, 0.5)["step"].tolist() == [2, 3, 4]


def test_what_sets_methods_apart_is_in_words():
    table = training_tables.methods(load_profile("countdown")).set_index("method")
    assert table.loc["grpo_no_kl", "rl"] == "beta 0.0" and table["guide"].isna()["grpo"]
    assert table.loc["grpo_branch", "guide"].startswith("branch, ")
    assert not table.map(lambda cell: "{" in str(cell)).any(axis=None)


def test_the_checks_of_a_data_set_are_counted():
    checked = pd.DataFrame({"dataset": ["a"] * 4 + ["b"], "z": [0.1, -2.5, 3.5, 1.0, float("nan")]})
    first, second = exact_tables.summary_of_checks(checked).itertuples(index=False)
    assert tuple(first) == ("a", 4, 0.5, 0.25, 3.5) and second.policies == 0


def test_the_curves_at_each_k_agree_with_table_1(profile):
    write(profile, lambda method, seed, dataset, i: (i + (seed or 0)) % 9)
    table = result_tables.at_each_k(profile, ["base", "grpo"])
    table1 = result_tables.table1(profile)
    average = table1[table1["dataset"] == "Avg"].set_index(["method", "metric"])
    assert len(table) == 2 * len(profile.evaluation.ks)
    for row in table[table["k"].isin([1, max(profile.evaluation.ks)])].itertuples():
        other = average.loc[(row.method, f"pass@{row.k}")]
        assert [row.mean, row.low, row.high] == pytest.approx(list(other[["mean", "low", "high"]]))


def test_means_are_laid_out_with_their_intervals():
    rows = [(m, name, 0.5, 0.25, 0.75, 8) for m in ("z", "a") for name in ("maj", "avg")]
    wide = result_tables.layout_of_means(pd.DataFrame(rows, columns=result_tables.MEANS))
    assert wide.index.tolist() == ["z", "a"] and wide.columns.tolist() == ["maj", "avg"]
    assert (wide == "0.500 [0.250, 0.750]").all(axis=None)


# --- profiles with less, more or other things in them ---------------------------------------------


def test_a_profile_without_some_data_or_methods_still_gets_its_tables(profile):
    forward = tuple(d for d in profile.evaluation.data if d.label == "forward")
    part = with_evaluation(profile, methods=("grpo_branch",), data=forward)
    write(part, lambda method, seed, dataset, i: 1 + i % 2)
    write_support(part, "forward", 6)
    assert countdown_tables.modes(part)["both_ways"].isna().all()
    support = countdown_tables.support(part)
    assert support["valid_common"].tolist() == pytest.approx([0.2] * len(support))
    assert (support["valid_rare"] == 0).all() and support["both_ways"].isna().all()
    crossings = result_tables.crossings(part)
    assert crossings[["method", "against"]].values.tolist() == [["grpo_branch", "base"]]
    assert set(result_tables.compared(part)["against"]) == {"base"}
    with pytest.raises(SageError, match="no evaluation data marked ood"):
        measured.evaluations(part, ood=True)


@pytest.mark.parametrize("trained", [True, False])
def test_the_base_alone_gets_every_table(profile, trained):
    if trained:
        alone = with_evaluation(profile, methods=())
    else:
        alone = dataclasses.replace(profile, methods={})
    write(alone, lambda method, seed, dataset, i: i % 3)
    write_scores(alone, lambda key: 2.0)
    write_support(alone, "both", 4)
    write_steps(alone)
    assert set(result_tables.table1(alone)["method"]) == {"base"}
    for table in (
        result_tables.compared(alone),
        result_tables.differences(alone, "base"),
        countdown_tables.mode_differences(alone),
        result_tables.crossings(alone),
    ):
        assert table.empty and {"method", "against"} <= set(table.columns)
    for table in (
        countdown_tables.modes(alone),
        countdown_tables.support(alone, epsilons=(0.1,)),
        sample_tables.tails(alone),
        sample_tables.patterns(alone),
        sample_tables.token_categories(alone),
        sample_tables.side_by_side(alone, ["base"]),
    ):
        assert table["method"].tolist() == ["base"]
    assert set(exact_tables.exact(alone)["method"]) == {"base"}
    assert exact_tables.along_training(alone).empty
    votes, bounds = sample_tables.votes(alone), {"avg": (0, 1), "distinct": (0, SAMPLES)}
    assert len(result_tables.means_with_intervals(alone, votes, bounds)) == 2
    assert list(result_tables.unsolvable(alone, ["base"])) == ["base"]
    assert result_tables.layout_of_table1(result_tables.table1(alone)).shape == (1, 8)
    steps = 2 if trained else 0
    assert len(training_tables.table5(alone)) == steps
    assert len(training_tables.time_split(alone)) == steps
    assert measured.trio(alone) == ("base",)


def test_methods_of_ones_own_are_compared_with_the_first(profile):
    methods = {"mine": Method("Mine"), "yours": Method("Yours", family="other")}
    own = dataclasses.replace(profile, methods={**methods, "last": Method("Last")})
    write(own, lambda method, seed, dataset, i: 1 + (method == "yours"))
    compared = result_tables.compared(own)[["method", "against"]].drop_duplicates()
    assert compared.values.tolist() == [
        ["yours", "mine"],
        ["last", "mine"],
        *([method, "base"] for method in own.methods),
    ]
    assert list(result_tables.crossings(own)["method"]) == ["base", "yours", "last"]
    assert list(dict.fromkeys(result_tables.table1(own)["method"])) == ["base", *own.methods]
    assert measured.trio(own) == ("base", "mine", "last")
    assert list(dict.fromkeys(result_tables.reported_table(own)["method"])) == ["base"]


def test_ways_are_counted_of_countdown_alone(profile):
    puzzles = Data(
        name="knights_knaves", rows=3, settings=check_settings("knights_knaves", {"people": 2})
    )
    mixed = with_evaluation(profile, data=(*profile.evaluation.data, puzzles))
    write(mixed, lambda *_: 1)
    write_support(mixed, "both", 4)
    assert (countdown_tables.modes(mixed)["samples"] // SAMPLES).tolist() == [24, 72, 72]
    exact = exact_tables.checked_by_samples(mixed)
    assert set(exact["dataset"]) == {"both"} and (exact["problems"] == 4).all()
    assert exact["exact"].tolist() == pytest.approx([0.2] * 7)
    assert (exact["sampled"] == 0).all()
    other = with_evaluation(mixed, data=(puzzles,))
    for table in (
        countdown_tables.modes,
        countdown_tables.support,
        exact_tables.exact,
        exact_tables.checked_by_samples,
    ):
        with pytest.raises(SageError, match="no data of the task countdown"):
            table(other)


# --- keys and labels ------------------------------------------------------------------------------


def test_labels_are_put_on_for_display_alone(profile):
    frame = pd.DataFrame(
        {"method": ["base", "grpo_branch", "GRPO (paper)"], "against": "grpo", "x": 1.0}
    )
    shown = measured.labelled(profile, frame)
    assert shown["method"].tolist() == ["Base Model", "GRPO + Branch", "GRPO (paper)"]
    assert set(shown["against"]) == {"GRPO"} and set(frame["against"]) == {"grpo"}
    by_method = measured.labelled(profile, frame.set_index("method"))
    assert list(by_method.index) == shown["method"].tolist()


def test_a_method_that_is_not_published_yet_has_its_label():
    whole = load_profile("smoke")
    part = dataclasses.replace(whole, methods={"grpo": whole.methods["grpo"]}, published=True)
    shown = measured.labelled(part, pd.DataFrame({"method": ["dapo_branch", "grpo", "none"]}))
    assert shown["method"].tolist() == ["DAPO + Branch", "GRPO", "none"]
    assert measured.named(whole, ["grpo", "dapo_no_kl"]) == "GRPO; DAPO (no KL)"
    assert measured.named(whole, []) == "none"


def test_a_row_of_the_paper_belongs_to_the_method_with_its_label(profile):
    twins = {**profile.methods, "grpo_again": Method("GRPO")}
    found = result_tables.reported_table(dataclasses.replace(profile, methods=twins))
    assert list(dict.fromkeys(found["method"])) == ["base", "grpo", "grpo_branch"]
    cell = (found["method"] == "grpo_branch") & (found["dataset"] == "AMC23")
    assert found[cell & (found["metric"] == "pass@1")]["mean"].tolist() == [0.465]
    layout = result_tables.layout_of_table1(found)
    assert layout.loc["grpo_branch", ("AMC23", "pass@1")] == "0.465 ± 0.063"
    assert layout.loc["grpo_branch", ("Avg", "pass@1")] == "0.284"


# --- what is not there ----------------------------------------------------------------------------


def test_runs_on_other_problems_and_missing_runs_are_named(profile):
    write(profile, lambda *_: 1, only=lambda run: "grpo-s2" not in str(run.measured))
    with pytest.raises(SageError, match=r"grpo-s2/counts\.csv is missing: run notebook 23"):
        measured.evaluations(profile)
    assert not measured.is_complete(profile)
    by_key = {(m, s): run.measured / "counts.csv" for m, s, run, _ in runs.evaluations(profile)}
    whole = counts.read(by_key["base", None])
    whole[whole["dataset"] != "both"].to_csv(by_key["grpo", 2], index=False)
    assert measured.is_complete(profile)
    with pytest.raises(
        SageError,
        match=r"evaluations of sft and grpo-s2 hold different problems \(both/p0 and 3 more",
    ):
        measured.evaluations(profile)


@pytest.mark.parametrize(
    ("read", "sentence"),
    [
        (
            lambda p: measured.samples(p, "grpo"),
            "grpo-s1/samples.jsonl.gz is missing: run notebook 23",
        ),
        (measured.scores, "evaluation/sft/scores.csv is missing: run notebook 23"),
        (countdown_tables.support, "evaluation/sft/support.csv is missing: run notebook 23"),
        (measured.training, "rl/grpo-s1/steps.jsonl is missing: run notebook 21"),
        (measured.effects, "effects.json is missing: run notebook 21"),
        (measured.trace, "traces.json is missing: run notebook 22"),
        (measured.signals, "signals.json is missing: run notebook 22"),
        (lambda p: measured.traced(p, "impact"), "impact.csv is missing: run notebook 22"),
        (lambda p: measured.benchmark("speed"), "no benchmark 'speed'"),
        (lambda p: measured.samples(p, "dapo"), "choose one of base, grpo, grpo_branch"),
    ],
)
def test_a_missing_file_names_what_makes_it(profile, read, sentence):
    with pytest.raises(SageError) as raised:
        read(profile)
    assert sentence in str(raised.value)
    if "notebook" in sentence:
        assert "sage-companion stage" in str(raised.value)
        assert f"--profile {profile.spec}" in str(raised.value)


def test_a_method_without_counts_is_named_among_those_that_have_them(profile):
    write(profile, lambda *_: 1)
    with pytest.raises(SageError, match="no counts of 'dapo': choose one of base, grpo, grpo_bra"):
        result_tables.differences(profile, "dapo")
