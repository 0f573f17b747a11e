"""The grid runner: all runs of a grid, the most important one first, some at a time.

    sage-companion grid countdown --dry-run
    sage-companion grid countdown --only front --seeds 3407 3408

What is made or published is kept, so that the same command goes on after a kill, from checkpoints;
several runners on one folder share the work. On a cluster whose nodes see the same folders:

    sage-companion grid countdown --executor slurm --partition cpu --hours 2 --parallel 64

Each run is then a job of submitit's, which is started again when SLURM stops it for its time or
for others; ``--executor local`` tries the same without a cluster. The jobs outlive a killed runner,
and the next runner waits for those that still hold a run. Their output is in build/grids/NAME.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import records, runs
from sage_lib.experiment.grid import Grid, load_grid
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.experiment.runs import Run
from sage_lib.files import is_locked
from sage_lib.pipeline import consent, known_settings, plan, processes, stages

#: How often a run is tried before it counts as failed.
TRIES = 2
#: How often a job of submitit's may reach its time and be started again: from checkpoints it gets
#: further each time, and three of them, which is submitit's own, end a long run.
TIMEOUTS = 50
#: Niceness of the runs: other work on the machine comes first.
NICE = 10
#: Seconds between two looks at the runs.
EVERY = 0.5


# --- what there is to do --------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One run of one stage. What it is made from is known once :attr:`needs` are done."""

    profile: Profile
    stage: str
    method: str = BASE
    seed: int | None = None

    @property
    def key(self) -> tuple[str, str, str, int | None]:
        return self.profile.name, self.stage, self.method, self.seed

    @property
    def needs(self) -> list[Task]:
        if self.stage == "sft":
            return []
        if self.stage == "evaluate" and self.method != BASE:
            return [replace(self, stage="rl")]
        base = [Task(self.profile, "sft")]
        if self.stage != "rl":
            return base
        anchored = Task(runs.reference_profile(self.profile, self.method), "sft")  # mostly the base
        return [*base, anchored, Task(self.profile, "entropies")]

    def run(self) -> Run:
        if self.stage == "entropies":
            return runs.entropy_run(self.profile)
        policy = runs.sft_run(self.profile)
        if self.seed is not None:
            policy = runs.rl_run(self.profile, self.method, self.seed)
        return runs.evaluation_run(self.profile, policy) if self.stage == "evaluate" else policy


def tasks(grid: Grid, blocks: Sequence[str], seeds: Sequence[int]) -> list[Task]:
    """The tasks of a grid by importance, or of some blocks and seeds of it: before the first run of
    a profile its base and the base's evaluation, after each run its evaluation."""
    found: list[Task] = []
    chosen = [grid.block(name) for name in blocks] or grid.blocks
    known = {seed for block in chosen for _, _, seed in block.order()}
    for seed in seeds:
        if seed not in known:
            there = ", ".join(map(str, sorted(known))) or "none"
            raise SageError(f"no run has the seed {seed}: there are {there}")
    for block in chosen:
        trained = [one for one in block.order() if not seeds or one[2] in seeds]
        first = ("sft", "entropies", "evaluate") if trained else ("sft", "evaluate")
        found += [Task(block.profile, stage) for stage in first]
        for profile, method, seed in trained:
            found.append(Task(runs.reference_profile(profile, method), "sft"))
            found.append(Task(profile, "rl", method, seed))
            if method in profile.evaluated:
                found.append(Task(profile, "evaluate", method, seed))
    return list({task.key: task for task in found}.values())


def published_seconds(every: list[Task]) -> dict[tuple, float]:
    """Key of a task -> seconds, of those whose results of these very settings are committed, from
    whichever machine."""
    found = {}
    for task in every:
        run = task.run()
        file = paths.measured(task.profile.name, published=True) / run.place / run.record.name
        record = records.load(file) if file.is_file() else {}
        if record.get("recipe") == run.recipe:
            found[task.key] = float(record["seconds"])
    return found


def without_published(every: list[Task], published: Collection[tuple]) -> list[Task]:
    """The tasks whose results are not published, and those that they need.

    ``published``: keys, as :func:`published_seconds` finds them.
    """
    wanted: set[tuple] = set()

    def want(task: Task) -> None:
        wanted.add(task.key)
        for need in task.needs:
            want(need)

    for task in every:
        if task.stage in ("rl", "evaluate") and task.key not in published:
            want(task)
    return [task for task in every if task.key in wanted]


