"""What an evaluation keeps of each problem: how many samples, and how many of them were what."""

from pathlib import Path

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.experiment import records

#: One row per problem: n samples, c of them correct, and how many the length limit cut off. After
#: these come the counts of what the problem's task measures (``COUNTED``), empty for other tasks.
COLUMNS = ("dataset", "problem", "n", "c", "truncated")


def read(path: Path) -> pd.DataFrame:
    """Read a counts.csv; SageError when it is missing or damaged."""
    place = f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
    if not path.is_file():
        raise SageError(
            f"{place} is missing: run notebook 22 for this profile, "
            "or sage-companion stage evaluate"
        )
    records.require_whole(path)
    try:
        table = pd.read_csv(path)
        numbers = table[[*COLUMNS[2:]]].astype(int)
        whole = (numbers["c"] <= numbers["n"]).all() and {"dataset", "problem"} <= set(table)
    except (ValueError, KeyError):  # pandas' own errors are ValueErrors
        whole = False
    if not whole:
        raise SageError(f"{place} is damaged: delete its folder and run with --resume")
    return table
