"""Every published figure and table, drawn again from the published results: nothing is trained.

The notebooks are executed, and their pages write figures/ and the tables of data/published.
"""

import argparse
from collections.abc import Sequence

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import notebooks, runner


def draw(only: Sequence[str] | None, specs: Sequence[str | None]) -> None:
    """Execute notebooks for published profiles (None: for the profile that each names itself), the
    walk's apart; SageError names what failed."""
    every: list[runner.Task] = []
    for spec in specs:
        chosen = [one for one in notebooks.select(only) if one.number not in notebooks.WALK]
        if spec is not None:
            profile = load_profile(spec)
            reading = [one for one in chosen if "profile" in notebooks.parameters(one.path)]
            chosen = [one for one in reading if one.lacks(profile) is None]
            if not chosen:
                raise SageError(f"none of these notebooks shows {spec}: leave --profile out")
        given = {} if spec is None else {"profile": spec}
        for task in notebooks.tasks(chosen, paths.build("figures") / (spec or "own"), given):
            task.key = task.label = f"{task.label}, {spec}" if spec else task.label
            every.append(task)
    runner.require(every, runner.run(every, parallel=2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "for these published profiles, instead of the one that each notebook names"
    parser.add_argument("--profile", nargs="+", default=[None], help=about)
    parser.add_argument("--only", nargs="+", metavar="NN", help="these notebooks alone")


def do(options: argparse.Namespace) -> None:
    draw(options.only, options.profile)
