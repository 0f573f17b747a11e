"""Numbers copied from the two papers (the tables of data/reported), and where paper, the authors'
code and this companion differ (fidelity.csv). No run writes there."""

import csv
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.paths import REPORTED

COLUMNS = ["table", "row", "dataset", "metric", "mean", "std"]
MISMATCHES = ["row", "metric", "printed", "recomputed", "difference", "tolerance"]
#: What the papers print: plain decimals, nothing negative, no nan.
NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)

#: The file of :func:`fidelity`, the one in data/reported that is not a table of numbers.
FIDELITY = "fidelity"
FIDELITY_COLUMNS = ["setting", "paper", "code", "here", "why"]
#: What a cell says of a source that gives no value.
NOTHING = "nothing"
#: First word of ``why`` -> the columns that must say something: whom this companion follows.
FOLLOWED = {
    "both": ("paper", "code"),
    "paper": ("paper",),
    "code": ("code",),
    "neither": (),  # another value than the sources have
    "restored": ("paper",),  # a formula that the text copy of the paper lost
    "chosen": (),  # neither source says
}
#: A value in the column ``here``: "rl.beta = 0.05".
_STATED = re.compile(r"([a-z]\w*(?:\.\w+)*) = (.+)")
#: A place in the authors' code: a file, mostly with its lines.
_FILE = re.compile(r"\w+\.(py|yaml|txt)\b")


def tables() -> list[str]:
    """Names of the tables that are there: report_table3, ..., sage_table9."""
    return sorted(p.stem for p in REPORTED.glob("*.csv") if p.stem != FIDELITY)


def fidelity() -> pd.DataFrame:
    """Setting by setting: what the paper says (with its place), what the authors' code does (file
    and line), what this companion does, and why.

    Columns: :data:`FIDELITY_COLUMNS`, all of them text. ``why`` begins with a word of
    :data:`FOLLOWED`: "chosen" stands only where both sources say :data:`NOTHING`. ``here`` gives
    values of the profile paper_all, see :func:`stated_values`; data/reported/README.md says at
    which commit the code was read.

    Raises SageError, with the file and line, for a wrong column, an empty cell, a setting or a key
    that is there twice, code without a file, and a ``why`` that its row does not bear out.
    """
    path = REPORTED / f"{FIDELITY}.csv"
    lines = _lines(path, FIDELITY_COLUMNS)
    seen: dict[str, int] = {}
    for number, cells in enumerate(lines, start=2):
        fault = _unfaithful(cells)
        names = [] if fault else [cells[0], *stated_values(cells[3])]
        for name in names:
            if name in seen:
                fault = f"{name} is on line {seen[name]} already"
        if fault:
            raise SageError(f"{path.name}, line {number}: {fault}")
        seen |= dict.fromkeys(names, number)
    return pd.DataFrame(lines, columns=FIDELITY_COLUMNS)


def stated_values(here: str) -> Mapping[str, str]:
    """The values in a cell of the column ``here``: dotted key of a profile -> its value as YAML.

    Parts are separated by "; "; a part that is not "key = value" is a remark.
    """
    parts = [_STATED.fullmatch(part) for part in here.split("; ")]
    return {found[1]: found[2] for found in parts if found}


def _unfaithful(cells: list[str]) -> str:
    """What is wrong with one line of fidelity.csv, or nothing."""
    if len(cells) != len(FIDELITY_COLUMNS):
        return f"{len(cells)} cells instead of {len(FIDELITY_COLUMNS)}"
    line = dict(zip(FIDELITY_COLUMNS, cells, strict=True))
    empty = [column for column, cell in line.items() if not cell.strip()]
    if empty:
        return f"{empty[0]} is empty"
    if line["code"] != NOTHING and not _FILE.search(line["code"]):
        return f"code says {line['code']!r} and names no file"
    followed = line["why"].split(":")[0]
    if followed not in FOLLOWED:
        known = ", ".join(FOLLOWED)
        return f"why begins with {followed!r} instead of one of {known}"
    silent = [column for column in ("paper", "code") if line[column] == NOTHING]
    if (followed == "chosen") != (len(silent) == 2):
        return "why says chosen where, and only where, paper and code both say nothing"
    for column in FOLLOWED[followed]:
        if column in silent:
            return f"why begins with {followed!r}, but {column} says nothing"
    return ""


