"""Runs killed at random moments, resumed, and compared with undisturbed ones.

A kill is SIGKILL, in one of two manners: to every process of a run at once, or to the one at the
top alone, whose children then have to end themselves. All of it happens in a temporary folder, on a
model of a few thousand parameters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from sage_lib.errors import SageError
from sage_lib.files import read_json, read_lines
from sage_lib.pipeline import stages

#: What is fired on. Its one method has all that a resumed run could lose: noise of a guide, coins
#: for rewards, fresh prompts in the place of even groups, a log of exact evaluations. A checkpoint
#: every few steps, so that a killed run has something to go on from.
PROFILE = """
name: fire
extends: smoke
train: [fire]
model:
  architecture:
    {hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
     num_key_value_heads: 2}
sft_data: {rows: 192}
sft: {max_steps: 120, per_device_train_batch_size: 8, logging_steps: 1, save_steps: 15}
rl_data: {rows: 64}
rl: {max_steps: 40, per_device_train_batch_size: 16, max_completion_length: 12, save_steps: 6}
guide_defaults:
  branch: {threshold: 1.0, ratio: 0.2, threshold_quantile: null, clamp_quantile: null}
methods:
  fire: {label: Fire, guide: {name: random}, reward: random, dynamic_sampling: 2}
evaluation:
  data:
    - {name: countdown, rows: 16, seed: 1001, kinds: {both: 1.0}}
    - {name: countdown, rows: 16, seed: 1002, kinds: {forward: 1.0}}
    - {name: countdown, rows: 16, seed: 1003, kinds: {reverse: 1.0}}
  samples: 16
  ks: [1, 16]
  batch_size: 16
  max_new_tokens: 12
  every: 4
  traced: 4
  methods: null
compute: {parallel: 1, disk_gb: 0}
"""
GRID = """
name: fire_grid
about: the one method of fire.yaml
blocks:
  - {name: only, about: "all of it", profile: fire.yaml, methods: [fire]}
"""
RUN = "fire-s3407"
#: Seconds within which every process of a killed run must be gone.
GRACE = 60
#: Seconds between two looks at how far a run is: fewer than any of its steps takes.
EVERY = 0.01
#: A kill comes up to so many seconds after the line or file that it is aimed at: about a step, so
#: that it hits every part of one, and no run is over before.
PAUSE = 0.08
#: Keys of records and logs that differ between two runs of the same thing: times, memory, and the
#: sizes of files that hold times.
VOLATILE = frozenset(
    {"seconds", "peak_memory_gb", "finished", "step_time", "tokens_per_second", "sizes"}
)
#: To whom a kill is sent: to all processes of a run, or to the first of them.
MANNERS = ("group", "parent")


@dataclasses.dataclass(frozen=True)
class Target:
    """Something that is run and killed."""

    words: tuple[str, ...]  # after "python -m"; {folder} stands for the arena's
    made: tuple[str, ...]  # parts of the work, by their folders, that it makes; the rest is there
    after: str | None = None  # kills come once this file is there, below results/measured/fire


_STAGE = ("sage_lib.pipeline.stages",)
TARGETS = {
    "sft": Target((*_STAGE, "sft", "--profile", "{folder}/fire.yaml"), ("sft",)),
    "rl": Target((*_STAGE, "rl", "--profile", "{folder}/fire.yaml"), ("rl",)),
    "sampling": Target(
        (*_STAGE, "evaluate", "--profile", "{folder}/fire.yaml", "--run", f"eval-{RUN}"),
        (f"evaluation/{RUN}",),
    ),
    "exact evaluation": Target(
        (*_STAGE, "evaluate", "--profile", "{folder}/fire.yaml", "--run", f"eval-{RUN}"),
        (f"evaluation/{RUN}",),
        after=f"evaluation/{RUN}/scores.csv",
    ),
    "grid": Target(
        ("sage_lib.pipeline.cli", "grid", "{folder}/fire_grid.yaml", "--parallel", "1"),
        ("rl", f"evaluation/{RUN}"),
    ),
    "notebook": Target(
        ("sage_lib.pipeline.reproduce", "--profile", "{folder}/fire.yaml", "--only", "21"),
        ("sft", "entropies", "notebooks"),
    ),
}


# --- a place to work in ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arena:
    """A folder with builds and results of its own, and the processes that work there."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Arena:
        folder.mkdir(parents=True)
        (folder / "fire.yaml").write_text(PROFILE)
        (folder / "fire_grid.yaml").write_text(GRID)
        return cls(folder)

    @property
    def build(self) -> Path:
        return self.folder / "build" / "fire"

    @property
    def measured(self) -> Path:
        return self.folder / "results" / "measured" / "fire"

    @property
    def environment(self) -> dict[str, str]:
        return {
            **stages.environment(),
            "SAGE_BUILD": str(self.folder / "build"),
            "SAGE_RESULTS": str(self.folder / "results"),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """A module of the library as a process that leads a session of its own; its output is added
        to output.txt."""
        command = [word.replace("{folder}", str(self.folder)) for word in words]
        with (self.folder / "output.txt").open("a") as output:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, words: Sequence[str]) -> float:
        """Run a module to its end; returns seconds. SageError with its last line where it fails."""
        started = time.perf_counter()
        process = self.start(words)
        if process.wait():
            raise SageError(f"{' '.join(words[:3])} failed: {self.last_line()}")
        return time.perf_counter() - started

    def last_line(self) -> str:
        lines = (self.folder / "output.txt").read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "no output")

    def copy(self, folder: Path, without: Sequence[str]) -> Arena:
        """Another arena with what is made here, ``without`` some parts of it."""
        other = Arena.make(folder)

        def left_out(directory: str, names: list[str]) -> set[str]:
            places = [Path(directory) / name for name in names]
            roots = [root / part for root in (self.build, self.measured) for part in without]
            # a part's lock and log lie beside its folder
            own = {place.name for place in places for r in roots if place in (r, *_beside(r))}
            return own & set(names)

        for name in ("build", "results"):
            shutil.copytree(self.folder / name, folder / name, ignore=left_out)
        return other

    def progress(self) -> int:
        """How far the work is: lines of every log and of all samples, and measured files."""
        logs = [path for path in _files(self.build) if _is_log(path.name)]
        lines = sum(_bytes(path).count(b"\n") for path in logs)
        return lines + len(_files(self.measured))

    def processes(self) -> list[psutil.Process]:
        """Every process that works here, known by the environment that it inherited."""
        found = []
        for process in psutil.process_iter():
            try:
                here = process.environ().get("SAGE_BUILD") == str(self.folder / "build")
                if here and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def made(self) -> dict[str, str]:
        """A digest of all that is made: by file, times and memory left out of it."""
        found = {}
        for path in sorted(self.measured.rglob("*")):
            if path.is_file():
                found[f"measured/{path.relative_to(self.measured)}"] = _digest(path)
        kept = [*self.build.rglob("model*.safetensors"), *self.build.rglob("samples*.jsonl")]
        for path in sorted(kept):
            found[f"build/{path.relative_to(self.build)}"] = _digest(path)
        return found

    def rows(self) -> int:
        """Lines of the kept step logs and of all samples: what is done twice shows here."""
        logs = [*self.measured.rglob("steps.jsonl"), *self.build.rglob("samples*.jsonl")]
        return sum(len(read_lines(path)) for path in logs)


