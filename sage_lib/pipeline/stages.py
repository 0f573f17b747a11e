"""The stages of a profile: what is trained and measured, in which order, and one run of each.

A whole stage is done by :mod:`sage_lib.pipeline.jobs`, one run in this process. A run that is
finished from the same settings is kept, and one that was ended goes on from its checkpoint.
"""

import argparse
import os
import pkgutil
import shlex
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

from sage_lib import consent, paths
from sage_lib.errors import SageError
from sage_lib.experiment import records, runs
from sage_lib.experiment.checked import digest
from sage_lib.experiment.profile import BASE, Profile, load_profile
from sage_lib.experiment.runs import STAGES, Run, Stage
from sage_lib.files import AGAIN, FULL, disk_errors, is_full, is_locked, locked, require_space
from sage_lib.pipeline import arguments, jobs, plan


def work_of(stage: str) -> Callable[[Any, Run], Any]:
    """Return the function that does a run of a stage. No other module is imported: that of sft
    imports Unsloth, which on a GPU replaces TRL's classes."""
    function: Callable[[Any, Run], Any] = pkgutil.resolve_name(f"sage_lib.{STAGES[stage].function}")
    return function


class RunJob(jobs.Job):
    """A run as a job."""

    def __init__(self, profile: Profile, stage: Stage, run: Run, needs: Any = frozenset()) -> None:
        key = (profile.name, stage.name, run.method, run.seed)
        arguments = (stage.name, run.name, profile.spec, digest(profile.raw))
        label = label_of(profile, run)
        super().__init__(key, label, make_unless_taken, arguments, run.log, needs, key[:3])
        self.profile, self.stage, self.run, self.live = profile, stage, run, run.live_steps
        if run.stage in ("rl", "replay"):
            self.steps = profile.steps_of(run.method)
        elif run.stage == "sft":
            self.steps = profile.sft.get("max_steps", 0)
        elif run.stage == "evaluation":
            self.steps = profile.evaluation.problems * profile.evaluation.samples

    def state(self) -> str:
        if is_locked(self.run.lock):
            return "taken"
        self.run = self.run.anew()
        return "done" if self.run.done() else ""

    def remark(self) -> str:
        return records.collapse(self.run.record)


def jobs_of(profile: Profile, names: Collection[str]) -> list[RunJob]:
    """Return the runs of some stages in the order in which they are made."""
    by_key: dict[Any, RunJob] = {}
    for stage in [stage for stage in STAGES.values() if stage.name in names]:
        for run in stage.runs(profile):
            pairs = {(run.method, run.seed), (BASE, None)}
            needs = {(profile.name, name, *pair) for name in stage.needs.split() for pair in pairs}
            needs |= {(profile.name, "rl", other.method, other.seed) for other in run.earlier}
            job = RunJob(profile, stage, run, frozenset(needs & by_key.keys()))
            by_key[job.key] = job
    return list(by_key.values())


def run(profile: Profile, *names: str) -> None:
    """Do what is not done of some stages, ``compute.parallel`` runs at a time; raise SageError that
    names what failed once all others are done."""
    planned, compute = jobs_of(profile, names), profile.compute
    jobs.require(planned, jobs.run(planned, compute.parallel, compute.threads))


def label_of(profile: Profile, run: Run) -> str:
    """Name a run in lines of progress: "GRPO, seed 3407 (evaluation)"."""
    if run.name == run.stage:
        return run.name if "+" not in profile.name else f"{run.name} of {profile.name}"
    method = profile.label(run.method)
    label = method if run.seed is None else f"{method}, seed {run.seed}"
    return label if run.stage == "rl" else f"{label} ({run.stage})"


def check_machine(profile: Profile) -> None:
    """Raise SageError where the profile cannot run: no GPU, or no room for its checkpoints."""
    if profile.compute.requires_gpu:
        import torch

        if not torch.cuda.is_available():
            raise SageError(
                f"profile {profile.name} needs a CUDA GPU and none was found: choose smoke or "
                f"laptop, or see: sage-companion dry-run --profile {shlex.quote(profile.spec)}"
            )
    require_space(paths.build(profile.name), plan.disk_gb(profile), f"profile {profile.name}")


def make_unless_taken(stage: str, name: str, spec: str, settings: str) -> int:
    """Do a run in a worker; return BUSY where another process makes it or just made it.

    SageError where the profile no longer has the ``settings`` (their hash) that were planned.
    """
    profile = load_profile(spec)
    if digest(profile.raw) != settings:
        raise SageError(f"profile {profile.name} has changed since this began: call it again")
    run = _named(profile, STAGES[stage], name)
    with locked(run.lock) as is_held:
        if not is_held or run.done():
            return jobs.BUSY
        make(profile, run)
    return 0


