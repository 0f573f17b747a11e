"""Under fire: what compares, counts and breaks is itself tried on faults that were planted."""

import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pandas as pd
import pytest

from sage_lib import files
from sage_lib.errors import SageError
from sage_lib.experiment import profile_checks, records
from sage_lib.experiment.profile import load_profile
from sage_lib.files import read_lines, write_json
from sage_lib.pipeline import fire_faults, fire_fuzz, fire_kills, stages
from sage_lib.pipeline.fire_kills import Arena
from sage_lib.report.fire_tables import moments
from sage_lib.tasks import verifier


@pytest.mark.parametrize("number", [1, 7, 8, 50])
def test_a_plan_has_so_many_kills_and_aims_each_target_in_both_manners(number):
    planned = fire_kills.plan(number)
    assert sum(len(manners) for _, manners in planned) == number
    aimed = {(name, manner) for name, manners in planned for manner in manners}
    if number >= 16:
        assert aimed == {(n, m) for n in fire_kills.TARGETS for m in fire_kills.MANNERS}


@pytest.mark.parametrize("late", [0, 3])
def test_every_kill_of_a_run_comes_further_on_than_the_last_and_before_the_end(
    tmp_path, monkeypatch, late
):
    """``late``: lines that are written between the aim and the kill."""
    made = SimpleNamespace(
        progress=lambda: 100, made=dict, rows=lambda: 100, measured=tmp_path, finish=lambda _: None
    )
    arena = SimpleNamespace(**{**vars(made), "progress": lambda: 20})
    made.copy = lambda *_: arena
    aims = []

    def shot(_, target, aim, pause):
        aims.append(aim)
        assert 0 <= pause <= fire_kills.PAUSE
        return 1.0, int(aim) + late, None

    monkeypatch.setattr(fire_kills, "shot", shot)
    monkeypatch.setattr(fire_kills, "kill", lambda *_: 0)
    rng, manners = random.Random(3), ["group", "parent"]
    for _ in range(200):
        rows = fire_kills.chain("rl", manners, made, 2.0, tmp_path, rng)
        assert all(row["identical"] for row in rows)
        assert 0 < rows[0]["progress"] < 1 and (late or rows[0] != rows[1])
        assert rows[0]["progress"] < rows[1]["progress"] < 1 + late / 80
    first, second = aims[::2], aims[1::2]
    assert min(first) < 25 and 58 < max(first) < 62, "over the first half of what there is"
    assert max(second) > 95 and all(a + late < b for a, b in zip(first, second, strict=True))


def test_the_page_counts_the_kills_in_the_middle():
    said = moments(pd.DataFrame({"progress": [1.0, 0.2, 0.6, 0.7]}))
    assert said.startswith("3 of 4 kills") and "at 60% or later" in said


def finished(folder):
    """An arena with a run of two steps."""
    arena = Arena.make(folder)
    run = arena.measured / "rl" / "fire-s3407"
    run.mkdir(parents=True)
    model = arena.build / "rl" / "fire-s3407" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    rows = [{"step": step, "loss": 0.5, "seconds": 1.0, "time/loss": 2.0} for step in (1, 2)]
    (run / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(run / "record.json", {"weights": "a", "seconds": 3.0, "exact": {"seconds": 1.0}})
    return arena


def test_two_runs_of_the_same_differ_in_nothing_but_their_times(tmp_path):
    one, two = finished(tmp_path / "one"), finished(tmp_path / "two")
    run = two.measured / "rl" / "fire-s3407"
    write_json(run / "record.json", {"weights": "a", "seconds": 9.0, "exact": {"seconds": 7.0}})
    assert one.made() == two.made() and len(one.made()) == 3 and one.rows() == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "measured/rl/fire-s3407/steps.jsonl",
            '{"step": 1, "loss": 0.5}\n{"step": 3, "loss": 0}\n',
        ),
        ("measured/rl/fire-s3407/record.json", '{"weights": "b", "seconds": 3.0}'),
        ("build/rl/fire-s3407/model/model.safetensors", "weightz"),
        ("measured/rl/fire-s3407/steps.jsonl", None),
    ],
)
def test_a_planted_difference_is_named(tmp_path, name, text):
    one, two = finished(tmp_path / "one"), finished(tmp_path / "two")
    root, _, place = name.partition("/")
    path = {"measured": two.measured, "build": two.build}[root] / place
    path.unlink() if text is None else path.write_text(text)
    ours, theirs = one.made(), two.made()
    assert [n for n in ours if ours[n] != theirs.get(n)] == [name]


