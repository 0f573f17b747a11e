"""Results as frames: published ones without a hash, own ones from a hand-made folder."""

import dataclasses
import gzip
import hashlib
import json

import numpy as np
import pandas as pd
import pytest

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import records, results
from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.results import load_results
from sage_lib.files import write_json
from sage_lib.pipeline import stages
from sage_lib.report import inference, passk
from sage_lib.tasks.task import Task

STEPS = 115
RECORD = dict.fromkeys(records.KEYS, "x") | {"seconds": 1.5, "weights": "w"}
RECORD |= {"versions": {}, "machine": {"processor": "p"}}


def test_published_results_are_read_without_a_hash_or_a_problem(monkeypatch):
    def refuse(*given, **more):
        raise AssertionError("reading needs no identity")

    monkeypatch.setattr(hashlib, "sha256", refuse)
    monkeypatch.setattr(Task, "problems", refuse)
    loaded = load_results("smoke")
    for name in results.FRAMES.keys() - {"rounds"}:
        frame = getattr(loaded, name)
        assert list(frame)[:3] == results.RUN and frame["seed"].dtype == "Int64", name
        assert frame["seed"].isna().equals(frame["method"] == "base"), name


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folders of a base, of a run of 115 steps, of another method's and of one that failed."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    root = paths.measured("smoke")
    places = "sft", "rl/grpo-s3407", "rl/gone-s1", "evaluation/grpo-s3407", "evaluation/sft"
    for place in places:
        write_json(root / place / "record.json", {**RECORD, "stage": place.partition("/")[0]})
    log = [{"step": n, "reward": n / 7, "own": 1.0} for n in range(1, STEPS + 1)]
    text = "".join(json.dumps(row) + "\n" for row in log)
    for name in ("grpo-s3407", "gone-s1", "grpo-s3408"):
        (root / "rl" / name).mkdir(exist_ok=True)
        (root / "rl" / name / "steps.jsonl").write_text(text)
    (root / "sft" / "steps.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    sample = {"dataset": "both", "problem": "a", "completions": ["x", "y"], "ids": [[1], [2]]}
    sample |= {"tokens": [3, 4], "finished": [True, False], "correct": [False, True]}
    with gzip.open(root / "evaluation/grpo-s3407/samples.jsonl.gz", "wt") as file:
        for dataset in ("both", "forward"):  # problems of one name
            file.write(json.dumps(sample | {"dataset": dataset}) + "\n")
    write_json(root / "entropies" / "entropy.json", {"tokens": 5})
    return load_results("smoke", own=True)


def test_own_results_are_those_of_the_profiles_finished_runs(own):
    assert own.methods == ["base", "grpo"] and own.entropy == {"tokens": 5}
    runs = own.runs.set_index(["stage", "run"])
    assert set(runs.index.get_level_values("run")) == {"sft", "grpo-s3407"}
    assert runs.loc[("rl", "grpo-s3407"), ["beta", "max_steps"]].tolist() == [0.2, 60]
    named = runs["command"].str.extract("sage-companion stage (.*) --profile smoke", expand=False)
    assert set(named) == {"sft", "rl", "evaluation"} <= stages.STAGES.keys(), "argparse takes them"
    assert own.steps.groupby("run", sort=False).size().to_dict() == {"sft": 1, "grpo-s3407": STEPS}
    told = own.samples[["number", "completion", "tokens", "finished", "correct"]]
    assert told.to_numpy().tolist() == [[0, "x", 3, True, False], [1, "y", 4, False, True]] * 2
    with pytest.raises(SageError, match="no own counts of smoke: sage-companion stage evaluation"):
        _ = own.counts
    place = own.folder / "rl/grpo-s3407"
    sizes = {"steps.jsonl": (place / "steps.jsonl").stat().st_size + 1}
    write_json(place / "record.json", {**RECORD, "stage": "rl", "sizes": sizes})
    with pytest.raises(SageError, match=r"rl/grpo-s3407/steps\.jsonl lacks"):
        own.frame("steps")


def test_what_is_written_is_what_was_collected_with_thinned_logs(own, tmp_path, monkeypatch):
    collected = results.collect(load_profile("smoke"))
    monkeypatch.setattr(paths, "PUBLISHED", tmp_path / "published")
    results.write(collected, own.profile, tmp_path / "published" / "smoke")
    read = load_results("smoke")
    for one in ("runs", "samples"):
        pd.testing.assert_frame_equal(getattr(read, one), collected[one], check_dtype=False)
    assert read.entropy == own.entropy and "own" not in collected["steps"]
    results.write(collected, own.profile, tmp_path / "without", done=[])
    assert not [*(tmp_path / "without").glob("*.json")], "documents of no finished run"
    log = collected["steps"].query("method == 'grpo'")
    assert log["step"].tolist() == [1, *range(10, 120, 10), STEPS]
    assert log["steps"].tolist() == [1, 9, *[10] * 10, 5]
    assert log["reward"].tolist()[:3] == [float(f"{mean / 7:.6g}") for mean in (1, 6, 15.5)]
    assert read.steps.query("method == 'grpo'")["step"].tolist() == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_damaged_published_table_is_named(own, tmp_path, monkeypatch, kept):
    monkeypatch.setattr(paths, "PUBLISHED", tmp_path / "published")
    folder = tmp_path / "published" / "smoke"
    results.write(results.collect(load_profile("smoke")), own.profile, folder)
    path = folder / "steps.parquet"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SageError, match=r"smoke/steps\.parquet is damaged .*get it again from git"):
        _ = results.load_results("smoke").steps


def test_the_runs_of_another_base_stand_beside_those_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PUBLISHED", tmp_path)
    for name, seed, p in (("study", 3407, 0.5), ("study_second", 3411, 0.25)):
        rows = [("sft", "base", None, p), (f"grpo-s{seed}", "grpo", seed, p / 2)]
        rows += [("grpo-s9", "grpo", 9, 0.9)]  # not a seed of the profile
        frame = pd.DataFrame(rows, columns=["run", "method", "seed", "p"]).astype({"seed": "Int64"})
        frame = frame.assign(
            dataset="both", problem="a", way="L", completion=0, logp=np.log(frame["p"])
        )
        (tmp_path / name).mkdir()
        for file in ("support", "runs"):
            frame.to_parquet(tmp_path / name / f"{file}.parquet")
    loaded = load_results("study")
    assert loaded.support["run"].tolist() == [
        *("sft", "grpo-s3407", "study_second/sft", "study_second/grpo-s3411")
    ]
    values = passk.exact(loaded)
    assert values["base"].values[..., 0].tolist() == [[0.375]], "the mean of both bases"
    assert values["grpo"].values[:, 0, 0].tolist() == pytest.approx([0.25, 0.125])
    assert values["grpo"].seeds == [3407, 3411]
    gap = inference.difference(values["grpo"], values["base"]).set_index("metric")
    assert gap.loc["pass@1", "difference"] == pytest.approx((-0.25 - 0.125) / 2)
    (ours, theirs), _ = inference.at_common_seeds(values["grpo"], values["base"])
    assert theirs[:, 0, 0].tolist() == pytest.approx([0.5, 0.25])
    assert ours[:, 0, 0].tolist() == pytest.approx([0.25, 0.125])
    alone = load_results("study_second").support["run"].tolist()
    assert alone == ["sft", "grpo-s3411"]
    twice = dataclasses.replace(load_profile("study_second"), beside=("study_second",))
    with pytest.raises(SageError, match=r"study_second, .* both have grpo with seed 3411"):
        results.Results(twice, own=False).frame("runs")