# --- who does it ----------------------------------------------------------------------------------


class Handle(Protocol):
    """A run that was started somewhere."""

    def poll(self) -> int | None:
        """None while it goes on, then its process's status; below 0 the signal that ended it."""


class Executor(Protocol):
    """Where runs are started."""

    cores: float  # that the runs may use together

    def start(self, profile: Profile, job: stages.Job) -> Handle: ...

    def end(self, handles: list[Any]) -> None:
        """End what was started and still runs."""


class Processes:
    """Processes of this one, which end with it."""

    def __init__(self) -> None:
        affinity = getattr(os, "sched_getaffinity", None)
        self.cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)

    def start(self, profile: Profile, job: stages.Job) -> Handle:
        return stages.launch(profile, job)

    def end(self, handles: list[Any]) -> None:
        processes.end(handles)


@dataclass(frozen=True)
class Work:
    """What a worker of submitit does: the process of a run, which ends with the worker."""

    words: list[str]
    log: str

    def __call__(self) -> int:
        process = processes.start(self.words, Path(self.log), stages.environment())
        try:
            return process.wait()
        finally:
            processes.end([process])

    def checkpoint(self) -> Any:
        """Asked for by submitit before a job is stopped for its time or for others: once more."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@dataclass(frozen=True)
class Submitted:
    """A job of submitit's."""

    job: Any

    def poll(self) -> int | None:
        import submitit

        if not self.job.done():
            return None
        try:
            return int(self.job.result())
        except submitit.core.utils.FailedJobError:  # an error of the worker itself
            return 1
        except submitit.core.utils.UncompletedJobError:  # it was killed
            return -signal.SIGKILL


class Submitit:
    """Jobs of submitit's: on a SLURM cluster, or with "local" on this machine."""

    def __init__(self, where: str, grid: str, options: argparse.Namespace):
        import submitit

        self.options = options
        self.cores = Processes().cores if where == "local" else float("inf")
        try:
            self.executor = submitit.AutoExecutor(
                paths.build("grids") / grid, cluster=where, **{f"{where}_max_num_timeout": TIMEOUTS}
            )
        except RuntimeError as error:
            raise SageError(f"submitit cannot submit to {where}: {error}") from error
        if options.partition:
            self.executor.update_parameters(slurm_partition=options.partition)

    def start(self, profile: Profile, job: stages.Job) -> Handle:
        gpus = self.options.gpus
        self.executor.update_parameters(
            name=job.run.name,
            timeout_min=round(60 * self.options.hours),
            cpus_per_task=self.options.cpus or profile.compute.threads,
            gpus_per_node=int(profile.compute.requires_gpu) if gpus is None else gpus,
        )
        work = Work(stages.command(profile, job), str(job.run.log))
        return Submitted(self.executor.submit(work))

    def end(self, handles: list[Any]) -> None:
        for handle in handles:
            handle.job.cancel(check=False)


# --- the runner -----------------------------------------------------------------------------------


