"""Every published figure and table, drawn again from the published results: nothing is trained.

The notebooks are executed, and their pages write figures/ and the tables of data/published.
"""

import argparse
from collections.abc import Sequence

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import jobs, notebooks


def draw(only: Sequence[str] | None, specs: Sequence[str | None]) -> None:
    """Execute notebooks for published profiles (None: for the profile that each names itself), the
    walk's apart; SageError names what failed."""
    planned: list[jobs.Job] = []
    for spec in dict.fromkeys(specs):
        selected = [book for book in notebooks.select(only) if book.number not in notebooks.WALK]
        if spec is not None:
            profile = load_profile(spec)
            readers = [book for book in selected if "profile" in notebooks.parameters(book.path)]
            selected = [book for book in readers if book.lacks(profile) is None]
            if not selected:
                raise SageError(f"none of these notebooks shows {spec}: leave --profile out")
        values = {} if spec is None else {"profile": spec}
        for job in notebooks.jobs_of(selected, paths.build("figures") / (spec or "own"), values):
            job.key = job.label = f"{job.label}, {spec}" if spec else job.label
            planned.append(job)
    jobs.require(planned, jobs.run(planned, parallel=2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "for these published profiles, instead of the one that each notebook names"
    parser.add_argument("--profile", nargs="+", default=[None], help=about)
    parser.add_argument("--only", nargs="+", metavar="NN", help="these notebooks alone")


def run_figures(options: argparse.Namespace) -> None:
    draw(options.only, options.profile)
