"""Does jobs in their order, some at a time, in processes that do one after another.

A job waits for those that it needs. One that fails is named with its reason and its log while the
others go on; what needs it, and others of its group, are not started. The end of this process ends
all that it started, and the same call goes on from what was made.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import records
from sage_lib.files import FULL, disk_errors, is_full, read_lines
from sage_lib.text import visible

#: Status of a job that another process does, or did just now.
BUSY = os.EX_TEMPFAIL
#: Exit status of a worker that did its job and ends nevertheless.
ENDED = 64


def environment(threads: int | None = None) -> dict[str, str]:
    """Return the environment of a worker: this very sage_lib, the number of threads, and glibc told
    to keep memory of up to 32 MB, whose return costs a tenth of an RL step of countdown."""
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**29)}
    path = [str(paths.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(path)}
    if threads is not None:
        fixed["OMP_NUM_THREADS"] = str(threads)
    return {**malloc, **os.environ, **fixed}


@dataclass
class Job:
    """A function for a worker to call, whose output goes to ``log``."""

    key: Hashable
    label: str  # in lines of progress
    function: Callable[..., int | None]  # may return BUSY
    arguments: tuple[Any, ...]
    log: Path
    needs: frozenset[Hashable] = frozenset()  # keys of the jobs before it
    group: Hashable = None  # once a job of a group has failed, no other of it is started
    live: Path | None = None  # the step log, while it runs
    steps: int = 0  # that it will log

    def state(self) -> str:
        """Return "done", or "taken" where another process does it, or ""."""
        return ""

    def remark(self) -> str:
        """Say what there is to say of it once it is done."""
        return ""


@dataclass(frozen=True)
class Outcome:
    """How a job ended: "done", "kept" (it was done before), "failed" or "not started"."""

    state: str
    seconds: float = 0.0
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.state in ("done", "kept")


# -- in a worker -----------------------------------------------------------------------------------


def start_worker() -> None:
    """Make this process lead a session of its own, which an interrupt from the keyboard does not
    reach. It ends as a whole, with the process that started it, killed or not."""
    os.setsid()
    records.revision()  # now, before this process reads more code
    multiprocessing.set_start_method(None, force=True)  # a job finds Python's default, not spawn
    signal.signal(signal.SIGTERM, _end_session)
    threading.Thread(target=_watch_parent, daemon=True).start()


def _end_session(*signal_and_frame: Any) -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _watch_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    _end_session()


def work(function: Callable[..., int | None], arguments: Sequence[Any], log: Path) -> int:
    """Do a job in a worker; return its status. The process ends after a failure, and where there
    is a GPU: what a job leaves there must not meet the next one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    with contextlib.suppress(OSError):  # Linux: the peak memory of a run is its own
        Path("/proc/self/clear_refs").write_text("5")
    status = status_of(function, arguments)
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if status not in (0, BUSY) or (torch and torch.accelerator.is_available()):
        time.sleep(1)  # until the pool has read that this worker took the job
        os._exit(status or ENDED)
    return status


def status_of(function: Callable[..., int | None], arguments: Sequence[Any]) -> int:
    """Call a job's function; return its status: 1 if it failed, which the last line says."""
    try:
        with disk_errors():
            return function(*arguments) or 0
    except SageError as error:
        print(f"error: {error}")
    except Exception:
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 1


# -- in the process that starts workers ------------------------------------------------------------


class Workers:
    """Processes of this machine, which inherit this one's environment."""

    def __init__(self, parallel: int, threads: int = 1) -> None:
        os.environ |= environment(threads)
        self.parallel, self.pool = parallel, _new_pool(parallel)

    def start(self, job: Job) -> Any:
        """Start a job; return its future."""
        if not self.pool.active:  # a worker was killed while none had a job
            self.end()
            self.pool = _new_pool(self.parallel)
        return self.pool.schedule(work, [job.function, job.arguments, job.log])

    def end(self) -> None:
        """End all workers and what they started."""
        self.pool.stop()
        self.pool.join()


def _new_pool(parallel: int) -> ProcessPool:
    spawn = multiprocessing.get_context("spawn")
    return ProcessPool(parallel, initializer=start_worker, context=spawn)


def ended(future: Any) -> int:
    """Return the status of a job that is over; below 0 the signal that killed its worker."""
    error = future.exception()
    if error is None:
        return int(future.result())
    if isinstance(error, ProcessExpired) and error.pid:
        with contextlib.suppress(ProcessLookupError):  # what the worker started
            os.killpg(error.pid, signal.SIGKILL)
    status = getattr(error, "exitcode", -signal.SIGKILL)
    return 0 if status == ENDED else int(status)


