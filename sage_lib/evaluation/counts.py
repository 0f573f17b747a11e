"""What an evaluation keeps of each problem: how many samples, and how many of them were what."""

from pathlib import Path

import pandas as pd

from sage_lib.errors import SageError

#: One row per problem. n samples, c of them correct, and how many were cut off by the length limit; on the embedded
#: task also the samples that take the rare way and those whose every step is valid, by way.
COLUMNS = ("dataset", "problem", "n", "c", "truncated", "rare", "valid_common", "valid_rare")


def read(path: Path) -> pd.DataFrame:
    """Read a counts.csv; SageError when it is missing or damaged."""
    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        raise SageError(
            f"{path.parent.name}/{path.name} is missing: run notebook 07 for this profile first"
        ) from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise SageError(
            f"{path.parent.name}/{path.name} cannot be read ({error}): delete the folder and run with --resume"
        ) from None
    if (
        tuple(table.columns) != COLUMNS
        or table[["n", "c"]].isna().any(axis=None)
        or (table["c"] > table["n"]).any()
    ):
        raise SageError(
            f"{path.parent.name}/{path.name} is damaged: delete the folder and run with --resume"
        )
    return table