@dataclass
class Runner:
    """Does tasks in their order, some at a time, until none is left that it can do."""

    tasks: list[Task]
    executor: Executor
    parallel: int
    done: set[tuple] = field(default_factory=set)
    failed: dict[tuple, str] = field(default_factory=dict)  # and the reason
    tries: dict[tuple, int] = field(default_factory=dict)
    running: dict[tuple, tuple[Task, stages.Job, Handle, float]] = field(default_factory=dict)
    #: Of published runs by the key of their task: they say how long others take, no more.
    published: Mapping[tuple, float] = field(default_factory=dict)
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    elsewhere: dict[tuple[str, str], list[float]] = field(default_factory=dict, init=False)
    made: dict[tuple, stages.Job] = field(default_factory=dict)
    failures: defaultdict[str, stages.Failures] = field(  # by profile
        default_factory=lambda: defaultdict(stages.Failures)
    )

    def __post_init__(self) -> None:
        for (profile, stage, *_), seconds in self.published.items():
            self.elsewhere.setdefault((profile, stage), []).append(seconds)

    def job(self, task: Task) -> stages.Job | None:
        """A task's job, or None while what it needs is not done."""
        if any(need.key not in self.done for need in task.needs):
            return None
        if task.key not in self.made:
            stage, run = stages.STAGES[task.stage], task.run()
            label = f"{task.profile.name}/{run.place}"
            self.made[task.key] = stages.Job(stage, run, label, stage.steps(task.profile, run))
        return self.made[task.key]

    def find_done(self) -> None:
        """Take note of what is there already, and of how long it took."""
        for task in self.pending():
            job = self.job(task)
            if job is not None and job.run.done():
                self.done.add(task.key)
                self.note(task, records.load(job.run.record)["seconds"])

    def note(self, task: Task, seconds: float) -> None:
        self.seconds.setdefault((task.profile.name, task.stage), []).append(seconds)

    def pending(self) -> list[Task]:
        """What neither runs nor has ended, what failed before at the end."""
        left = [t for t in self.tasks if not {t.key} & (self.done | self.failed.keys())]
        waiting = [task for task in left if task.key not in self.running]
        return sorted(waiting, key=lambda task: self.tries.get(task.key, 0))

    def mean(self, task: Task) -> float | None:
        """Mean seconds of the runs of the task's stage: done here, or else published; of its
        profile where there are some."""
        for found in (self.seconds, self.elsewhere):
            of_stage = {name: s for (name, stage), s in found.items() if stage == task.stage}
            own = of_stage.get(task.profile.name) or [s for some in of_stage.values() for s in some]
            if own:
                return statistics.mean(own)
        return None

    def left(self) -> str:
        """How long the rest takes, from the means so far, as a sentence's end."""
        rest = [task for task in self.tasks if task.key not in self.done | self.failed.keys()]
        means = [self.mean(task) for task in rest]
        if None in means:
            return "time left not known yet"
        minutes = round(sum(filter(None, means)) / self.parallel / 60)
        return f"about {minutes // 60} h {minutes % 60:02d} min left"

    def progress(self) -> str:
        return f"{len(self.done)} of {len(self.tasks)} done, {self.left()}"

    def opening(self) -> str:
        """The progress before anything is started, and what is published beside it."""
        own = {task.key for task in self.tasks}
        others = sum(key not in own for key in self.published)
        if others and not self.tasks:
            return f"nothing to do, all {others} are published"
        beside = f"{others} more published, " if others else ""
        return f"{len(self.done)} of {len(self.tasks)} done, {beside}{self.left()}"

    def run(self) -> None:
        """Raises SageError that names what failed, once everything else is done."""
        self.find_done()
        print(f"{self.opening()}; at most {self.parallel} at a time", flush=True)
        waited = False
        try:
            while self.pending() or self.running:
                self.start_next()
                waits = not self.running and bool(self.pending())
                if waits and not waited:
                    print("what is left waits for runs of other processes", flush=True)
                waited = waits
                time.sleep(EVERY)
                self.collect()
        finally:
            self.executor.end([handle for _, _, handle, _ in self.running.values()])
        if self.failed:
            raise SageError("; ".join(self.failed.values()))

    def start_next(self) -> None:
        """Start what can be started, in order: a run that waits for cores lets no later one by."""
        left, going = self.pending(), [task for task, _, _, _ in self.running.values()]
        tried = [task for task in [*left, *going] if self.tries.get(task.key)]
        doubtful = {(task.profile.name, task.stage, task.method) for task in tried}
        for task in left:
            if len(self.running) >= self.parallel:
                return
            kind = (task.profile.name, task.stage, task.method)
            if kind in doubtful and task not in tried:
                continue  # until the second try of its like has told whether it is worth it
            lost = next((need for need in task.needs if need.key in self.failed), None)
            if lost is not None:
                self.failed[task.key] = f"{_name(task)} was not done: it needs {_name(lost)}"
                continue
            like = self.failures[task.profile.name].like(task.stage, task.method)
            if like:
                self.failed[task.key] = f"{_name(task)} was not started: {like}"
                print(self.failed[task.key], flush=True)
                continue
            job = self.job(task)
            if job is None or is_locked(job.run.lock):
                continue
            if job.run.done():
                self.done.add(task.key)
                print(f"{job.label}: made by another process; {self.progress()}", flush=True)
                continue
            used = sum(one.profile.compute.threads for one, _, _, _ in self.running.values())
            if self.running and used + task.profile.compute.threads > self.executor.cores:
                return
            handle = self.executor.start(task.profile, job)
            self.running[task.key] = task, job, handle, time.monotonic()
            print(f"{job.label}: started", flush=True)

    def collect(self) -> None:
        """Take note of what has ended."""
        for key, (task, job, handle, started) in list(self.running.items()):
            status = handle.poll()
            if status is None:
                continue
            del self.running[key]
            seconds = time.monotonic() - started
            if status == stages.BUSY:
                continue
            if status == 0 and job.run.done():
                self.done.add(key)
                self.note(task, seconds)
                how = records.collapse(job.run.record) or "finished"
                print(f"{job.label}: {how}, {seconds:.0f} s; {self.progress()}", flush=True)
                continue
            self.tries[key] = self.tries.get(key, 0) + 1
            words = f"{job.label} failed after {seconds:.0f} s: {stages.reason(job, status)}"
            if self.tries[key] < TRIES:
                print(f"{words}; it is tried once more", flush=True)
            else:
                self.failed[key] = words
                print(words, flush=True)
                if status > 0:  # and was not killed
                    self.failures[task.profile.name].note(job, stages.last_words(job))