def load(table: str) -> pd.DataFrame:
    """One table in tidy form, a line per printed number.

    Columns: :data:`COLUMNS`; row is the paper's own label. mean and std are floats in the paper's
    own units (SAGE prints shares of 1, the exploration report percent), std is NaN where the paper
    prints none. data/reported/README.md lists units and sources by table.

    Raises SageError for an unknown table, and, with the file and line, for a wrong column, an empty
    label, a number that is none, or a cell that is there twice.
    """
    frame = _as_printed(table)
    mean, std = frame["mean"].astype(float), frame["std"].replace("", "nan").astype(float)
    return frame.assign(mean=mean, std=std)


def printed_average_mismatches(table: str, tolerance: float | None = None) -> pd.DataFrame:
    """Printed averages ("Avg") that do not follow from the numbers of their row.

    Each is compared with the plain mean of the same row and metric over the data sets; an average
    of metric pass@k (the report's Table 6) covers the whole row, whatever its k. The bound on an
    honest difference: a number printed with d decimals stands for anything within half a unit,
    10**-d / 2, of it; so the mean of n such numbers is known to the mean of their half units, and
    the printed average adds its own half unit. With d decimals throughout that is 10**-d.

    ``tolerance``, in the table's units, takes the place of that bound: 0.0005 finds the averages
    with three decimals that differ from the rounded mean of the numbers as printed.

    Columns: :data:`MISMATCHES`, where difference is printed - recomputed; no lines when every
    average agrees or the table prints none. Computed exactly, so a difference of just the tolerance
    still agrees. Raises SageError as :func:`load` does, and for an average with nothing to average.
    """
    frame = _as_printed(table)
    is_average = frame["dataset"] == "Avg"
    rows = []
    for number, line in frame[is_average].iterrows():
        of_row = frame[(frame["row"] == line["row"]) & ~is_average]
        if line["metric"] != "pass@k":
            of_row = of_row[of_row["metric"] == line["metric"]]
        if of_row.empty:
            raise SageError(
                f"{table}.csv, line {number + 2}: an average of {line['metric']}, "
                f"which {line['row']} does not have"
            )
        printed, cells = line["mean"], list(of_row["mean"])
        recomputed = _mean([Fraction(cell) for cell in cells])
        difference = Fraction(printed) - recomputed
        if tolerance is None:
            bound = _half_unit(printed) + _mean([_half_unit(cell) for cell in cells])
        else:
            bound = Fraction(str(tolerance))
        if abs(difference) > bound:
            numbers = [float(x) for x in (printed, recomputed, difference, bound)]
            rows.append((line["row"], line["metric"], *numbers))
    return pd.DataFrame(rows, columns=MISMATCHES)


def _mean(numbers: list[Fraction]) -> Fraction:
    return sum(numbers, Fraction(0)) / len(numbers)


def _half_unit(printed: str) -> Fraction:
    """Half a unit of the last printed decimal: 1/2000 for 0.950."""
    _, _, decimals = printed.partition(".")
    return Fraction(1, 2 * 10 ** len(decimals))


def _as_printed(table: str) -> pd.DataFrame:
    """The checked file with numbers as text, since floats forget trailing zeros.

    Line i of the frame is line i + 2 of the file.
    """
    if table not in tables():
        known = ", ".join(tables())
        raise SageError(f"there is no reported table {table!r}: choose one of {known}")
    path = REPORTED / f"{table}.csv"
    lines = _lines(path, COLUMNS)
    seen: dict[tuple[str, ...], int] = {}
    for number, cells in enumerate(lines, start=2):
        fault = _fault(table, cells)
        key = tuple(cells[1:4])
        if not fault and key in seen:
            fault = f"{' / '.join(key)} is on line {seen[key]} already"
        if fault:
            raise SageError(f"{path.name}, line {number}: {fault}")
        seen[key] = number
    return pd.DataFrame(lines, columns=COLUMNS)


def _lines(path: Path, columns: list[str]) -> list[list[str]]:
    """The lines of a file below its header, which must be ``columns``."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    if header != columns:
        expected, found = ",".join(columns), ",".join(header)
        raise SageError(f"{path.name}, line 1: the columns must be {expected}, not {found}")
    return lines


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
        missing = column == "std" and cell == ""
        if not missing and not NUMBER.fullmatch(cell):
            return f"{column} is {cell!r}, not a number"
    return ""
