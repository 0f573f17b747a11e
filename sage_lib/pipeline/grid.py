"""The runs of a larger study, the most important one first, some at a time.

Several runners on one folder share the work. On a cluster each run is a job of submitit's, which is
started again when SLURM stops it for its time or for others.
"""

import argparse
import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any

import submitit
from submitit.helpers import Checkpointable

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.grid import Block, load_grid
from sage_lib.experiment.profile import BASE
from sage_lib.pipeline import arguments, plan, processes, runner, stages, worker


def tasks(blocks: Sequence[Block], seeds: Sequence[int]) -> list[stages.RunTask]:
    """The runs of some blocks in their order, each once: of a profile first its base and what is
    measured of that, after each run its evaluation."""
    found: dict[Any, stages.RunTask] = {}
    for block in blocks:
        name, kinds = block.settings.name, ["sft", "entropies", "rl", "evaluation"]
        every = {task.key: task for task in stages.tasks(block.settings, kinds)}
        pairs = [pair for pair in block.order() if not seeds or pair[1] in seeds]
        keys = [(name, stage, *pair) for pair in pairs for stage in ("rl", "evaluation")]
        runs = [every[key] for key in keys if key in every]
        needed = {key for task in runs for key in task.needs}
        needed |= {(name, stage, BASE, None) for stage in ("sft", "evaluation")}
        base = [task for key, task in every.items() if key in needed and task.run.seed is None]
        for task in [*base, *runs]:
            found.setdefault(task.key, task)
    return list(found.values())


class Work(Checkpointable):
    """What a job of submitit's does, once more where it is stopped for its time or for others."""

    def __init__(self, task: runner.Task) -> None:
        self.words, self.log = task.words, task.log

    def __call__(self) -> int:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as output, contextlib.redirect_stdout(output):
            return processes.status_of(worker.do, self.words)


class Job:
    """A job of submitit's, as a handle of the runner."""

    def __init__(self, job: Any) -> None:
        self.job = job

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        return -signal.SIGKILL if self.job.exception() else int(self.job.result())


class Submitit:
    """Jobs of submitit's: on a SLURM cluster, or with "local" on this machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        where = options.executor
        more = {f"{where}_max_num_timeout": 50}  # a long run goes on from its checkpoint each time
        try:
            self.executor = submitit.AutoExecutor(paths.build("grids"), cluster=where, **more)
        except RuntimeError as error:
            raise SageError(f"submitit cannot submit to {where}: {error}") from error
        partition = {"slurm_partition": options.partition} if options.partition else {}
        self.executor.update_parameters(timeout_min=round(60 * options.hours), **partition)
        os.environ |= runner.environment()  # which the jobs inherit
        self.jobs: list[Any] = []

    def start(self, task: Any) -> Job:
        compute = task.profile.compute
        more = {"cpus_per_task": compute.threads, "gpus_per_node": int(compute.requires_gpu)}
        self.executor.update_parameters(name=task.run.name, **more)
        self.jobs.append(self.executor.submit(Work(task)))
        return Job(self.jobs[-1])

    def end(self) -> None:
        for job in self.jobs:
            job.cancel(check=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("grid", help="a grid's name, or the path of a .yaml file")
    parser.add_argument("--only", nargs="+", default=[], metavar="BLOCK", help="these blocks alone")
    parser.add_argument("--seeds", nargs="+", default=[], type=int, help="these seeds alone")
    parser.add_argument("--parallel", type=int, help="runs at a time: 16, or what the cores allow")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their states")
    arguments.add_yes(parser)
    parser.add_argument("--executor", choices=("processes", "local", "slurm"), default="processes")
    parser.add_argument("--partition", help="slurm: where jobs go")
    parser.add_argument("--hours", type=float, default=4.0, help="slurm, local: a job's time")


def do(options: argparse.Namespace) -> None:
    """List a grid's runs, or do them."""
    blocks = {block.name: block for block in load_grid(options.grid)}
    if unknown := [name for name in options.only if name not in blocks]:
        raise SageError(f"there is no block {unknown[0]!r}: choose one of {', '.join(blocks)}")
    every = tasks([blocks[name] for name in options.only or blocks], options.seeds)
    if unused := sorted(set(options.seeds) - {task.run.seed for task in every}):
        raise SageError(f"no run of these blocks has the seed {unused[0]}: correct --seeds")
    if options.dry_run:
        for task in every:
            done = (task.remark() or "done") if task.is_done() else ""
            state = done or ("running" if task.is_taken() else "to do")
            print(f"{task.profile.name:<24} {task.run.place:<32} {state}")
        return
    for profile in {task.profile.name: task.profile for task in every}.values():
        plan.check_settings(profile)
        if options.executor != "slurm":
            stages.check_machine(profile)
        own = [task.run for task in every if task.profile.name == profile.name]
        plan.before(profile, own, options.yes)
    threads = max(task.profile.compute.threads for task in every)
    pool = runner.Workers(threads) if options.executor == "processes" else Submitit(options)
    cores = (os.cpu_count() or 1) // threads
    at_a_time = options.parallel or (16 if options.executor == "slurm" else max(1, cores))
    runner.require(every, runner.run(every, at_a_time, pool))
