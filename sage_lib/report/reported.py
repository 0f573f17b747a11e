"""Numbers copied from the two papers, and the differences of this companion from them.

data/reported has a CSV file per printed table, fidelity.csv (paper, the authors' code and this
companion, setting by setting) and items.csv (all figures and tables of both papers). Its README
describes the columns. No run writes there, and tests/test_reported.py checks all lines.
"""

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.paths import REPORTED


def tables() -> list[str]:
    """Return the names of the printed tables: report_table3, ..., sage_table9."""
    return sorted({path.stem for path in REPORTED.glob("*.csv")} - {"fidelity", "items"})


def read_table(table: str) -> pd.DataFrame:
    """Return a printed table, a row per number: columns table, row, dataset, metric, mean, std.

    Units are the paper's (SAGE prints shares of 1, the exploration report percent). std is NaN
    where none is printed. SageError for an unknown table.
    """
    frame = as_printed(table)
    numbers = {name: frame[name].replace("", "nan").astype(float) for name in ("mean", "std")}
    return frame.assign(**numbers)


def as_printed(table: str) -> pd.DataFrame:
    """Return a table of :func:`read_table` with numbers as text: decimals show the rounding."""
    if table not in tables():
        raise SageError(f"there is no reported table {table!r}: choose one of {tables()}")
    return _read(table)


def fidelity() -> pd.DataFrame:
    """Return each setting in the paper, in the authors' code and here, and why, as text."""
    return _read("fidelity")


def items() -> pd.DataFrame:
    """Return all figures and tables of both papers: measured, in part or only reported, and why."""
    return _read("items")


def _read(name: str) -> pd.DataFrame:
    """Read a file of data/reported as text."""
    return pd.read_csv(REPORTED / f"{name}.csv", dtype=str, keep_default_na=False)
