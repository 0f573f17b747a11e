"""Numbers copied from the two papers (data/reported/*.csv). No run writes there, and nothing measured is kept there."""

import csv
import re
from decimal import Decimal
from fractions import Fraction

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.paths import REPORTED

COLUMNS = ["table", "row", "dataset", "metric", "mean", "std"]
#: What the papers print: plain decimals, nothing negative, no nan.
NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)


def tables() -> list[str]:
    """Names of the tables that are there: report_table3, ..., sage_table9."""
    return sorted(p.stem for p in REPORTED.glob("*.csv"))


def load(table: str) -> pd.DataFrame:
    """One table in tidy form, a line per printed number.

    Columns: :data:`COLUMNS`; mean and std are floats in the paper's own units (SAGE prints shares of 1, the exploration
    report percent), std is NaN where the paper prints none. data/reported/README.md lists units and sources by table.

    Raises SageError for an unknown table, and, with the file and line, for a wrong column, an empty label, a number that
    is none, or a cell that is there twice.
    """
    frame = _as_printed(table)
    return frame.assign(
        mean=frame["mean"].astype(float), std=frame["std"].replace("", "nan").astype(float)
    )


def printed_average_mismatches(table: str, tolerance: float | None = None) -> pd.DataFrame:
    """Printed averages ("Avg") that do not follow from the numbers of their row.

    Each is compared with the plain mean of the same row and metric over the data sets; an average of metric pass@k (the
    report's Table 6) covers the whole row, whatever its k. The bound on an honest difference: a number printed with d
    decimals stands for anything within half a unit, 10**-d / 2, of it; so the mean of n such numbers is known to the mean
    of their half units, and the printed average adds its own half unit. With d decimals throughout that is 10**-d.

    ``tolerance``, in the table's units, takes the place of that bound: 0.0005 finds the averages with three decimals that
    differ from the rounded mean of the numbers as printed.

    Columns: row, metric, printed, recomputed, difference (printed - recomputed), tolerance; no lines when every average
    agrees or the table prints none. Computed exactly, so a difference of just the tolerance still agrees. Raises
    SageError as :func:`load` does, and for an average with nothing to average.
    """
    frame = _as_printed(table)
    is_average = frame["dataset"] == "Avg"
    found = []
    for line in frame[is_average].itertuples():
        row = frame[(frame["row"] == line.row) & ~is_average]
        cells = (
            row["mean"] if line.metric == "pass@k" else row["mean"][row["metric"] == line.metric]
        )
        if cells.empty:
            raise SageError(
                f"{table}.csv, line {line.Index + 2}: an average of {line.metric}, which {line.row} does not have"
            )
        recomputed = sum(map(Fraction, cells)) / len(cells)
        difference = Fraction(line.mean) - recomputed
        bound = (
            _half_unit(line.mean) + sum(map(_half_unit, cells)) / len(cells)
            if tolerance is None
            else Fraction(str(tolerance))
        )
        if abs(difference) > bound:
            found.append(
                (line.row, line.metric, *map(float, (line.mean, recomputed, difference, bound)))
            )
    return pd.DataFrame(
        found, columns=["row", "metric", "printed", "recomputed", "difference", "tolerance"]
    )


def _half_unit(printed: str) -> Fraction:
    """Half a unit of the last printed decimal: 1/2000 for 0.950."""
    return Fraction(10) ** Decimal(printed).as_tuple().exponent / 2


def _as_printed(table: str) -> pd.DataFrame:
    """The checked file with numbers as text, since floats forget trailing zeros. Line i of the frame is line i + 2 of the file."""
    if table not in tables():
        raise SageError(
            f"there is no reported table {table!r}: choose one of {', '.join(tables())}"
        )
    path = REPORTED / f"{table}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    if header != COLUMNS:
        raise SageError(
            f"{path.name}, line 1: the columns must be {','.join(COLUMNS)}, not {','.join(header)}"
        )
    seen = {}
    for number, cells in enumerate(lines, start=2):
        fault = _fault(table, cells)
        key = tuple(cells[1:4])
        if not fault and seen.setdefault(key, number) != number:
            fault = f"{' / '.join(key)} is on line {seen[key]} already"
        if fault:
            raise SageError(f"{path.name}, line {number}: {fault}")
    return pd.DataFrame(lines, columns=COLUMNS)


def _fault(table: str, cells: list[str]) -> str:
    """What is wrong with one line of a file, or nothing."""
    if len(cells) != len(COLUMNS):
        return f"{len(cells)} cells instead of {len(COLUMNS)}"
    name, *labels, mean, std = cells
    if name != table:
        return f"the table is called {name!r} instead of {table!r}"
    if not all(labels):
        return "row, dataset and metric must not be empty"
    for column, cell in (("mean", mean), ("std", std)):
        if not NUMBER.fullmatch(cell) and not (column == "std" and cell == ""):
            return f"{column} is {cell!r}, not a number"
    return ""
