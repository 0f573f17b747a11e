"""Numbers copied from the two papers (data/reported/*.csv). No run writes there, and nothing measured is kept there."""

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.paths import REPORTED

COLUMNS = ["table", "row", "dataset", "metric", "mean", "std"]


def tables() -> list[str]:
    """Names of the tables that are there: sage_table1, ..., report_table6."""
    return sorted(p.stem for p in REPORTED.glob("*.csv"))


def load(table: str) -> pd.DataFrame:
    """One table in tidy form, a row per printed number (columns :data:`COLUMNS`), in the paper's units.

    Raises SageError for an unknown table, a missing column, a cell printed twice, or a mean that is no number.
    """
    if table not in tables():
        raise SageError(f"there is no reported table {table!r}: choose one of {', '.join(tables())}")
    frame = pd.read_csv(REPORTED / f"{table}.csv", dtype={c: str for c in COLUMNS[:4]})
    if list(frame.columns) != COLUMNS:
        raise SageError(f"{table}.csv must have the columns {', '.join(COLUMNS)}: restore it from the repository")
    twice = frame.duplicated(COLUMNS[:4])
    if twice.any() or not pd.api.types.is_numeric_dtype(frame["mean"]) or frame["mean"].isna().any():
        raise SageError(f"{table}.csv holds a cell twice or a mean that is no number: restore it from the repository")
    return frame


def printed_average_mismatches(table: str, decimals: int) -> pd.DataFrame:
    """Printed averages ("Avg") that are not the rounded mean of their row as printed.

    Columns: row, metric, printed, recomputed, rounding_explains. The numbers of a row are themselves rounded to
    ``decimals`` places, so their mean is known to half a unit of the last place and the printed average adds another
    half: up to one unit, rounding explains the difference. Report Table 6 averages pass@8 and pass@4 together.
    """
    frame = load(table)
    average = frame["dataset"] == "Avg"
    found = []
    for (row, metric), printed in frame[average].groupby(["row", "metric"], sort=False)["mean"].first().items():
        same = (frame["row"] == row) & ~average & ((frame["metric"] == metric) | (metric == "pass@k"))
        recomputed = frame.loc[same, "mean"].mean()
        unit, difference = 10.0**-decimals, abs(recomputed - printed)
        if difference > unit / 2 + 1e-9:
            found.append((row, metric, printed, round(recomputed, decimals + 2), difference <= unit + 1e-9))
    return pd.DataFrame(found, columns=["row", "metric", "printed", "recomputed", "rounding_explains"])
