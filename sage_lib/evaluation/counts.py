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
    try:
        records.require_whole(path)
        table = pd.read_csv(path)
    except FileNotFoundError:
        raise SageError(
            f"{place} is missing: run notebook 23 for this profile, "
            "or sage-companion stage evaluate"
        ) from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise SageError(
            f"{place} cannot be read ({said}): delete its folder and run with --resume"
        ) from None
    missing = [column for column in COLUMNS if column not in table]
    numbers = [column for column in COLUMNS[2:] if column not in missing]
    words = any(not pd.api.types.is_numeric_dtype(table[column]) for column in numbers)
    if (
        missing
        or words
        or table[["n", "c"]].isna().any(axis=None)
        or (table["c"] > table["n"]).any()
    ):
        raise SageError(f"{place} is damaged: delete its folder and run with --resume")
    return table
