"""Patterns and solutions of saved samples, against counts by hand."""

from types import SimpleNamespace

import pandas as pd
import pytest

from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.results import Results
from sage_lib.report import patterns

DONE = "<end_working_out> <SOLUTION> {} </SOLUTION>"


def rows(method, seed, problem, *texts, dataset="both"):
    """Samples of one run and problem; a text that ends with "!" is correct."""
    run = "sft" if seed is None else f"{method}-s{seed}"
    return [
        {"run": run, "method": method, "seed": seed, "dataset": dataset, "problem": problem}
        | {"number": i, "completion": text.rstrip("!"), "correct": text.endswith("!")}
        | {"tokens": 3, "finished": True}
        for i, text in enumerate(texts)
    ]


def study_of(*samples):
    frame = pd.DataFrame([row for one in samples for row in one])
    return SimpleNamespace(profile=load_profile("smoke"), samples=frame.astype({"seed": "Int64"}))


def test_eq_13_ranges_over_problems_and_not_over_seeds():
    """Problem a: 1 of its 3 correct samples, over both seeds, has the pattern; b: its only one; c
    has no correct sample."""
    setup = f"let x be 4 {DONE.format(4)}"
    plain = DONE.format(4)
    results = study_of(
        rows("grpo", 1, "a", f"{setup}!", f"{plain}!"),
        rows("grpo", 2, "a", f"{plain}!", setup),
        rows("grpo", 1, "b", f"{setup}!", plain),
        rows("grpo", 1, "c", plain, f"4 {'1 2 3 ' * 9}"),
        rows("grpo", 1, "elsewhere", f"{setup}!", dataset="both_other_words"),
        rows("other", 1, "a", plain),
    )
    [row] = patterns.pattern_table(results, ["grpo"]).to_dict("records")
    assert row["constraint setup"] == pytest.approx((1 / 3 + 1) / 2)
    assert row["contradiction"] == 0
    assert (row["problems"], row["dropped"]) == (2, 1)
    assert (row["format"], row["repetition"], row["truncated"]) == (1 / 8, 1 / 8, 0)


def test_the_last_problem_with_the_most_different_solutions_is_shown():
    """All solved a, b, d and e; of a and d the first solutions of the first seed differ."""
    results = study_of(
        rows("base", None, "a", "wrong", "base a!", "later!"),
        *(rows("base", None, problem, f"base {problem}!") for problem in "bcde"),
        rows("grpo", 1, "a", "grpo a!"),
        rows("grpo", 1, "b", "base b!"),
        rows("grpo", 1, "c", "wrong"),
        rows("grpo", 1, "d", "grpo d!"),
        rows("grpo", 1, "e", "base e!"),
        rows("grpo", 2, "c", "another seed's!"),
    )
    shown, numbers = patterns.side_by_side(results, ["grpo", "base"])
    assert shown["method"].tolist() == ["grpo", "base"]
    assert shown["problem"].tolist() == ["d", "d"]
    assert shown["solution"].tolist() == ["grpo d", "base d"]
    assert numbers == {1: 2, 2: 2}
    alone = study_of(rows("base", None, "a", "no"), rows("grpo", 1, "a", "yes!"))
    shown, numbers = patterns.side_by_side(alone, ["base", "grpo"])
    assert shown.empty and numbers == {}


def test_the_main_methods_are_those_of_the_references_family():
    results = Results(load_profile("study"), own=False)
    main = results.main
    family = {results.profile.methods[method].family for method in main[1:]}
    assert main[0] == "base" and family == {results.profile.methods["grpo"].family}
    assert "branch_strong" in main and "bnpo_branch" not in main
