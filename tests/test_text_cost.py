"""The cost of a finding in natural language, against a simulation and against hand counts."""

import json

import numpy as np
import pandas as pd
import pytest

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import records
from sage_lib.experiment.profile import load_profile
from sage_lib.report.text_cost import problems_needed, what_it_takes


def test_as_many_problems_find_the_difference_as_often_as_asked():
    spread, difference = 0.3, 0.05
    n = problems_needed(spread, difference)
    rng = np.random.default_rng(0)
    drawn = rng.normal(difference, spread, (4000, n))
    errors = drawn.std(axis=1, ddof=1) / np.sqrt(n)
    found = np.abs(drawn.mean(axis=1)) > 1.96 * errors
    assert found.mean() == pytest.approx(0.8, abs=0.02)


def test_no_difference_is_never_found():
    with pytest.raises(SageError, match="above 0"):
        problems_needed(0.3, 0.0)


def test_the_cost_is_that_of_the_records(tmp_path, monkeypatch):
    """Two runs of 4 steps, 80 and 120 s; two evaluations of 3 problems x 4 samples, 24 and 36 s."""
    monkeypatch.setattr(paths, "PUBLISHED", tmp_path)
    folder = tmp_path / "smollm"
    made = dict.fromkeys(records.KEYS, "") | {"settings": {"rl": {"max_steps": 4}}}
    for name, seconds in (("grpo-s3407", 80.0), ("grpo_branch-s3407", 120.0)):
        _write(folder / "rl" / name, made | {"seconds": seconds})
    solved = {"sft": [0, 2, 4], "grpo-s3407": [0, 2, 4]}
    for (name, right), seconds in zip(solved.items(), (24.0, 36.0), strict=True):
        place = folder / "evaluation" / name
        _write(place, made | {"seconds": seconds})
        table = {"dataset": "words", "problem": [*"abc"], "n": 4, "c": right, "truncated": 0}
        pd.DataFrame(table).to_csv(place / "counts.csv", index=False)
    profile = load_profile("smollm")
    found = what_it_takes(profile, steps=360, seeds=2, difference=0.5, samples=10)
    value = found.set_index("quantity")["value"]
    assert value["seconds of an RL step"] == 25.0
    assert value["seconds of a sample"] == pytest.approx(2.5)
    assert value["pass@1 of the base"] == 0.5
    spread = value["spread of differences in pass@1 over problems, at most"]
    assert spread == pytest.approx(np.sqrt(2 * 0.25))
    needed = value["problems that show a difference of 0.5"]
    assert needed == problems_needed(spread, 0.5)
    training, evaluation = 360 * 25 / 3600, needed * 10 * 2.5 / 3600
    assert value["training: 360 steps"] == training
    total = found["value"].iloc[-1]
    assert total == pytest.approx(4 * training + 5 * evaluation)  # two methods, two seeds each


def test_without_published_runs_there_is_nothing_to_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PUBLISHED", tmp_path)
    assert what_it_takes(load_profile("smollm"), 10, 1, 0.1, 4).empty


def _write(folder, record):
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))
