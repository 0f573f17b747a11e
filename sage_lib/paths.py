"""Where things lie in a checkout: nothing depends on the working directory."""

import os
from pathlib import Path

#: The checkout: the folder that holds sage_lib/, notebooks/, data/ and figures/.
ROOT = Path(__file__).resolve().parent.parent
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


def results() -> Path:
    """Where a user's own runs keep what they measure and draw: results/, or ``SAGE_RESULTS``."""
    return Path(os.environ.get("SAGE_RESULTS") or ROOT / "results").expanduser().resolve()


def measured(profile: str, published: bool = False) -> Path:
    """Folder of what runs measured: results/measured/<profile>, or data/published/<profile>."""
    return (PUBLISHED if published else results() / "measured") / profile


def figures(profile: str, published: bool = False) -> Path:
    """Folder of figures: results/figures/<profile>, or figures/<profile>."""
    return (FIGURES if published else results() / "figures") / profile


def build(profile: str) -> Path:
    """Folder of what can be made again, such as weights: build/<profile>, or below
    ``SAGE_BUILD``."""
    return Path(os.environ.get("SAGE_BUILD") or ROOT / "build").expanduser().resolve() / profile
