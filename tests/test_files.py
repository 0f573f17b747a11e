"""Nothing already made is lost, and damage is named."""

import json
import os
from pathlib import Path

import pytest

from sage_lib import files
from sage_lib.errors import SageError
from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import load_profile


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


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("disk"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda *paths: (done.append("name"), replace(*paths)))
    files.write_text(tmp_path / "a", "text")
    assert done == ["disk", "name"] and (tmp_path / "a").read_text() == "text"


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(SageError, match="line 2 is not valid JSON"):
        files.read_lines(path)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "build").write_text("")
    with pytest.raises(SageError, match=r"cannot write .*: free some space or make the folder"):
        files.write_text(tmp_path / "build" / "a.txt", "text")
    with pytest.raises(SageError, match="cannot write build"), files.disk_errors():
        (tmp_path / "build").mkdir()
    assert files.read_lines(tmp_path / "steps.jsonl") == []


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


def test_a_record_holds_what_made_the_result_and_no_path(tmp_path):
    path = tmp_path / "record.json"
    record = records.Record("sft", "smoke", "abc", 1, {}).finish(path, rows=3)
    assert records.load(path) == json.loads(json.dumps(record))
    assert records.done(path, "abc") and not records.done(path, "abd")
    assert str(tmp_path) not in json.dumps(record)


def a_run(folder, fingerprint, drawn=None):
    """An evaluation whose hashes are given."""
    folders = folder / "sft", folder / "measured"
    run = runs.Run(load_profile("smoke"), "evaluation", "sft", *folders, makes="samples.jsonl")
    hashes = {"fingerprint": fingerprint, "build_fingerprint": drawn or fingerprint}
    run.__dict__.update(hashes, made_from={})
    return run


def test_other_settings_put_earlier_work_aside(tmp_path):
    a_run(tmp_path, "one").prepare()
    (tmp_path / "sft" / "steps.jsonl").write_text("kept")
    a_run(tmp_path, "one").prepare()
    assert (tmp_path / "sft" / "steps.jsonl").read_text() == "kept"
    a_run(tmp_path, "two").prepare()
    assert not (tmp_path / "sft" / "steps.jsonl").exists()
    assert (tmp_path / "sft.old1" / "steps.jsonl").read_text() == "kept"


def test_work_of_the_same_samples_is_kept_though_it_is_read_in_another_way(tmp_path):
    a_run(tmp_path, "one", "drawn").prepare()
    (tmp_path / "sft" / "samples.jsonl").write_text("kept")
    a_run(tmp_path, "two", "drawn").prepare()
    assert (tmp_path / "sft" / "samples.jsonl").read_text() == "kept"


def test_a_committed_record_alone_does_not_count_as_done(tmp_path):
    run = a_run(tmp_path, "one")
    run.prepare()
    record = records.Record("evaluation", "smoke", "one", 1, {})
    record.finish(run.record)
    assert not run.done(), "as on a fresh clone, which has records and no weights or samples"
    run.finish(record)
    assert not run.done(), "what it made is not there"
    files.append_line(run.samples, {})
    assert run.done()
    assert not a_run(tmp_path, "other weights").done()


def test_the_base_of_an_adapter_is_a_folder_beside_it_or_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    for folder in (adapter, base, tmp_path / "elsewhere"):
        folder.mkdir()
    assert files.adapter_base(base) is None
    (base / "model.safetensors").write_bytes(b"weights")
    for name, expected in (
        ("../base", base),
        ("base", base),  # as PEFT saves it: from the working directory
        (str(base), base),
        ("owner/name", "owner/name"),
    ):
        files.write_json(adapter / "adapter_config.json", {"base_model_name_or_path": name})
        assert files.adapter_base(adapter) == expected
    files.write_json(adapter / "adapter_config.json", {"base_model_name_or_path": "../base"})
    before = files.model_hash(adapter)
    (base / "model.safetensors").write_bytes(b"others")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert files.model_hash(adapter) != before
