"""What machines and people do to a run, each of it done to one: what the user is told, whether what
was made is kept, and whether the run goes on to the result of an undisturbed one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.evaluation import counts
from sage_lib.files import read_json, read_lines
from sage_lib.pipeline.fire_kills import RUN, TARGETS, Arena, kill

#: Bytes that a full disk still has.
ROOM = 60_000
RL = TARGETS["rl"]
EVALUATE = TARGETS["sampling"]
#: A row: the fault, what the user was told ("" where there was nothing to tell), whether a
#: traceback was among it, and whether the run came to the undisturbed result.
Row = dict[str, Any]


def faults(made: Arena, folder: Path, keep: Callable[[list[Row]], None]) -> pd.DataFrame:
    """Every fault on a copy of ``made``; ``keep`` is given the rows so far after each.

    Columns fault, said, traceback, resumed, identical.
    """
    rows: list[Row] = []
    every = (disk, cut_files, cut_checkpoint, clock, twice, worker, notebook)
    for number, fault in enumerate(every):
        for row in fault(made, folder / f"fault{number}"):
            rows.append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            keep(rows)
    return pd.DataFrame(rows)


def _told(arena: Arena, words: tuple[str, ...]) -> tuple[int, str, bool]:
    """Run a command; its status, its last line, and whether it printed a traceback."""
    (arena.folder / "output.txt").unlink(missing_ok=True)
    status = arena.start(words).wait()
    printed = (arena.folder / "output.txt").read_text(errors="replace")
    return status, arena.last_line(), "Traceback (most recent call last)" in printed


def _row(fault: str, said: str, traceback: bool) -> Row:
    return {"fault": fault, "said": said, "traceback": traceback}


def _end(made: Arena, arena: Arena, rows: list[Row], *commands: tuple[str, ...]) -> list[Row]:
    """The rows, with how the run went on."""
    resumed = True
    try:
        for words in commands:
            arena.finish(words)
    except SageError as error:
        resumed = False
        print(error, flush=True)
    same = resumed and arena.made() == made.made()
    return [{**row, "resumed": resumed, "identical": same} for row in rows]


# --- the disk -------------------------------------------------------------------------------------


def _mount(*words: str) -> None:
    subprocess.run(("mount", *words), check=True, capture_output=True)


@contextlib.contextmanager
def _own_disk(arena: Arena) -> Iterator[Path]:
    """The arena's build folder on a disk of its own, of 1 GB (tmpfs, which asks for root)."""
    build, kept = arena.folder / "build", arena.folder / "kept"
    build.rename(kept)
    build.mkdir()
    _mount("-t", "tmpfs", "-o", "size=1g", "tmpfs", str(build))
    try:
        shutil.copytree(kept, build, dirs_exist_ok=True)
        yield build
    finally:
        subprocess.run(("umount", "--lazy", str(build)), check=True)


def disk(made: Arena, folder: Path) -> list[Row]:
    """A read-only disk, then a full one, then one that is neither."""
    if os.geteuid():
        said = "left out: a disk of one's own needs root"
        row = _row("read-only and full disk", said, False)
        return [{**row, "resumed": None, "identical": None}]
    arena, rows = made.copy(folder, RL.made), []
    with _own_disk(arena) as build:
        _mount("-o", "remount,ro", str(build))
        _, said, traceback = _told(arena, RL.words)
        rows.append(_row("read-only folder", said, traceback))
        _mount("-o", "remount,rw", str(build))
        used = shutil.disk_usage(build).used
        _mount("-o", f"remount,size={used + ROOM}", str(build))
        _, said, traceback = _told(arena, RL.words)
        rows.append(_row("full disk", said, traceback))
        _mount("-o", "remount,size=1g", str(build))
        return _end(made, arena, rows, RL.words)


# --- files ----------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    """Leave the first half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def cut_files(made: Arena, folder: Path) -> list[Row]:
    """Every kind of file that a finished run leaves, cut in half: those that are read by path, then
    those that the next command meets."""
    from sage_lib.report import measured

    arena, rows = made.copy(folder, ()), []
    evaluated, trained = (arena.measured / place for place in (f"evaluation/{RUN}", f"rl/{RUN}"))
    readers: tuple[tuple[Path, Callable[[Path], object]], ...] = (
        (evaluated / "counts.csv", counts.read),
        (evaluated / "scores.csv", measured.read_table),
        (evaluated / "support.csv", measured.read_table),
        (evaluated / "samples.jsonl.gz", measured.read_packed),
        (arena.measured / "entropies" / "entropy.json", read_json),
        (trained / "record.json", read_json),
    )
    for path, read in readers:
        whole = path.read_bytes()
        cut(path)
        said, traceback = "", False
        try:
            read(path)
        except SageError as error:
            said = str(error)
        except Exception as error:
            said, traceback = repr(error), True
        path.write_bytes(whole)
        rows.append(_row(f"half of {path.name}", said, traceback))
    rows = _end(made, arena, rows)

    # What is cut, the command that meets it, what its sentence has one delete, what then goes on.
    sft, again = TARGETS["sft"].words, (RL.words, EVALUATE.words)
    trained, record = arena.build / "rl" / RUN, arena.measured / "sft" / "record.json"
    cases: tuple[tuple[Path, tuple[str, ...], list[Path], tuple[tuple[str, ...], ...]], ...] = (
        (arena.build / "sft" / "done", sft, [], (sft,)),
        (record, sft, [record.parent], (sft,)),
        (trained / "model" / "tokenizer.json", EVALUATE.words, [trained], again),
        (trained / "model" / "model.safetensors", EVALUATE.words, [trained], again),
    )
    for path, words, deleted, after in cases:
        if words == EVALUATE.words:  # that the model is read again
            shutil.rmtree(arena.measured / "evaluation" / RUN)
        cut(path)
        status, said, traceback = _told(arena, words)
        row = _row(f"half of {path.name}", said if status else "", traceback)
        for place in deleted:
            shutil.rmtree(place)
        rows += _end(made, arena, [row], *after)
    samples = arena.build / "evaluation" / RUN / "samples.jsonl"
    cut(samples)
    shutil.rmtree(arena.measured / "evaluation" / RUN)
    return rows + _end(made, arena, [_row("half of samples.jsonl", "", False)], EVALUATE.words)


