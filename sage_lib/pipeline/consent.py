"""What a profile that needs a GPU asks for, said and asked before anything starts; and what would
be refused hours later, refused now."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence

from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.pipeline import gpu_hours, needs, stages

#: A word of the command line.
YES = "--yes"


def before(profile: Profile, every: Sequence[Run], yes: bool, afresh: bool = False) -> None:
    """Of a profile that needs a GPU: refuse what could not be done, and ask whether the runs that
    are not done (all of them ``afresh``) are to be, unless ``yes``. SageError where the answer is
    no, or nobody answers."""
    if profile.published or not profile.compute.requires_gpu:
        return
    left = [run for run in every if afresh or not run.done()]
    check(profile, {run.stage for run in left})
    left = [run for run in left if not _taken(profile, run)]
    if not left:
        return
    words = asked_for(profile, left)
    if yes:
        print(words, flush=True)
    elif not sys.stdin.isatty():
        raise SageError(f"{words}: nobody is here to agree; the same command with {YES} starts it")
    elif input(f"{words}.\nStart? [y/N] ").strip().lower() not in ("y", "yes"):
        raise SageError("nothing was started")


def _taken(profile: Profile, run: Run) -> bool:
    """Whether a run is taken from the profile that this one builds on."""
    return run.stage in ("sft", "rl") and runs.made_below(profile, run, True) is not None


def asked_for(profile: Profile, left: Sequence[Run]) -> str:
    """GPU hours of some runs, with their range, memory and disk: a sentence without its end."""
    assumptions = gpu_hours.assumed((), profile.compute.assume)
    hours = [gpu_hours.of_run(profile, run.stage, run.method, assumptions) for run in left]
    memory, disk = needs.in_all(needs.memory(profile)), needs.disk_gb(profile)
    in_all, low, high = (gpu_hours.rounded(sum(ends)) for ends in zip(*hours, strict=True))
    return (
        f"{len(left)} runs of profile {profile.name} ask for about {in_all} GPU hours ({low} to "
        f"{high}), {memory:.0f} GB of a GPU's memory and {disk:.0f} GB of disk, by estimates that "
        "nobody has timed (sage-companion dry-run has their parts)"
    )


def check(profile: Profile, names: Collection[str]) -> None:
    """SageError for what stages of these names would refuse once they run."""
    optimisers = {str(section.get("optim", "")) for section in (profile.sft, profile.rl)}
    wanted = {
        "vllm": profile.evaluation.engine == "vllm" or bool(profile.rl.get("use_vllm")),
        "bitsandbytes": any("8bit" in optim for optim in optimisers),
    }
    remedies = {"vllm": "make vllm", "bitsandbytes": "make gpu"}
    for package, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(package) is None:
            raise SageError(
                f"profile {profile.name} uses the package {package}, which is missing: "
                f"{remedies[package]} installs it"
            )
    if "replay" in names and profile.compute.backend == "unsloth":
        raise SageError(runs.NOT_WATCHED)
    if {"sft", "rl", "replay"} & set(names):
        rehearse(profile)


def rehearse(profile: Profile) -> None:
    """Make every method's trainer on a tiny model, in a process of its own: SageError with the
    reason of the first that cannot be made."""
    with tempfile.TemporaryDirectory() as folder:
        own = {**stages.environment(), "UNSLOTH_COMPILE_LOCATION": folder}
        words = [sys.executable, "-m", "sage_lib.training.rehearsal", profile.spec]
        done = subprocess.run(words, env=own, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it was ended"])[-1]
        raise SageError(f"profile {profile.name}: {last.removeprefix('error: ')}")
