"""The dose of a guide from planted step logs, and from the published ones by other code."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.results import load_results
from sage_lib.paths import PUBLISHED
from sage_lib.report.dose import dose


def logs(run, method, mean, acting, steps=8):
    """A log whose mean q and share acting are ``mean`` and ``acting`` of the step."""
    return [
        {
            **{"run": run, "method": method, "seed": 1, "step": step},
            **{"guide/mean": mean(step), "guide/acting": acting(step)},
        }
        for step in range(1, steps + 1)
    ]


def study_of(rows):
    quantiles = {"0.8": 0.5, "0.9": 0.75}
    return SimpleNamespace(
        profile=load_profile("study"),
        own=False,
        steps=pd.DataFrame(rows),
        entropy={"quantiles": quantiles},
    )


def test_the_dose_is_that_of_the_first_step_and_of_the_last_quarter_over_runs():
    rows = [
        *logs("branch_strong-s1", "branch_strong", lambda s: 1 + s / 10, lambda s: s / 100),
        *logs("branch_strong-s2", "branch_strong", lambda s: 2 + s / 10, lambda s: 3 * s / 100, 4),
        *logs("shuffled_branch-s1", "shuffled_branch", lambda s: 1.0, lambda s: 0.5),
        *logs("grpo_random-s1", "grpo_random", lambda s: 1.0, lambda s: 0.5),
        *logs("grpo-s1", "grpo", lambda s: np.nan, lambda s: np.nan),
    ]
    table = dose(study_of(rows)).set_index("method")
    guided = {"branch_strong", "grpo_random", "shuffled_branch"}
    assert set(table.index) == guided, "GRPO has no guide"
    strong = table.loc["branch_strong"]
    assert strong["runs"] == 2 and strong["threshold"] == 0.5
    # By hand: the last quarter is steps 7 and 8 of the first run, step 4 of the second.
    assert strong[["mean q first", "mean q last"]].tolist() == pytest.approx([1.6, 2.075])
    assert strong[["acting first", "acting last"]].tolist() == pytest.approx([0.02, 0.0975])
    assert strong["weighted q"] == pytest.approx(0.25 / 0.2), "matched beta over beta"
    assert table.loc["grpo_random", ["threshold", "weighted q"]].isna().all()
    assert table.loc["shuffled_branch", "threshold"] == 0.5, "of the guide that is shuffled"
    assert list(dose(study_of(rows), ["grpo_random"])["method"]) == ["grpo_random"]
    assert dose(study_of(rows[-8:])).empty
    assert "weighted q last" not in table, "these logs have no guide/kl"


def test_the_weighted_q_of_runs_is_weighted_by_the_kl_of_each_step():
    q_of_run = {"branch_strong-s1": 1.2, "branch_strong-s2": 1.4, "grpo_random-s1": 1.0}
    rows = []
    for run, q in q_of_run.items():
        for row in logs(run, run.rpartition("-")[0], lambda s: 1.1, lambda s: 0.1):
            kl = 0.01 * row["step"] * (2 if run.endswith("s2") else 1)
            rows.append(row | {"guide/kl": kl * (q + (row["step"] == 8) * 0.1), "kl_ref": kl})
    older = logs("branch_strong-s3", "branch_strong", lambda s: 1.1, lambda s: 0.1)
    rows += [row | {"kl_ref": 1.0} for row in older]  # without guide/kl it does not count
    table = dose(study_of(rows)).set_index("method")["weighted q last"]
    late = {(1, 7): 1.2, (1, 8): 1.3, (2, 7): 1.4, (2, 8): 1.5}  # the last quarter of eight steps
    expected = np.average([*late.values()], weights=[seed * step for seed, step in late])
    assert table["branch_strong"] == pytest.approx(expected)
    assert table["grpo_random"] == pytest.approx((7 * 1.0 + 8 * 1.1) / 15)


def test_the_published_dose_follows_from_the_published_logs():
    """Branch has mean q 1.005 on 4.4 % of tokens after step 150: from the files, by other code."""
    table = dose(load_results("study"), ["grpo_branch", "branch_strong"]).set_index("method")
    for method in table.index:
        logs, thresholds = [], []
        for profile in ("study", "study_second"):
            steps = pd.read_parquet(PUBLISHED / profile / "steps.parquet")
            logs.append(steps[steps["method"] == method])
            document = json.loads((PUBLISHED / profile / "entropy.json").read_text())
            share = {"grpo_branch": "0.9", "branch_strong": "0.8"}[method]
            thresholds.append(document["quantiles"][share])
        steps = pd.concat(logs)  # blocks of ten steps
        row, late = table.loc[method], steps[steps["step"] > 150]
        assert row["mean q last"] == pytest.approx(late["guide/mean"].mean(), rel=1e-6)
        assert row["acting last"] == pytest.approx(late["guide/acting"].mean(), rel=1e-6)
        first = steps.loc[steps["step"] == 1, "guide/acting"].mean()
        assert row["acting first"] == pytest.approx(first)
        assert row["threshold"] == pytest.approx(np.mean(thresholds)) and row["runs"] == 8