def test_how_far_a_run_is_can_be_told_while_it_takes_folders_away(tmp_path, monkeypatch):
    arena, real = finished(tmp_path / "one"), os.scandir
    (checkpoint := arena.build / "rl" / "fire-s3407" / "checkpoint-24").mkdir()

    def gone(path):
        """The listing of a folder that was there when its parent was read."""
        if str(path) == str(checkpoint):
            checkpoint.rmdir()
        return real(path)

    before = arena.progress()
    monkeypatch.setattr(os, "scandir", gone)
    assert arena.progress() == before and not checkpoint.exists()


def test_a_copy_leaves_out_a_part_with_its_lock_and_log(tmp_path):
    made = finished(tmp_path / "one")
    for name in ("rl.log", "sft.log"):
        (made.build / name).touch()
    copy = made.copy(tmp_path / "two", ("rl",))
    assert not (copy.build / "rl").exists() and not (copy.measured / "rl").exists()
    assert [path.name for path in copy.build.iterdir()] == ["sft.log"]


#: A parent whose child goes on without it, or ends with it.
PARENT = """
import os, pathlib, sys
from sage_lib.pipeline import processes
code = "import time; time.sleep(600)"
if sys.argv[1] == "ends":
    code = "from sage_lib.pipeline import processes; processes.end_with_parent(); " + code
child = processes.start([sys.executable, "-c", code], pathlib.Path("log"), os.environ)
open("child", "w").write(str(child.pid))
child.wait()
"""


@pytest.mark.parametrize(
    ("fate", "manner", "left"),
    [("stays", "parent", 1), ("stays", "group", 0), ("ends", "parent", 0)],
)
def test_a_process_that_outlives_its_killed_parent_is_counted(
    tmp_path, monkeypatch, fate, manner, left
):
    monkeypatch.setattr(fire_kills, "GRACE", 3 if left else 60)
    arena = Arena.make(tmp_path / "arena")
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, "parent.py", fate],
        env=arena.environment,
        cwd=tmp_path,
        start_new_session=True,
    )
    while not (tmp_path / "child").is_file() or not (tmp_path / "child").read_text():
        time.sleep(0.05)
    assert len(arena.processes()) == 2
    assert fire_kills.kill(parent, arena, manner) == left
    deadline = time.monotonic() + 20
    while arena.processes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# --- broken input ---------------------------------------------------------------------------------


def test_every_place_of_nested_settings_is_found_and_broken_alone():
    whole = {"a": 1, "b": {"c": [2, {"d": 3}]}}
    assert list(fire_fuzz.places(whole)) == [
        *(("a",), ("b",), ("b", "c"), ("b", "c", 0), ("b", "c", 1), ("b", "c", 1, "d")),
    ]
    assert fire_fuzz.changed(whole, ("b", "c", 1, "d"), "misspelt") == {
        "a": 1,
        "b": {"c": [2, {"dz": 3}]},
    }
    assert fire_fuzz.changed(whole, ("b",), "removed") == {"a": 1}
    assert fire_fuzz.changed(whole, ("b", "c", 0), "retyped", "x")["b"]["c"][0] == "x"
    assert whole == {"a": 1, "b": {"c": [2, {"d": 3}]}}


@pytest.fixture(scope="module")
def sections():
    from sage_lib.training.callbacks import check_sections

    return check_sections


@pytest.mark.parametrize("name", ["smoke", "paper_all"])
def test_no_broken_profile_ends_in_a_traceback_or_is_taken_in_silence(sections, name):
    table = fire_fuzz.profiles([name], 1, 7, sections)
    assert table["tried"].sum() > 500 and (table["refused"] > 50).all()
    assert (table["traceback"] + table["silent"]).sum() == 0, table["example"].tolist()


def test_a_check_that_is_taken_out_is_missed(monkeypatch):
    """Without the look at what goes to TRL its misspelt settings pass; without that at numbers a
    name in the place of a size ends in a traceback."""
    table = fire_fuzz.profiles(["smoke"], 1, 7, lambda profile: None).set_index("change")
    assert table.loc["misspelt", "silent"] > 20
    monkeypatch.setattr(profile_checks, "_check_numbers", lambda *given: None)
    table = fire_fuzz.profiles(["smoke"], 2, 7, lambda profile: None).set_index("change")
    assert table.loc["retyped", "traceback"] > 0


def test_no_broken_file_ends_in_a_traceback(tmp_path):
    table = fire_fuzz.files(tmp_path, 60, 7)
    assert len(table) == 9 and (table["refused"] > 10).all()
    assert table["traceback"].sum() == 0, table["example"].tolist()


