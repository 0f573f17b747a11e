"""The runs of a larger study, the most important one first, some at a time.

Several runners on one folder share the work. On a cluster each run is a job of submitit's, which is
started again when SLURM stops it for its time or for others.
"""

import argparse
import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any

import submitit
from submitit.helpers import Checkpointable
from submitit.slurm.slurm import SlurmInfoWatcher

from sage_lib import consent, paths
from sage_lib.errors import SageError
from sage_lib.experiment.blocks import Block, load_grid
from sage_lib.experiment.profile import BASE
from sage_lib.pipeline import arguments, jobs, plan, stages

#: Hours that a job must have. SLURM warns it 90 seconds before its end, and it takes a minute or
#: more to start: with less it would be queued again and again, and do nothing.
LEAST_HOURS = 0.1


def jobs_of(blocks: Sequence[Block], seeds: Sequence[int]) -> list[stages.RunJob]:
    """Return the runs of some blocks in their order, each once: of a profile first its base and
    what is measured of that, after each run its evaluation."""
    planned: dict[Any, stages.RunJob] = {}
    for block in blocks:
        name, kinds = block.loaded.name, ["sft", "entropies", "rl", "evaluation"]
        by_key = {job.key: job for job in stages.jobs_of(block.loaded, kinds)}
        pairs = [pair for pair in block.order() if not seeds or pair[1] in seeds]
        keys = [(name, stage, *pair) for pair in pairs for stage in ("rl", "evaluation")]
        runs = [by_key[key] for key in keys if key in by_key]
        needed = {key for job in runs for key in job.needs}
        needed |= {key for other in needed for key in by_key[other].needs}
        needed |= {(name, stage, BASE, None) for stage in ("sft", "evaluation")}
        # The base, and policies that a method starts from or that its guide reads.
        first = [job for key, job in by_key.items() if key in needed and job not in runs]
        for job in [*first, *runs]:
            planned.setdefault(job.key, job)
    return list(planned.values())


class Work(Checkpointable):
    """What a job of submitit's does, once more where it is stopped for its time or for others."""

    def __init__(self, job: jobs.Job) -> None:
        self.function, self.arguments, self.log = job.function, job.arguments, job.log

    def __call__(self) -> int:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as output, contextlib.redirect_stdout(output):
            return jobs.status_of(self.function, self.arguments)


class Watcher(SlurmInfoWatcher):
    """Asks squeue for the states of all jobs of this user, since sacct needs a data base of
    accounts. A job that squeue no longer lists ended minutes ago: its state is "GONE"."""

    def _make_command(self) -> list[str] | None:
        if not self._registered - self._finished:
            return None
        return ["squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%N"]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Return job -> its columns JobID, State and NodeList, of what squeue prints."""
        text = string if isinstance(string, str) else string.decode()
        states = super().read_info(f"JobID|State|NodeList\n{text}") if text.strip() else {}
        gone = {job: {"JobID": job, "State": "GONE"} for job in self._registered}
        return {**gone, **states}


class Submitit:
    """Jobs of submitit's: on a SLURM cluster, or with "local" on this machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        cluster, folder = options.executor, paths.build("grids")
        if not LEAST_HOURS <= options.hours < math.inf:
            raise SageError(
                f"--hours {options.hours:g}: a job is warned 90 seconds before its end and takes "
                f"minutes to start: give {LEAST_HOURS:g} or more"
            )
        # Jobs unpickle what lies there: nobody else may write there.
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        submitit.SlurmJob.watcher = Watcher(delay_s=60)  # and more often at first
        timeouts = {f"{cluster}_max_num_timeout": 50}  # a run goes on from its checkpoint each time
        try:
            self.executor = submitit.AutoExecutor(folder, cluster=cluster, **timeouts)
        except RuntimeError as error:
            raise SageError(f"submitit cannot submit to {cluster}: {error}") from error
        partition = {"slurm_partition": options.partition} if options.partition else {}
        self.executor.update_parameters(timeout_min=round(60 * options.hours), **partition)
        os.environ |= jobs.environment()  # which the jobs inherit
        self.submitted: list[Any] = []

    def start(self, job: Any) -> Any:
        """Submit a job; return submitit's own, which is asked as a future is."""
        compute = job.profile.compute
        cores, gpus = compute.threads, int(compute.requires_gpu)
        self.executor.update_parameters(name=job.run.name, cpus_per_task=cores, gpus_per_node=gpus)
        self.submitted.append(self.executor.submit(Work(job)))
        return self.submitted[-1]

    def end(self) -> None:
        for job in self.submitted:
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


def run_grid(options: argparse.Namespace) -> None:
    """List a grid's runs, or do them."""
    if options.parallel is not None and options.parallel < 1:
        raise SageError(f"--parallel {options.parallel}: give 1 or more runs at a time")
    consent.agree(options.yes)
    blocks = {block.name: block for block in load_grid(options.grid)}
    if unknown := [name for name in options.only if name not in blocks]:
        raise SageError(f"there is no block {unknown[0]!r}: choose one of {', '.join(blocks)}")
    planned = jobs_of([blocks[name] for name in options.only or blocks], options.seeds)
    if unused := sorted(set(options.seeds) - {job.run.seed for job in planned}):
        raise SageError(f"no run of these blocks has the seed {unused[0]}: correct --seeds")
    if options.dry_run:
        for job in planned:
            state = {"taken": "running", "": "to do"}.get(job.state()) or job.remark() or "done"
            print(f"{job.profile.name:<24} {job.run.place:<32} {state}")
        return
    for profile in {job.profile.name: job.profile for job in planned}.values():
        plan.check_settings(profile)
        if options.executor != "slurm":
            stages.check_machine(profile)
        profile_runs = [job.run for job in planned if job.profile.name == profile.name]
        plan.before(profile, profile_runs, options.yes)
    threads = max(job.profile.compute.threads for job in planned)
    cores = (os.cpu_count() or 1) // threads
    parallel = options.parallel or (16 if options.executor == "slurm" else max(1, cores))
    pool = None if options.executor == "processes" else Submitit(options)
    jobs.require(planned, jobs.run(planned, parallel, threads, pool))
