"""Nothing already made is lost, and damage is named."""

import json

import pytest

from sage_lib import files
from sage_lib.errors import SageError
from sage_lib.evaluation import counts
from sage_lib.experiment import records, runs


def test_a_half_written_last_line_is_cut_off_and_the_rest_kept(tmp_path):
    path = tmp_path / "steps.jsonl"
    for i in range(3):
        files.append_line(path, {"step": i})
    with path.open("a") as f:
        f.write('{"step": 3, "lo')
    size = path.stat().st_size
    assert [r["step"] for r in files.read_lines(path)] == [0, 1, 2]
    assert path.stat().st_size == size, (
        "a reader never changes the file that another process appends to"
    )
    assert [r["step"] for r in files.read_lines(path, repair=True)] == [0, 1, 2]
    files.append_line(path, {"step": 3})
    assert [r["step"] for r in files.read_lines(path)] == [0, 1, 2, 3]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(SageError, match="line 2 is not valid JSON"):
        files.read_lines(path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = files.write_text(tmp_path / "a.txt", "old")
    monkeypatch.setattr(
        type(path),
        "replace",
        lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(SageError, match="No space left"):
        files.write_text(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_too_little_disk_is_said_before_the_work(tmp_path):
    with pytest.raises(SageError, match="SAGE_BUILD"):
        files.require_space(tmp_path, 1e9, "profile huge")


@pytest.mark.parametrize("text", ["{", '{"stage": "sft"}', "[]"])
def test_a_corrupt_run_record_is_named(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(SageError, match="--resume"):
        records.load(path)


def test_a_record_holds_what_made_the_result_and_no_path(tmp_path):
    record = records.Record("sft", "smoke", "abc", 1, {}).finish(tmp_path / "record.json", rows=3)
    assert records.load(tmp_path / "record.json") == json.loads(
        json.dumps(record)
    ) and records.done(tmp_path / "record.json", "abc")
    assert not records.done(tmp_path / "record.json", "abd") and str(tmp_path) not in json.dumps(
        record
    )


def test_other_settings_put_earlier_work_aside(tmp_path):
    def run(fingerprint):
        return runs.Run("sft", tmp_path / "sft", tmp_path / "measured", fingerprint)

    run("one").prepare()
    (tmp_path / "sft" / "steps.jsonl").write_text("kept")
    run("one").prepare()
    assert (tmp_path / "sft" / "steps.jsonl").read_text() == "kept"
    run("two").prepare()
    assert (
        not (tmp_path / "sft" / "steps.jsonl").exists()
        and (tmp_path / "sft.old1" / "steps.jsonl").read_text() == "kept"
    )


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", ",".join(counts.COLUMNS) + "\nx,y,4,5,0,0,0,0\n"]
)
def test_damaged_counts_are_named(tmp_path, text):
    path = tmp_path / "counts.csv"
    path.write_text(text)
    with pytest.raises(SageError, match="--resume"):
        counts.read(path)


def test_a_committed_record_alone_does_not_count_as_done(tmp_path):
    run = runs.Run("eval-sft", tmp_path / "build", tmp_path / "measured", "one")
    run.prepare()
    records.Record("evaluation", "smoke", "one", 1, {}).finish(run.record)
    assert not run.done(), "as on a fresh clone, which has records and no weights or samples"
    files.append_line(run.samples, {})
    assert run.done()
    assert not runs.Run(
        "eval-sft", tmp_path / "build", tmp_path / "measured", "other weights"
    ).done()
