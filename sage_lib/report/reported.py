"""Numbers copied from the two papers, and how this companion differs from them.

data/reported holds a CSV file per printed table, fidelity.csv (paper, the authors' code and this
companion, setting by setting) and items.csv (every figure and table of both papers). Its README
says what the columns are. No run writes there, and tests/test_reported.py checks every line.
"""

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.paths import REPORTED

#: Files that are no tables of numbers.
OTHERS = ("fidelity", "items")


def tables() -> list[str]:
    """Names of the printed tables: report_table3, ..., sage_table9."""
    return sorted(path.stem for path in REPORTED.glob("*.csv") if path.stem not in OTHERS)


def read_table(table: str) -> pd.DataFrame:
    """One printed table, a row per number: columns table, row, dataset, metric, mean, std.

    Units are the paper's (SAGE prints shares of 1, the exploration report percent). std is NaN
    where none is printed. Raises SageError for an unknown table.
    """
    frame = as_printed(table)
    numbers = {name: frame[name].replace("", "nan").astype(float) for name in ("mean", "std")}
    return frame.assign(**numbers)


def as_printed(table: str) -> pd.DataFrame:
    """As :func:`read_table`, with numbers as text: decimals say how a number was rounded."""
    if table not in tables():
        raise SageError(f"there is no reported table {table!r}: choose one of {tables()}")
    return _read(table)


def fidelity() -> pd.DataFrame:
    """What the paper says, what the authors' code does and what is done here, setting by setting:
    columns setting, paper, code, here, why, all text."""
    return _read("fidelity")


def items() -> pd.DataFrame:
    """Every figure and table of both papers: measured here, in part, or reported only, and why."""
    return _read("items")


def _read(name: str) -> pd.DataFrame:
    """A file of data/reported as text."""
    return pd.read_csv(REPORTED / f"{name}.csv", dtype=str, keep_default_na=False)
