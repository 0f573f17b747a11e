"""The words that several commands share."""

import argparse
import re

from sage_lib import consent
from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile, load_profile


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that :func:`named_profile` reads."""
    about = "a profile's name, or the path of a .yaml file; smoke where none is given"
    parser.add_argument("--profile", default="smoke", help=about)
    about = "change one setting, as in --set rl.beta=0.1: a variant with a folder of its own"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    add_yes(parser)


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--yes``, which answers :func:`plan.before` and :mod:`sage_lib.consent`."""
    about = "agree without being asked: to hours of a GPU, and to code that the profile names"
    parser.add_argument("--yes", action="store_true", help=about)


def named_profile(options: argparse.Namespace) -> Profile:
    """Load the profile that a command line names, with its changed settings."""
    consent.agree(options.yes)
    for change in options.set:
        if not re.match(r"[A-Za-z_][\w.-]*=", change):
            raise SageError(f"--set {change}: a change is KEY=VALUE, as in --set rl.beta=0.1")
    return load_profile("+".join([options.profile, *options.set]))
