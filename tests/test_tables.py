"""Tables from counts that are written by hand: what several seeds, unequal data sets and missing files do to them."""

import dataclasses
import gzip
import json

import numpy as np
import pandas as pd
import pytest

from sage_lib.errors import SageError
from sage_lib.evaluation import counts
from sage_lib.experiment import runs
from sage_lib.experiment.profile import load_profile
from sage_lib.report import exploration_figures, figures, sample_tables, tables
from sage_lib.tasks.prompts import answer_turn

SIZES = {"both": 4, "forward": 6, "reverse": 14}


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """Three seeds of GRPO and of Branch, and a base; nothing is measured yet."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    laptop = load_profile("laptop")
    return dataclasses.replace(
        laptop,
        seeds=(1, 2, 3),
        methods={k: laptop.methods[k] for k in ("grpo", "grpo_branch")},
        evaluation=dataclasses.replace(
            laptop.evaluation,
            samples=8,
            ks=(1, 2, 4, 8),
            methods=None,
            resamples=2000,
            data=tuple(d for d in laptop.evaluation.data if not d.ood),
        ),
    )


def write(profile, correct, only=lambda run: True):
    """``correct(method, seed, dataset, problem)`` of 8 samples; each correct sample is the text "good", the others "bad"."""
    for method, seed, run, _ in runs.evaluations(profile):
        rows = [
            (d, f"p{i}", 8, correct(method, seed, d, i), 0, 0, 0, 0)
            for d in SIZES
            for i in range(SIZES[d])
        ]
        run.measured.mkdir(parents=True, exist_ok=True)
        if only(run):
            pd.DataFrame(rows, columns=counts.COLUMNS).to_csv(
                run.measured / "counts.csv", index=False
            )
            samples = [
                {
                    "dataset": d,
                    "problem": p,
                    "completions": [
                        answer_turn("we denote x" if k < c else "w", str(k)) for k in range(n)
                    ],
                    "tokens": [3] * n,
                    "finished": [True] * n,
                    "correct": [k < c for k in range(n)],
                }
                for d, p, n, c, *_ in rows
            ]
            (run.measured / "samples.jsonl.gz").write_bytes(
                gzip.compress("".join(json.dumps(r) + "\n" for r in samples).encode())
            )


def test_differences_and_crossings_speak_of_the_mean_over_data_sets(profile):
    gain = {
        "both": 2,
        "forward": 0,
        "reverse": -1,
    }  # pooled over problems the sign of the difference is another one
    extra = [1, -1]  # and of every two problems one gains and one loses
    write(
        profile,
        lambda method, seed, d, i: (
            3 + i % 2 + (gain[d] + extra[i % 2] if method == "grpo_branch" else 0)
        ),
    )
    found = tables.differences(profile, "grpo").set_index("metric").loc["pass@1"]
    assert found["difference"] == pytest.approx((2 / 8 + 0 - 1 / 8) / 3) and found["seeds"] == 3
    error = (
        np.sqrt(sum(1 / 64 * n / (n - 1) / n for n in SIZES.values())) / 3
    )  # within a data set the differences are +-1/8 about their mean
    assert (found["high"] - found["low"]) / (2 * 1.96) == pytest.approx(
        error * np.sqrt(np.mean([(n - 1) / n for n in SIZES.values()])), rel=0.1
    )
    crossing = (
        tables.crossings(profile)
        .set_index("row")
        .loc[f"{tables.label(profile, 'grpo_branch')} over {tables.label(profile, 'grpo')}"]
    )
    assert crossing["detectable at 1"] == pytest.approx((1.959964 + 0.841621) * error, rel=1e-5)
    frame = tables.evaluations(profile)
    averaged = tables.means_with_intervals(
        profile, frame.assign(avg=frame["c"] / frame["n"]), ["avg"]
    )
    table = tables.table1(profile)
    expected = table[(table["dataset"] == "Avg") & (table["metric"] == "pass@1")].set_index("row")[
        "mean"
    ]
    assert averaged.set_index("row")["mean"].to_dict() == pytest.approx(expected.to_dict()), (
        "the same accuracy as in Table 1"
    )


def test_unsolvable_sets_have_the_same_number_of_rollouts_whatever_the_seeds(profile):
    solved = {
        None: {0, 1},
        1: {0, 1},
        2: {2},
        3: {3},
    }  # every seed solves others; the base is one run
    write(profile, lambda method, seed, d, i: int(i in solved[seed]))
    sets = tables.unsolvable(profile, ["base", "grpo", "grpo_branch"])
    assert (
        len({frozenset(s) for s in sets.values()}) == 1
        and len(sets[tables.BASE_LABEL]) == sum(SIZES.values()) - 6
    )
    for drawn in (exploration_figures.unsolvable_venn, exploration_figures.unsolvable_upset):
        assert "among 8" in drawn(profile, ["base", "grpo", "grpo_branch"]).axes[0].get_title()


def test_eq_13_ranges_over_problems_and_not_over_seeds(profile):
    write(profile, lambda method, seed, d, i: 2 if i == 0 or (i == 1 and seed in (None, 2)) else 0)
    found = sample_tables.patterns(profile).set_index("row")
    assert (
        (found["problems"] == 6).all()
        and (found["dropped"] == sum(SIZES.values()) - 6).all()
        and (found["constraint setup"] == 1).all()
    )


def test_runs_on_other_problems_and_missing_runs_are_named(profile):
    write(profile, lambda *_: 1, only=lambda run: "grpo-s2" not in str(run.measured))
    with pytest.raises(SageError, match="grpo-s2/counts.csv is missing: run notebook 07"):
        tables.evaluations(profile)
    with pytest.raises(SageError, match="grpo-s2/counts.csv is missing"):
        sample_tables.samples(profile, "grpo")
    with pytest.raises(SageError, match="sft/scores.csv is missing: run the notebooks"):
        sample_tables.scores(profile)
    whole = counts.read(
        next(run for m, *_, run, _ in runs.evaluations(profile) if m == "base").measured
        / "counts.csv"
    )
    lacking = (
        next(run for m, s, run, _ in runs.evaluations(profile) if (m, s) == ("grpo", 2)).measured
        / "counts.csv"
    )
    whole[whole["dataset"] != "both"].to_csv(lacking, index=False)
    with pytest.raises(
        SageError,
        match=r"evaluations of sft and grpo-s2 hold different problems \(both/p0 and 3 more",
    ):
        tables.evaluations(profile)


def test_a_profile_without_some_data_or_methods_still_gets_its_tables(profile):
    part = dataclasses.replace(
        profile,
        evaluation=dataclasses.replace(
            profile.evaluation,
            methods=("grpo_branch",),
            data=tuple(d for d in profile.evaluation.data if d.label == "forward"),
        ),
    )
    write(part, lambda method, seed, d, i: 1 + i % 2)
    for _, _, run, _ in runs.evaluations(part):
        pd.DataFrame(
            [("forward", f"p{i}", "L", 0, np.log(0.2)) for i in range(6)],
            columns=["dataset", "problem", "way", "completion", "logp"],
        ).to_csv(run.measured / "support.csv", index=False)
    assert tables.modes(part)["both_ways"].isna().all()
    support = tables.support(part)
    assert (
        support["valid_common"].tolist() == pytest.approx([0.2] * len(support))
        and (support["valid_rare"] == 0).all()
        and support["both_ways"].isna().all()
    )
    assert list(tables.crossings(part)["row"]) == [
        f"{tables.label(part, 'grpo_branch')} over {tables.BASE_LABEL}"
    ]
    assert len(figures.figure3(part).axes) == 1
    with pytest.raises(SageError, match="no evaluation data marked ood"):
        figures.figure3(part, ood=True)


def test_tails_are_compared_problem_by_problem(profile):
    rng = np.random.default_rng(0)
    write(profile, lambda *_: 1)
    for method, _, run, _ in runs.evaluations(profile):
        rows = [
            (
                d,
                f"p{i}",
                n,
                True,
                5,
                rng.lognormal() * (4 if method == "grpo_branch" else 1),
                1.0,
                1.0,
            )
            for d in SIZES
            for i in range(SIZES[d])
            for n in range(8)
        ]
        pd.DataFrame(
            rows,
            columns=[
                "dataset",
                "problem",
                "number",
                "correct",
                "tokens",
                "perplexity",
                "entropy",
                "branching",
            ],
        ).to_csv(run.measured / "scores.csv", index=False)
    found = sample_tables.tails(profile).set_index("row")
    base, branch = found.loc[tables.BASE_LABEL], found.loc[tables.label(profile, "grpo_branch")]
    assert (
        base["tail"] == pytest.approx(0.05, abs=0.02)
        and base["difference"] == base["low"] == base["high"] == 0
    )
    assert (
        branch["low"] > 0.1
        and branch["difference"] == pytest.approx(branch["tail"] - base["tail"])
        and branch["seeds"] == 3
    )
    grpo = found.loc[tables.label(profile, "grpo")]
    assert grpo["low"] < 0 < grpo["high"], "drawn as the base's"
