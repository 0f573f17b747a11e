"""Where things lie in a checkout. Every other module asks here, so nothing depends on the working
directory."""

import os
from pathlib import Path

#: The checkout: the folder that holds sage_lib/, notebooks/, data/ and figures/.
ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
#: Numbers copied from the papers. Never written by a run.
REPORTED = ROOT / "data" / "reported"
#: Results of sage-companion bench, kept with the code that made them.
BENCHMARKS = ROOT / "data" / "measured" / "benchmarks"
DETECTORS = ROOT / "data" / "measured" / "detectors" / "precision.csv"
PROFILES = Path(__file__).resolve().parent / "experiment" / "profiles"
GRIDS = Path(__file__).resolve().parent / "experiment" / "grids"


def results() -> Path:
    """Where data/measured and figures are kept: the checkout, unless the environment variable
    ``SAGE_RESULTS`` moves them."""
    return Path(os.environ.get("SAGE_RESULTS", ROOT)).expanduser().resolve()


def measured(profile: str) -> Path:
    """Folder of the numbers that runs of ``profile`` measured (data/measured/<profile>)."""
    return results() / "data" / "measured" / profile


def published(grid: str) -> Path:
    """Folder of the committed results of a grid (data/published/<grid>), a folder per profile."""
    return ROOT / "data" / "published" / grid


def figures(profile: str) -> Path:
    """Folder of the figures drawn from the measured numbers of ``profile`` (figures/<profile>)."""
    return results() / "figures" / profile


def build(profile: str) -> Path:
    """Folder of everything that can be rebuilt and is never committed: weights, checkpoints,
    executed notebooks.

    The environment variable ``SAGE_BUILD`` moves it off the checkout, to a larger disk for
    instance."""
    return Path(os.environ.get("SAGE_BUILD", ROOT / "build")).expanduser().resolve() / profile