def test_a_reader_that_lets_an_error_through_is_found(tmp_path, monkeypatch):
    def careless(path):
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    monkeypatch.setattr(fire_fuzz, "read_lines", careless)
    table = fire_fuzz.files(tmp_path, 30, 7).set_index("file")
    assert table.loc["step log", "traceback"] > 0 and table["traceback"].drop("step log").sum() == 0


def test_no_hostile_answer_is_credited_or_hangs():
    """Each has so much processor time; a hang would be cut by the clock, ten times as late."""
    table = fire_fuzz.hostile(40, 7, time_limit=0.3)
    assert table["answers"].sum() == 40 and table["credited"].sum() == 0, table["example"].tolist()


def test_hostile_answers_are_many_and_the_same_for_a_seed():
    one = list(fire_fuzz.answers(1000, 0))
    assert one == list(fire_fuzz.answers(1000, 0)) != list(fire_fuzz.answers(1000, 1))
    assert len(set(one)) > 800 and max(map(len, one)) > 2000
    for piece in ("{{", r"\infty", "<SOLUTION>", "__import__", "^{", "\u0661"):
        assert any(piece in answer for answer in one), piece


# --- faults ---------------------------------------------------------------------------------------


def test_killed_workers_of_the_verifier_cost_no_verdict(tmp_path):
    [row] = fire_faults.worker(None, tmp_path)
    assert row["resumed"] and row["identical"]


class Pool:
    """A pool that breaks after so many chunks, as when a worker is killed in the middle of taking
    one."""

    active = True

    def __init__(self, chunks):
        self.chunks = chunks

    def map(self, function, chunks, seconds, timeout, chunksize):
        def results():
            for number, chunk in enumerate(chunks):
                if number == self.chunks:
                    raise BrokenProcessPool("broken")
                yield [int(gold) == eval(answer) for gold, answer in chunk]

        return SimpleNamespace(result=results)

    def stop(self):
        pass

    join = stop


def broken_pools(monkeypatch, *chunks):
    """A verifier whose pools break after so many chunks, one after the other."""
    pools = iter([Pool(number) for number in chunks])
    monkeypatch.setattr(verifier, "ProcessPool", lambda *given, **named: next(pools))
    asked = [(str(n), f"{n} + {n % 2}") for n in range(100)]
    golds, answers = zip(*asked, strict=True)
    return [v.correct for v in verifier.Verifier().verify_answers(golds, answers)]


def test_a_pool_that_breaks_at_its_work_is_replaced_and_one_that_never_worked_is_told(monkeypatch):
    expected = [n % 2 == 0 for n in range(100)]
    assert broken_pools(monkeypatch, 1, 40, 10, 10**6) == expected
    with pytest.raises(SageError, match="could not start"):
        broken_pools(monkeypatch, 1, 0)


SETTINGS = {
    "rl.learning_rate=fast": "learning_rate must be a number, not 'fast'",
    "rl.learning_rate=.nan": "learning_rate must be a number, not nan",
    "rl.optim=adam": "adam is not a valid OptimizerNames",
    "rl.num_generations=7": "must be divisible by num_generations",
    "rl.num_generations=0": "GRPOConfig does not accept .* modulo by zero",
    "rl_lora.target_modules=[1]": "an entry of target_modules must be a word",
    "rl.bf16=maybe": "bf16 must be true or false or null",
    "model.architecture.max_position_embeddingz=3": "tiny_qwen has no 'max_position_embeddingz'",
    "model.architecture.vocab_size=3": "no 'vocab_size'",
}


@pytest.mark.parametrize("change", SETTINGS)
def test_a_value_that_trl_or_peft_would_stumble_over_is_refused_before_anything_runs(
    sections, change
):
    with pytest.raises(SageError, match=SETTINGS[change]):
        sections(load_profile(f"smoke+{change}"))


def checkpoint(run, step, log=b"1\n2\n3\n"):
    """A checkpoint as StepLog marks it, with its run's log as it stood."""
    from sage_lib.training.callbacks import StepLog

    folder = run / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"x" * 100)
    (run / "steps.jsonl").write_bytes(log)
    args, state = SimpleNamespace(output_dir=str(folder.parent)), SimpleNamespace(global_step=step)
    StepLog(run / "steps.jsonl").on_save(args, state, None)
    return folder


