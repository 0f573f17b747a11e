"""Does tasks in their order, some at a time, in processes that do one after another.

A task waits for those that it needs. One that fails is named with its reason and its log while the
others go on; what needs it, and other seeds of its method, are not started. The end of this process
ends all that it started, and the same call goes on from what was made.
"""

import os
import signal
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import FULL, is_full, read_lines
from sage_lib.pipeline import processes

#: The module whose process a worker is.
PROGRAM = "sage_lib.pipeline.worker"


def environment(threads: int | None = None) -> dict[str, str]:
    """What a process starts with: this very sage_lib, so many threads, and glibc told to keep the
    memory of tensors up to 32 MB, whose return costs a tenth of an RL step of countdown."""
    kept = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**29)}
    path = [str(paths.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(path)}
    if threads is not None:
        own["OMP_NUM_THREADS"] = str(threads)
    return {**kept, **os.environ, **own}


@dataclass
class Task:
    """Something that a worker does, which is told ``words``."""

    key: Hashable
    label: str  # in lines of progress
    words: list[str]
    log: Path
    needs: frozenset[Hashable] = frozenset()  # keys of the tasks before it
    like: Hashable = None  # of tasks that are alike none is started once one has failed
    live: Path | None = None  # the step log, while it runs
    steps: int = 0  # that it will log

    def renew(self) -> None:
        """Take in what the tasks have made that it needs."""

    def is_taken(self) -> bool:
        """Whether another process does it."""
        return False

    def is_done(self) -> bool:
        return False

    def lacks(self) -> str:
        """What is not there without which it cannot start; "" where it can."""
        return ""

    def remark(self) -> str:
        """What there is to say of it once it is done."""
        return ""


@dataclass(frozen=True)
class Outcome:
    """How a task ended: "done", "kept" (it was done before), "failed" or "not started"."""

    state: str
    seconds: float = 0.0
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.state in ("done", "kept")


class Workers:
    """Starts tasks in processes of this machine."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.all: list[processes.Worker] = []

    def start(self, task: Task) -> processes.Worker:
        """Start a task: ``poll`` is None while it goes on, then its status, as of a process."""
        for one in [one for one in self.all if one.process.poll() is not None]:
            if one.is_asked:  # how its task ended is still to be read
                continue
            self.all.remove(one)
            one.end()
        worker = next((one for one in self.all if one.is_idle), None)
        if worker is None:
            worker = processes.Worker(PROGRAM, environment(self.threads))
            self.all.append(worker)
        worker.send(task.words, task.log)
        return worker

    def end(self) -> None:
        for one in self.all:
            one.end()


@dataclass
class Runner:
    """Does tasks; see the module."""

    tasks: Sequence[Task]
    parallel: int  # tasks at a time
    pool: Any  # Workers, or what starts and ends tasks elsewhere
    outcomes: dict[Hashable, Outcome] = field(default_factory=dict)
    running: dict[Hashable, tuple[Task, Any, "Progress"]] = field(default_factory=dict)
    #: What failed of tasks that are alike, with the reason.
    failures: dict[Hashable, str] = field(default_factory=dict)
    elsewhere: set[Hashable] = field(default_factory=set)

    @cached_property
    def keys(self) -> frozenset[Hashable]:
        """Of all tasks: asked for ten times a second for each of them."""
        return frozenset(task.key for task in self.tasks)

    def run(self) -> dict[Hashable, Outcome]:
        """Do all that is not done; the outcome of every task by its key."""
        for task in [task for task in self.tasks if task.is_done()]:
            self.outcomes[task.key] = Outcome("kept")
            if remark := task.remark():
                _say(task, "already made from the same settings, kept", remark)
        if self.outcomes:
            of = f"{len(self.outcomes)} of {len(self.tasks)}"
            print(f"{of} already made from the same settings, kept", flush=True)
        try:
            while len(self.outcomes) < len(self.tasks):
                for task in self.tasks:
                    if task.key not in self.outcomes and task.key not in self.running:
                        self._start(task)
                time.sleep(0.1)
                for key in list(self.running):
                    self._look(key)
        finally:
            self.pool.end()
        return self.outcomes

    def _start(self, task: Task) -> None:
        """Start a task, if that can be."""
        ended = self.outcomes
        lost = [key for key in task.needs if key in ended and not ended[key].ok]
        waits = (task.needs & self.keys) - ended.keys()
        if lost:
            label = next(one.label for one in self.tasks if one.key == lost[0])
            self._end(task, Outcome("not started", reason=f"it needs {label}"))
        elif waits or len(self.running) >= self.parallel:
            return
        elif task.is_taken():
            if task.key not in self.elsewhere:
                _say(task, "another process makes it, waiting")
            self.elsewhere.add(task.key)
        else:
            task.renew()
            if task.is_done():
                _say(task, "made by another process, kept", task.remark())
                self.outcomes[task.key] = Outcome("kept")
            elif why := self.failures.get(task.like) or task.lacks():
                self._end(task, Outcome("not started", reason=why))
            else:
                self.running[task.key] = task, self.pool.start(task), Progress(task)

    def _look(self, key: Hashable) -> None:
        """Show how a running task goes on, or note that it has ended."""
        task, handle, progress = self.running[key]
        status = handle.poll()
        progress.show(last=status is not None)
        if status is None:
            return
        del self.running[key]
        seconds = time.monotonic() - progress.begun
        if status == 0:
            self._end(task, Outcome("done", seconds))
        elif status != processes.BUSY:
            self._end(task, Outcome("failed", seconds, reason(task.log, status)))
            if status > 0 and task.like is not None:  # a kill says nothing of others
                why = f"{task.label} failed, of the same method ({last_words(task.log)})"
                self.failures.setdefault(task.like, why)

    def _end(self, task: Task, outcome: Outcome) -> None:
        self.outcomes[task.key] = outcome
        spent = "" if outcome.state == "not started" else f"{outcome.seconds:.0f} s"
        place = f"{task.label} ({len(self.outcomes)} of {len(self.tasks)})"
        words = [outcome.state, spent, task.remark() if outcome.ok else outcome.reason]
        print(f"{place}: {', '.join(filter(None, words))}", flush=True)


def run(tasks: Sequence[Task], parallel: int, pool: Any = None) -> dict[Hashable, Outcome]:
    """Do tasks, ``parallel`` at a time; how each of them ended, by its key."""
    return Runner(tasks, parallel, pool or Workers()).run()


def require(tasks: Iterable[Task], outcomes: dict[Hashable, Outcome], remedy: str = "") -> None:
    """SageError that names what failed, of many the first: each had its line when it ended."""
    ended = [(task.label, outcomes[task.key]) for task in tasks]
    said = [f"{label} {one.state}: {one.reason}" for label, one in ended if not one.ok]
    if len(said) > 3:
        said = [f"{len(said)} runs failed, as the lines above say: {said[0]}"]
    if said:
        raise SageError("; ".join(said) + remedy)


def _say(task: Task, *words: str) -> None:
    print(f"{task.label}: {'; '.join(filter(None, words))}", flush=True)


def reason(log: Path, status: int) -> str:
    """The signal that ended a failed task, or its last line, which holds its error; and its log."""
    last = last_words(log)
    if is_full(log.parent):  # and the log may lack its end for that
        last = FULL
    elif status < 0:
        last = f"ended by {signal.Signals(-status).name}"
    return f"{last} (whole log: {log})"


def last_words(log: Path) -> str:
    """The last line of a log."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "no output"


class Progress:
    """Prints where a task is, a line at a time."""

    def __init__(self, task: Task) -> None:
        self.task, self.shown = task, 0
        self.begun = self.shown_at = time.monotonic()
        self.first = self._last()["step"]  # of a run that goes on
        _say(task, "starting")

    def _last(self) -> dict:
        rows = read_lines(self.task.live) if self.task.live else []
        return rows[-1] if rows else {"step": 0}

    def show(self, last: bool = False) -> None:
        """Print a line every 8 seconds if something moved, and at the end."""
        now = time.monotonic()
        if not last and now - self.shown_at < 8:
            return
        row = self._last()
        step, self.first = row["step"], min(self.first, row["step"])  # resuming takes steps back
        if step != self.shown:
            self.shown_at, self.shown = now, step
            pace = (now - self.begun) / max(step - self.first, 1) / 60
            left = f"{pace * (self.task.steps - step):.0f} min left" if self.task.steps else ""
            shown = [name for name in ("loss", "reward", "entropy") if name in row]
            values = [f"{name} {row[name]:.3g}" for name in shown]
            _say(self.task, f"step {step}", left, *values)