def _name(task: Task) -> str:
    return f"{task.profile.name}/{task.run().place}"


# --- the command ----------------------------------------------------------------------------------


def listed(every: list[Task], published: Mapping[tuple, float]) -> pd.DataFrame:
    """Columns profile, run, state and seconds: measured, or the mean of such runs with a "~"."""
    runner = Runner(every, Processes(), 1, published=published)
    runner.find_done()
    rows = []
    for task in every:
        run, mean = task.run(), runner.mean(task)
        seconds = "" if mean is None else f"~{mean:.0f}"
        if task.key in runner.done:
            seconds = f"{records.load(run.record)['seconds']:.0f}"
            state = records.collapse(run.record) or "done"
        elif task.key in published:
            state, seconds = "published", f"{published[task.key]:.0f}"
        elif is_locked(run.lock):
            state = "running"
        else:
            state = "begun" if run.is_prepared() and run.live_steps.is_file() else "to do"
        rows.append((task.profile.name, run.place, state, seconds))
    return pd.DataFrame(rows, columns=["profile", "run", "state", "seconds"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`do` reads from a command line."""
    parser.add_argument("grid", help="a grid's name, or the path of a .yaml file")
    stages.add_changes(parser)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="BLOCK", help="do these blocks alone"
    )
    parser.add_argument("--seeds", nargs="+", default=[], type=int, help="do these seeds alone")
    parser.add_argument(
        "--parallel",
        type=int,
        help="runs at a time: what the cores allow, or 16 on a cluster, unless given",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their states")
    stages.add_yes(parser)
    parser.add_argument("--executor", choices=("processes", "local", "slurm"), default="processes")
    parser.add_argument("--partition", help="slurm: where jobs go, the cluster's default otherwise")
    parser.add_argument("--hours", type=float, default=4.0, help="slurm, local: a job's time")
    parser.add_argument("--cpus", type=int, help="slurm: of a job, the profile's threads otherwise")
    parser.add_argument("--gpus", type=int, help="slurm: of a job, 1 where the profile requires it")


def do(options: argparse.Namespace) -> None:
    """List a grid's runs, or do them."""
    grid = load_grid(options.grid)
    if options.set:
        blocks = [
            replace(b, profile=stages.changed(b.profile.spec, options.set)) for b in grid.blocks
        ]
        grid = replace(grid, blocks=tuple(blocks))
    every = tasks(grid, options.only, options.seeds)
    published = published_seconds(every)
    chosen = without_published(every, published)
    executor: Executor = Processes()
    if options.dry_run:
        print(plan.text(listed(every, published)))
        at_a_time = _at_a_time(options.parallel, executor, chosen)
        runner = Runner(chosen, executor, at_a_time, published=published)
        runner.find_done()
        print(f"{runner.opening()}; {runner.parallel} at a time")
        return
    if options.executor != "processes":
        executor = Submitit(options.executor, grid.name, options)
    if executor.cores < float("inf"):
        for profile in {task.profile.name: task.profile for task in chosen}.values():
            known_settings.check(profile)
            stages.check_machine(profile)
            own = [task.run() for task in chosen if task.profile.name == profile.name]
            consent.before(profile, own, options.yes)
        os.nice(max(0, NICE - os.nice(0)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    at_a_time = _at_a_time(options.parallel, executor, chosen)
    Runner(chosen, executor, at_a_time, published=published).run()


def _at_a_time(asked: int | None, executor: Executor, chosen: list[Task]) -> int:
    if asked is not None and asked < 1:
        raise SageError(f"--parallel is 1 or more, not {asked}")
    least = min((task.profile.compute.threads for task in chosen), default=1)
    if executor.cores == float("inf"):
        return asked or 16
    allowed = max(1, int(executor.cores // least))
    return min(asked or allowed, allowed)
