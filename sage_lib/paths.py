"""Where things lie. In a checkout nothing depends on the working directory; of an installed package
what is made goes into the present folder."""

import os
from pathlib import Path

#: The checkout: the folder that holds sage_lib/, notebooks/, data/ and figures/.
ROOT = Path(__file__).resolve().parent.parent
#: Whether this is a checkout, and no installed package.
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()
NOTEBOOKS = ROOT / "notebooks"
#: Numbers copied from the papers. Never written by a run.
REPORTED = ROOT / "data" / "reported"
#: Results of make bench, kept with the code that made them.
BENCHMARKS = ROOT / "data" / "published" / "benchmarks"
DETECTORS = ROOT / "data" / "published" / "detectors" / "precision.csv"
#: Published results and their figures, a folder per profile.
PUBLISHED = ROOT / "data" / "published"
FIGURES = ROOT / "figures"
PROFILES = Path(__file__).resolve().parent / "experiment" / "profiles"
GRIDS = Path(__file__).resolve().parent / "experiment" / "grids"


def _own(name: str, variable: str) -> Path:
    """A folder of what is made: of the checkout or, where there is none, the present one."""
    default = (ROOT if IS_CHECKOUT else Path.cwd()) / name
    return Path(os.environ.get(variable, default)).expanduser().resolve()


def results() -> Path:
    """Where a user's own runs keep what they measure and draw: results/, or ``SAGE_RESULTS``."""
    return _own("results", "SAGE_RESULTS")


def measured(profile: str, published: bool = False) -> Path:
    """Folder of what runs measured: results/measured/<profile>, or data/published/<profile>."""
    return (PUBLISHED if published else results() / "measured") / profile


def figures(profile: str, published: bool = False) -> Path:
    """Folder of figures: results/figures/<profile>, or figures/<profile>."""
    return (FIGURES if published else results() / "figures") / profile


def build(profile: str) -> Path:
    """Folder of what can be made again, such as weights: build/<profile>, or below
    ``SAGE_BUILD``."""
    return _own("build", "SAGE_BUILD") / profile