def _beside(folder: Path) -> list[Path]:
    return [folder.with_name(f"{folder.name}{end}") for end in (".lock", ".log")]


def _files(folder: Path) -> list[Path]:
    """All files below a folder at work: one that is taken away meanwhile is passed over, of which
    ``Path.rglob`` makes an error."""
    return [Path(at) / name for at, _, names in os.walk(folder) for name in names]


def _is_log(name: str) -> bool:
    return name == "steps.jsonl" or (name.startswith("samples") and name.endswith(".jsonl"))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # put aside or replaced just now
        return b""


def _digest(path: Path) -> str:
    if path.suffix in (".json", ".jsonl"):
        rows = [read_json(path)] if path.suffix == ".json" else read_lines(path)
        return hashlib.sha256(json.dumps([_still(row) for row in rows]).encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _still(value: Any) -> Any:
    """A record without what no two runs have in common."""
    if isinstance(value, dict):
        kept = [key for key in value if key not in VOLATILE and not key.startswith("time/")]
        return {key: _still(value[key]) for key in kept}
    return value


# --- kills ----------------------------------------------------------------------------------------


def reference(folder: Path) -> tuple[Arena, dict[str, float]]:
    """Everything that is fired on, made undisturbed; and the seconds that each target takes.

    What sampling and exact evaluation take is the run of which they are parts.
    """
    arena = Arena.make(folder)
    seconds = {}
    for name in ("sft", "notebook", "rl", "sampling"):
        seconds[name] = arena.finish(TARGETS[name].words)
    seconds["notebook"] += seconds["sft"]  # which it found done
    # The rest of what the grid does: the base's evaluation; then the grid finds all of it done.
    arena.finish((*_STAGE, "evaluate", "--profile", "{folder}/fire.yaml", "--run", "eval-sft"))
    arena.finish(TARGETS["grid"].words)
    seconds["exact evaluation"] = seconds["sampling"]
    seconds["grid"] = seconds["rl"] + seconds["sampling"]
    base, trained = (
        read_json(arena.measured / place / "record.json")["weights"]
        for place in ("sft", f"rl/{RUN}")
    )
    if base == trained:
        raise SageError("the run that is fired on learned nothing: no comparison could fail")
    return arena, seconds


def kill(process: subprocess.Popen[bytes], arena: Arena, manner: str) -> int:
    """Kill a run; returns how many of its processes outlived it by :data:`GRACE`, and ends them."""
    top = psutil.Process(process.pid)
    tree = [top]
    if manner == "group":
        top.suspend()  # it starts nothing more, and none sees another's end before its own
        tree += top.children(recursive=True)
        for one in tree:
            _send(one, signal.SIGSTOP)
    for one in tree:
        _send(one, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + GRACE
    while (left := arena.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for one in left:
        _send(one, signal.SIGKILL)
    return len(left)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def shot(
    arena: Arena, target: Target, aim: float, pause: float
) -> tuple[float, int, subprocess.Popen[bytes]] | None:
    """Start a run and wait for the moment of its kill: ``pause`` seconds after it is as far as
    ``aim`` (of :meth:`Arena.progress`).

    Returns seconds, progress and the process, or None where it ended before.
    """
    started = time.perf_counter()
    process = arena.start(target.words)
    while not _is_due(arena, target, aim):
        if process.poll() is not None:
            return None
        time.sleep(EVERY)
    time.sleep(pause)
    if process.poll() is not None:
        return None
    return time.perf_counter() - started, arena.progress(), process


def _is_due(arena: Arena, target: Target, aim: float) -> bool:
    if target.after is not None:
        return (arena.measured / target.after).is_file()
    return arena.progress() >= aim


def chain(
    name: str,
    kills: Sequence[str],
    made: Arena,
    seconds: float,
    folder: Path,
    rng: random.Random,
) -> list[dict[str, Any]]:
    """One run, killed in each manner of ``kills`` in turn, then let go on to its end.

    Every kill but the first comes further on than the last one did: the run has gone on in between.

    Returns a row per kill: stage, manner, at (when, as a share of the undisturbed duration, the
    start of the processes included), progress (how far it was, as a share of what it logs and
    makes, or of the seconds of the exact evaluation), orphans, resumed (whether it came to its
    end), identical (whether all that it made, byte by byte but for times, is what the undisturbed
    run made), rows (of its logs and samples) and rows undisturbed, and what differed.
    """
    target, last = TARGETS[name], made.progress()
    arena = made.copy(folder, target.made)
    before, found = arena.progress(), []
    done = before
    exact = None
    if target.after is not None:
        record = read_json((made.measured / target.after).with_name("record.json"))
        exact = record["exact"]["seconds"]
    for left, manner in zip(range(len(kills), 0, -1), kills, strict=True):
        # Each leaves room for those that follow.
        aim = done + 1 + rng.random() / left * (last - done - 1)
        wait = rng.random()
        hit = shot(arena, target, aim, wait * (PAUSE if exact is None else exact))
        if hit is None:
            break
        took, done, process = hit
        orphans = kill(process, arena, manner)
        share = (done - before) / (last - before) if exact is None else wait
        found.append(
            {
                "stage": name,
                "manner": manner,
                "at": round(took / seconds, 3),
                "progress": round(share, 3),
                "orphans": orphans,
            }
        )
    resumed, why = True, ""
    try:
        arena.finish(target.words)
    except SageError as error:
        resumed, why = False, str(error)
    expected, got = made.made(), arena.made()
    differ = sorted(n for n in {**expected, **got} if expected.get(n) != got.get(n))
    end = {
        "resumed": resumed,
        "identical": resumed and not differ,
        "rows": arena.rows(),
        "rows undisturbed": made.rows(),
        "differs": why or "; ".join(differ),
    }
    return [{**row, **end} for row in found]


#: How a round of kills goes over the targets: so many on one run before it is let go on.
ROUND = (("sft", 1), ("rl", 2), ("sampling", 1), ("exact evaluation", 1), ("grid", 2))
ROUND_OF_NOTEBOOKS = ("notebook", 1)


def plan(number: int) -> list[tuple[str, list[str]]]:
    """(target, manners of its kills) of so many kills in all, the two manners in turn."""
    manners = itertools.cycle(MANNERS)
    found: list[tuple[str, list[str]]] = []
    left = number
    for name, kills in itertools.cycle((*ROUND, ROUND_OF_NOTEBOOKS)):
        count = min(kills, left)
        found.append((name, [next(manners) for _ in range(count)]))
        left -= count
        if not left:
            return found
        if name == ROUND_OF_NOTEBOOKS[0]:  # the next round has each target the other way
            next(manners)
    raise AssertionError("a cycle has no end")


def kills(
    number: int,
    seed: int,
    made: Arena,
    seconds: dict[str, float],
    keep: Callable[[list[dict[str, Any]]], None],
    folder: Path,
) -> pd.DataFrame:
    """So many kills of what :func:`reference` made; ``keep`` is given the rows so far after each
    run. The folder of a run in which something went wrong stays."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for n, (name, manners) in enumerate(plan(number)):
        place = folder / f"kill{n:02d}"
        found = chain(name, manners, made, seconds[name], place, rng)
        if len(found) < len(manners):
            print(f"{name}: ended before kill {len(found) + 1}, which is left out", flush=True)
        for row in found:
            print(", ".join(f"{key} {value}" for key, value in row.items() if value != ""))
        sys.stdout.flush()
        rows += found
        keep(rows)
        if all(row["identical"] and not row["orphans"] for row in found):
            shutil.rmtree(place)
    return pd.DataFrame(rows)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By stage and manner: kills, resumed, identical, orphans."""
    by = table.groupby(["stage", "manner"], sort=False)
    counted = by.agg(
        kills=("stage", "size"),
        resumed=("resumed", "sum"),
        identical=("identical", "sum"),
        orphans=("orphans", "sum"),
    )
    return counted.reset_index()