def _named(profile: Profile, stage: Stage, name: str) -> Run:
    stage_runs = stage.runs(profile)
    for run in stage_runs:
        if name in (run.name, run.place, run.measured.name):
            return run
    names = ", ".join(run.name for run in stage_runs) or "(it has none)"
    owner = f"the stage {stage.name} of profile {profile.name}"
    raise SageError(f"{owner} has no run {name!r}: choose one of {names}")


def make(profile: Profile, run: Run) -> None:
    """Do a run, whose lock this process holds, unless it is done. Copy a base or a policy that
    another profile made from the same settings."""
    if run.done():
        print(f"{label_of(profile, run)}: already made from the same settings, kept")
        return
    consent.require_all(profile.raw)
    if run.policy is not None:
        runs.finished(profile, run.policy)
    run.prepare()
    if run.stage in ("sft", "rl") and (made := run.made_below()):
        run.take(made)
        print(f"{run.name}: made from the same settings in {made.build}, taken and not trained")
    else:
        _work(profile, run)
        print(f"{label_of(profile, run)}: done")


def _import_unsloth(profile: Profile, run: Run) -> None:
    """Import Unsloth before TRL, where a run trains with it."""
    if run.stage in ("rl", "replay"):
        from sage_lib.algorithm import unsloth_first

        tuned = profile.methods[run.method].rft is not None  # as SFT is
        if unsloth_first.is_installed() if tuned else profile.compute.backend == "unsloth":
            unsloth_first.load_unsloth()


def _work(profile: Profile, run: Run) -> None:
    # One run's compiled code never meets that of another one beside it.
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(run.build / "unsloth_cache")
    import torch

    _import_unsloth(profile, run)
    torch.set_num_threads(profile.compute.threads)
    try:
        with disk_errors():
            work_of(run.stage)(STAGES[run.stage].gets(run), run)
    except SageError:
        raise
    except Exception as error:  # libraries say in many ways that they could not write or read
        if any(is_full(folder) for folder in (run.build, run.measured)):
            raise SageError(FULL) from error
        from sage_lib.policy import loading

        policy = run.policy
        if policy is not None and loading.weights_hash(policy.model) != policy.weights:
            remedy = f"delete {policy.build.name} in the build folder, and {AGAIN}"
            raise SageError(f"the model of {policy.name} is damaged: {remedy}") from error
        raise


def _renamed(stage: str) -> str:
    """Return the name of a stage; ``evaluate`` is accepted for one more release."""
    if stage != "evaluate":
        return stage
    print("the stage evaluate is now called evaluation", file=sys.stderr)
    return "evaluation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "; ".join(f"{stage.name}: {stage.about}" for stage in STAGES.values())
    parser.add_argument("stage", choices=STAGES, type=_renamed, help=about)
    arguments.add_profile(parser)
    parser.add_argument("--run", help="do this run alone, in this process, such as grpo-s3407")


def run_stage(options: argparse.Namespace) -> None:
    """Do a whole stage in workers, or with ``--run`` a single run in this process."""
    profile, stage = arguments.named_profile(options), STAGES[options.stage]
    plan.check_settings(profile)
    check_machine(profile)
    chosen_run = None if options.run is None else _named(profile, stage, options.run)
    rank = int(os.environ.get("RANK", 0))
    if rank == 0:
        planned = stage.runs(profile) if chosen_run is None else [chosen_run]
        plan.before(profile, planned, options.yes)
    if chosen_run is None:
        run(profile, stage.name)
        return
    if rank > 0:  # the first of several processes locks and prepares
        while not chosen_run.done():
            if chosen_run.is_prepared():
                return _work(profile, chosen_run)
            time.sleep(0.1)
        return
    with locked(chosen_run.lock) as is_held:
        if is_held:
            return make(profile, chosen_run)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SageError(f"another process makes {chosen_run.name}: wait for its end, or end it")
    print(f"{label_of(profile, chosen_run)}: another process makes it, waiting", flush=True)
    with locked(chosen_run.lock, wait=True):
        make(profile, _named(profile, stage, options.run))


if __name__ == "__main__":  # accelerate starts several processes of a module
    from sage_lib.pipeline import cli

    cli.main(["stage", *sys.argv[1:]])