def test_a_checkpoint_that_lost_a_part_or_whose_log_did_is_passed_over(tmp_path):
    from sage_lib.training.callbacks import last_checkpoint

    old = checkpoint(tmp_path, 3, b"1\n")
    new = checkpoint(tmp_path, 6)
    place = tmp_path / "checkpoints"
    assert last_checkpoint(place) == str(new)
    (tmp_path / "steps.jsonl").write_bytes(b"1\n2\n3\n4\n")
    assert last_checkpoint(place) == str(new), "a log that has grown is whole"
    (tmp_path / "steps.jsonl").write_bytes(b"1\n2\n")
    assert last_checkpoint(place) == str(old)
    (tmp_path / "steps.jsonl").write_bytes(b"1\n2\n3\n")
    os.truncate(new / "optimizer.pt", 50)
    assert last_checkpoint(place) == str(old)
    (old / "whole").write_text('{"files": ')
    assert last_checkpoint(place) is None
    (old / "whole").write_text("")
    assert last_checkpoint(place) == str(old), "marked before marks held sizes"


@pytest.mark.parametrize("steps", [5, 16], ids=["within an epoch", "at its end"])
def test_a_run_killed_after_its_last_step_goes_on_without_one_more(tmp_path, steps):
    """transformers takes a step before it looks whether there was one left to take."""
    import torch
    from transformers import Trainer, TrainingArguments

    from sage_lib.training.callbacks import StepLog, train_on

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x, y):
            return {"loss": ((self.slope * x - y) ** 2).mean()}

    def trained():
        trainer = Trainer(
            Line(),
            TrainingArguments(
                output_dir=str(tmp_path / "checkpoints"),
                **{"max_steps": steps, "save_steps": 5, "logging_steps": 1, "report_to": "none"},
                **{"per_device_train_batch_size": 4, "lr_scheduler_type": "constant"},
            ),
            train_dataset=[{"x": float(i % 3), "y": 1.0} for i in range(64)],
            callbacks=[StepLog(tmp_path / "steps.jsonl")],
        )
        train_on(trainer, tmp_path / "checkpoints")
        return trainer.model.slope.item(), trainer.state.global_step

    whole = trained()
    assert whole[0] != 0 and whole[1] == steps
    log = (tmp_path / "steps.jsonl").read_text()
    assert trained() == whole
    assert (tmp_path / "steps.jsonl").read_text() == log and log.count("\n") == steps


def test_after_a_clock_was_set_back_checkpoints_are_dated_in_their_order(tmp_path):
    """By its date the trainer chooses which one it deletes."""
    from sage_lib.training.callbacks import last_checkpoint

    folders = [checkpoint(tmp_path, step) for step in (6, 9, 12)]
    tomorrow = time.time() + 86_400
    for folder in folders[:2]:
        os.utime(folder, (tomorrow, tomorrow))
    assert last_checkpoint(tmp_path / "checkpoints") == str(folders[2])
    dates = [folder.stat().st_mtime for folder in folders]
    assert dates == sorted(set(dates)) and dates[-1] < time.time()


def test_a_file_cut_at_the_end_of_a_line_is_noticed_by_the_size_in_its_record(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("a,b\n1,2\n3,4\n")
    write_json(tmp_path / "record.json", {**fire_fuzz._RECORD, "sizes": {"scores.csv": 12}})
    records.require_whole(path)
    for kept in (8, 5):
        os.truncate(path, kept)
        with pytest.raises(SageError, match=r"scores.csv lacks its end"):
            records.require_whole(path)


def test_a_disk_that_cannot_be_written_is_told_in_a_sentence(tmp_path):
    with (
        pytest.raises(
            SageError, match=r"cannot write x \(No space left on device\); what was made"
        ),
        files.disk_errors(),
    ):
        raise OSError(28, "No space left on device", "/a/x")
    with pytest.raises(FileNotFoundError), files.disk_errors():
        raise FileNotFoundError(2, "no such file", "x")


def test_an_interrupt_is_a_sentence_and_still_an_interrupt():
    error = stages.Interrupted("interrupted: what was made is kept")
    assert isinstance(error, KeyboardInterrupt) and isinstance(error, SageError)
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.io import capture_output

    shell = InteractiveShell()
    with capture_output() as shown:
        shell.run_cell("from sage_lib.errors import SageError\nraise SageError('one sentence')")
    assert shown.stdout.strip() == "error: one sentence"


def test_read_lines_takes_depths_that_no_parser_holds_for_damage(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + "\n{}\n")
    with pytest.raises(SageError, match="line 1 is not valid JSON"):
        read_lines(tmp_path / "a.jsonl")