def _half_way(made: Arena, folder: Path) -> Arena:
    """RL killed at about two thirds, with checkpoints behind it."""
    arena = made.copy(folder, RL.made)
    log = arena.build / "rl" / RUN / "steps.jsonl"
    process = arena.start(RL.words)
    while len(read_lines(log)) < 11 and process.poll() is None:
        time.sleep(0.05)
    kill(process, arena, "group")
    return arena


def cut_checkpoint(made: Arena, folder: Path) -> list[Row]:
    """Half of the newest checkpoint's optimiser, and then of the step log."""
    arena = _half_way(made, folder)
    run = arena.build / "rl" / RUN
    newest = max(run.glob("checkpoints/checkpoint-*/whole"), key=lambda p: p.stat().st_mtime_ns)
    cut(newest.with_name("optimizer.pt"))
    cut(run / "steps.jsonl")
    rows = [_row("half of a checkpoint and of steps.jsonl", "", False)]
    return _end(made, arena, rows, RL.words)


def clock(made: Arena, folder: Path) -> list[Row]:
    """The clock set back by a day: to a resumed run all files are from tomorrow."""
    arena = _half_way(made, folder)
    tomorrow = time.time() + 86_400
    for path in [*arena.build.rglob("*"), *arena.measured.rglob("*")]:
        os.utime(path, (tomorrow, tomorrow))
    return _end(made, arena, [_row("clock set back by a day", "", False)], RL.words)


# --- processes ------------------------------------------------------------------------------------


def twice(made: Arena, folder: Path) -> list[Row]:
    """Two commands for one run, started at once."""
    arena = made.copy(folder, RL.made)
    both = [arena.start(RL.words) for _ in range(2)]
    statuses = [process.wait() for process in both]
    printed = (arena.folder / "output.txt").read_text()
    told = [line for line in printed.splitlines() if "another process" in line]
    row = _row("two runs started in one folder", "; ".join(told), "Traceback" in printed)
    [end] = _end(made, arena, [row])
    return [{**end, "resumed": statuses == [0, 0]}]


def worker(made: Arena, folder: Path) -> list[Row]:
    """A worker of the verifier killed at its work, again and again."""
    from sage_lib.tasks.verifier import Verifier

    answers = [rf"\frac{{{n * 3}}}{{{3}}} + {n % 2}" for n in range(160)]
    golds = [str(n) for n in range(160)]
    verifier = Verifier(workers=2)
    verifier.verify_answers(["7"], ["8 - 1"])  # its workers have started
    children = multiprocessing.active_children()
    killer = subprocess.Popen(
        ["sh", "-c", f"sleep 0.2; kill -9 {' '.join(str(child.pid) for child in children)}"]
    )
    found = [verdict.correct for verdict in verifier.verify_answers(golds, answers)]
    killer.wait()
    verifier.close()
    expected = [n % 2 == 0 for n in range(160)]
    row = _row("the verifier's workers killed", "", False)
    return [{**row, "resumed": len(children) > 0, "identical": found == expected}]


def notebook(made: Arena, folder: Path) -> list[Row]:
    """The stop button of JupyterLab while a stage runs: an interrupt to the kernel; then the cell
    once more."""
    from jupyter_client.manager import start_new_kernel

    arena = made.copy(folder, RL.made)
    log = arena.build / "rl" / RUN / "steps.jsonl"
    manager, client = start_new_kernel(kernel_name="python3", env=arena.environment)
    cell = (
        "from sage_lib.experiment.profile import load_profile\n"
        "from sage_lib.pipeline import stages\n"
        f"found = stages.run(load_profile({str(arena.folder / 'fire.yaml')!r}), 'rl')"
    )
    shown: list[str] = []
    try:
        asked = client.execute(cell)
        deadline = time.monotonic() + 600
        while len(read_lines(log)) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        manager.interrupt_kernel()
        idle = False
        while not idle:
            message = client.get_iopub_msg(timeout=60)
            own = message["parent_header"].get("msg_id") == asked
            if own and message["msg_type"] == "error":
                shown += message["content"]["traceback"]
            idle = own and message["content"].get("execution_state") == "idle"
        left = [p for p in arena.processes() if "ipykernel" not in " ".join(p.cmdline())]
        time.sleep(1)  # after an error a kernel aborts what was asked for at that time
        reply = client.execute_interactive(cell, timeout=600, output_hook=lambda message: None)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    said = "\n".join(shown)
    row = _row("a notebook interrupted", said, "Traceback" in said or "\n" in said)
    [end] = _end(made, arena, [row])
    resumed = reply["content"]["status"] == "ok" and not left
    return [{**end, "resumed": resumed}]
