"""Make all runs of a profile, execute the notebooks on them, and compare with what is published.

The notebooks that train models of their own (04 to 07), and those of the theory, need no run: they
go on beside the runs. What ended before its end goes on with --resume.
"""

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.run import put_aside
from sage_lib.experiment.runs import STAGES
from sage_lib.files import is_locked
from sage_lib.pipeline import arguments, compare, jobs, notebooks, plan, stages


def reproduce(
    profile: Profile, only: Sequence[str] | None = None, resume: bool = False, yes: bool = False
) -> None:
    """Make the runs, execute the notebooks, print the closing table and the comparison; SageError
    names what failed. ``only`` these notebooks: what is done of the runs is kept."""
    selected = notebooks.select(only)
    plan.check_settings(profile)
    stages.check_machine(profile)
    afresh = not resume and not only
    planned = stages.jobs_of(profile, STAGES)
    plan.before(profile, [job.run for job in planned], yes, afresh)
    if afresh:
        _start_afresh(profile)
    begun, folder = time.monotonic(), paths.build(profile.name) / "notebooks"
    lacking = {book.name: book.lacks(profile) for book in selected}
    shown = [book for book in selected if lacking[book.name] is None]
    values = {"profile": profile.spec, "own_results": True}
    shows = notebooks.jobs_of(shown, folder, values, frozenset(job.key for job in planned))
    # The walk first: it is the longest of all that wait for nothing.
    walk = [job for job in shows if job.label[:2] in notebooks.WALK]
    ordered = [*walk, *planned, *(job for job in shows if job not in walk)]
    outcomes = jobs.run(ordered, profile.compute.parallel, profile.compute.threads)
    rows = [(name, 0.0, f"no {what} in {profile.name}") for name, what in lacking.items() if what]
    rows += [(job.label, outcomes[job.key].seconds, outcomes[job.key].state) for job in shows]
    # Of everything, which is less than the sum where some ran beside each other.
    rows = [*sorted(rows), ("in all", time.monotonic() - begun, "")]
    table = pd.DataFrame(rows, columns=["notebook", "seconds", "state"])
    print(f"\n{plan.text(table)}", flush=True)
    try:
        compare.show(profile)
    except SageError as error:  # there is nothing to compare with
        print(f"\n{error}", flush=True)
    jobs.require(ordered, outcomes, "; what was made is kept, and --resume goes on")


def _start_afresh(profile: Profile) -> None:
    """Put what an earlier run built aside: it is not deleted."""
    folder = paths.build(profile.name)
    _require_unlocked(profile, folder)
    if folder.is_dir() and any(folder.iterdir()):
        old = put_aside(folder)
        try:
            _require_unlocked(profile, old)  # by a process that started in between
        except SageError:
            with contextlib.suppress(OSError):  # where that process has made the folder anew
                old.rename(folder)
            raise
        print(f"the earlier build of {profile.name} is now {old.name} (--resume goes on with one)")


def _require_unlocked(profile: Profile, folder: Path) -> None:
    if any(is_locked(lock) for lock in folder.rglob("*.lock")):
        what = f"another process works in the build folder of {profile.name}"
        raise SageError(f"{what}: end it first, or share its work with --resume")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_profile(parser)
    about = "numbers of the notebooks to execute; implies --resume"
    parser.add_argument("--only", nargs="+", metavar="NN", help=about)
    about = "go on with what an earlier run built instead of starting from nothing"
    parser.add_argument("--resume", action="store_true", help=about)


def run_reproduce(options: argparse.Namespace) -> None:
    reproduce(arguments.named_profile(options), options.only, options.resume, options.yes)