@dataclass
class Runner:
    """Does jobs; see the module."""

    jobs: Sequence[Job]
    parallel: int  # jobs at a time
    pool: Any  # Workers, or what starts and ends jobs elsewhere
    outcomes: dict[Hashable, Outcome] = field(default_factory=dict)
    running: dict[Hashable, tuple[Job, Any, "Progress"]] = field(default_factory=dict)
    #: Group -> why no other job of it is started.
    failures: dict[Hashable, str] = field(default_factory=dict)
    elsewhere: set[Hashable] = field(default_factory=set)

    def run(self) -> dict[Hashable, Outcome]:
        """Do all that is not done; return the outcome of every job by its key."""
        keys = {job.key for job in self.jobs}
        for job in self.jobs:
            job.needs &= keys
            if job.state() == "done":
                self.outcomes[job.key] = Outcome("kept")
                if remark := job.remark():
                    _say(job, "already made from the same settings, kept", remark)
        if self.outcomes:
            of = f"{len(self.outcomes)} of {len(self.jobs)}"
            print(f"{of} already made from the same settings, kept", flush=True)
        try:
            while len(self.outcomes) < len(keys):
                for job in self.jobs:
                    if job.key not in self.outcomes and job.key not in self.running:
                        self._start(job)
                time.sleep(0.1)
                for key in list(self.running):
                    self._look(key)
        finally:
            self.pool.end()
        return self.outcomes

    def _start(self, job: Job) -> None:
        """Start a job, if that can be."""
        outcomes = self.outcomes
        failed_needs = [key for key in job.needs if key in outcomes and not outcomes[key].ok]
        if failed_needs:
            label = next(other.label for other in self.jobs if other.key == failed_needs[0])
            self._end(job, Outcome("not started", reason=f"it needs {label}"))
        elif job.needs - outcomes.keys() or len(self.running) >= self.parallel:
            return
        elif (state := job.state()) == "taken":
            if job.key not in self.elsewhere:
                _say(job, "another process makes it, waiting")
            self.elsewhere.add(job.key)
        elif state == "done":
            _say(job, "made by another process, kept", job.remark())
            self.outcomes[job.key] = Outcome("kept")
        elif why := self.failures.get(job.group):
            self._end(job, Outcome("not started", reason=why))
        else:
            self.running[job.key] = job, self.pool.start(job), Progress(job)

    def _look(self, key: Hashable) -> None:
        """Show how a running job goes on, or note that it has ended."""
        job, future, progress = self.running[key]
        is_over = future.done()
        progress.show(is_over)
        if not is_over:
            return
        del self.running[key]
        status, seconds = ended(future), time.monotonic() - progress.begun
        if status == 0:
            self._end(job, Outcome("done", seconds))
        elif status != BUSY:
            self._end(job, Outcome("failed", seconds, reason(job.log, status)))
            if status > 0 and job.group is not None:  # a kill says nothing of others
                why = f"{job.label} failed, of the same method ({last_words(job.log)})"
                self.failures.setdefault(job.group, why)

    def _end(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.key] = outcome
        spent = "" if outcome.state == "not started" else f"{outcome.seconds:.0f} s"
        place = f"{job.label} ({len(self.outcomes)} of {len(self.jobs)})"
        words = [outcome.state, spent, job.remark() if outcome.ok else outcome.reason]
        print(visible(f"{place}: {', '.join(filter(None, words))}"), flush=True)


def run(
    jobs: Sequence[Job], parallel: int, threads: int = 1, pool: Any = None
) -> dict[Hashable, Outcome]:
    """Do jobs, ``parallel`` at a time, in workers of so many threads or in a ``pool``; return how
    each of them ended, by its key."""
    if pool is None:  # a profile may ask for more processes than its machine can bear
        parallel = min(parallel, max(8, os.cpu_count() or 1))
    return Runner(jobs, parallel, pool or Workers(parallel, threads)).run()


def require(jobs: Iterable[Job], outcomes: dict[Hashable, Outcome], remedy: str = "") -> None:
    """Raise SageError that names what failed, of many the first: each had its line."""
    pairs = [(job.label, outcomes[job.key]) for job in jobs]
    failed = [f"{label} {end.state}: {end.reason}" for label, end in pairs if not end.ok]
    if len(failed) > 3:
        failed = [f"{len(failed)} runs failed, as the lines above say: {failed[0]}"]
    if failed:
        raise SageError("; ".join(failed) + remedy)


def _say(job: Job, *words: str) -> None:
    print(visible(f"{job.label}: {'; '.join(filter(None, words))}"), flush=True)


def reason(log: Path, status: int) -> str:
    """Return the signal that ended a failed job, or its last line, which holds its error; and its
    log."""
    last = last_words(log)
    if is_full(log.parent):  # and the log may lack its end for that
        last = FULL
    elif status < 0:
        last = f"ended by {signal.Signals(-status).name}"
    return f"{last} (whole log: {log})"


def last_words(log: Path) -> str:
    """Return the last line of a log."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "no output"


class Progress:
    """Prints where a job is, a line at a time."""

    def __init__(self, job: Job) -> None:
        self.job, self.shown = job, 0
        self.begun = self.shown_at = time.monotonic()
        self.first = self._last()["step"]  # of a run that goes on
        _say(job, "starting")

    def _last(self) -> dict:
        rows = read_lines(self.job.live) if self.job.live else []
        return rows[-1] if rows else {"step": 0}

    def show(self, is_over: bool) -> None:
        """Print a line every 8 seconds if something moved, and at the end."""
        now = time.monotonic()
        if not is_over and now - self.shown_at < 8:
            return
        row = self._last()
        step, self.first = row["step"], min(self.first, row["step"])  # resuming takes steps back
        if step != self.shown:
            self.shown_at, self.shown = now, step
            pace = (now - self.begun) / max(step - self.first, 1) / 60
            wait = f"{pace * (self.job.steps - step):.0f} min left" if self.job.steps > 0 else ""
            names = [name for name in ("loss", "reward", "entropy") if name in row]
            _say(self.job, f"step {step}", wait, *(f"{name} {row[name]:.3g}" for name in names))
