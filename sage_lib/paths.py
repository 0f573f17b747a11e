"""Folders of a checkout, which do not depend on the working directory. An installed package writes
into the present folder."""

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
#: Folders of the build folder that belong to no profile.
SHARED = (
    *("benchmarks", "data", "figures", "grids", "latest-venv", "models", "outputs"),
    *("site", "site-doctrees", "site-new", "site-source"),
)
PROFILES = Path(__file__).resolve().parent / "experiment" / "profiles"
GRIDS = Path(__file__).resolve().parent / "experiment" / "grids"


def _made_below(name: str, variable: str) -> Path:
    """Return a folder of the checkout or, without a checkout, of the present folder."""
    default = (ROOT if IS_CHECKOUT else Path.cwd()) / name
    return Path(os.environ.get(variable) or default).expanduser().resolve()


def results() -> Path:
    """Return the folder of a user's measurements and figures: results/, or ``SAGE_RESULTS``."""
    return _made_below("results", "SAGE_RESULTS")


def measured(profile: str, published: bool = False) -> Path:
    """Return the folder of measurements: results/measured/<profile>, or
    data/published/<profile>."""
    return (PUBLISHED if published else results() / "measured") / profile


def figures(profile: str, published: bool = False) -> Path:
    """Return the folder of figures: results/figures/<profile>, or figures/<profile>."""
    return (FIGURES if published else results() / "figures") / profile


def build(profile: str) -> Path:
    """Return the folder of files that can be made again, such as weights: build/<profile>, or below
    ``SAGE_BUILD``."""
    return _made_below("build", "SAGE_BUILD") / profile
