"""Numbers copied from the two papers, and how this companion differs from them.

data/reported holds a CSV file per printed table, fidelity.csv (paper, the authors' code and this
companion, setting by setting) and items.csv (every figure and table of both papers). Its README
says what the columns are. No run writes there.
"""

import re

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.paths import REPORTED

COLUMNS = ["table", "row", "dataset", "metric", "mean", "std"]
FIDELITY_COLUMNS = ["setting", "paper", "code", "here", "why"]
ITEM_COLUMNS = ["paper", "item", "shows", "state", "notebooks", "why"]
#: Files that are no tables of numbers.
OTHERS = ("fidelity", "items")
#: What a cell of fidelity.csv says of a source that gives no value.
NOTHING = "nothing"
#: First word of `why` in fidelity.csv -> the sources that must say something.
FOLLOWED = {
    "both": ("paper", "code"),
    "paper": ("paper",),
    "code": ("code",),
    "neither": (),  # another value than the sources have
    "restored": ("paper",),  # a formula that the text copy of the paper lost
    "chosen": (),  # neither source says
}
#: Papers print plain decimals: nothing negative, no nan.
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
#: A value in the column `here`: "rl.beta = 0.05".
_STATED = re.compile(r"([a-z]\w*(?:\.\w+)*) = (.+)")
#: A place in the authors' code: a file, mostly with its lines.
_FILE = r"\w+\.(?:py|yaml|txt)\b"


def tables() -> list[str]:
    """Names of the printed tables: report_table3, ..., sage_table9."""
    return sorted(path.stem for path in REPORTED.glob("*.csv") if path.stem not in OTHERS)


def load(table: str) -> pd.DataFrame:
    """One printed table, a row per number: columns table, row, dataset, metric, mean, std.

    Units are the paper's (SAGE prints shares of 1, the exploration report percent). std is NaN
    where none is printed. Raises SageError for an unknown table and for a damaged file.
    """
    frame = as_printed(table)
    numbers = {name: frame[name].replace("", "nan").astype(float) for name in ("mean", "std")}
    return frame.assign(**numbers)


def as_printed(table: str) -> pd.DataFrame:
    """As :func:`load`, with numbers as text: decimals say how a number was rounded."""
    if table not in tables():
        raise SageError(f"there is no reported table {table!r}: choose one of {tables()}")
    frame = _read(table, COLUMNS)
    labels = frame[["row", "dataset", "metric"]]
    numbers = frame["mean"].str.fullmatch(_NUMBER) & frame["std"].str.fullmatch(f"|{_NUMBER}")
    _require(table, frame["table"].eq(table), "names another table")
    _require(table, labels.ne("").all(axis=1), "has an empty row, dataset or metric")
    _require(table, numbers, "has a mean or std that is no number")
    _require(table, ~labels.duplicated(), "repeats the row, dataset and metric of another line")
    return frame


def fidelity() -> pd.DataFrame:
    """What the paper says, what the authors' code does and what is done here, setting by setting.

    All columns are text. `why` begins with a word of FOLLOWED: whom this companion follows.
    Raises SageError, with the line, where a row contradicts itself.
    """
    name = "fidelity"
    frame = _read(name, FIDELITY_COLUMNS)
    silent = frame[["paper", "code"]].eq(NOTHING)
    word = frame["why"].str.split(":").str[0]
    has_place = silent["code"] | frame["code"].str.contains(_FILE)
    _require(name, frame.ne("").all(axis=1), "has an empty cell")
    _require(name, ~frame["setting"].duplicated(), "repeats a setting")
    _require(name, word.isin(list(FOLLOWED)), f"has a why that begins with none of {[*FOLLOWED]}")
    _require(name, has_place, "names no file of the code")
    chosen = word.eq("chosen") == silent.all(axis=1)
    _require(name, chosen, "must say chosen where, and only where, both sources say nothing")
    for source in ("paper", "code"):
        follows = word.isin([one for one, sources in FOLLOWED.items() if source in sources])
        _require(name, ~(follows & silent[source]), f"follows the {source}, which says nothing")
    keys = frame["here"].map(lambda here: list(stated_values(here))).explode().dropna()
    again = keys.index[keys.duplicated()]
    _require(name, ~frame.index.to_series().isin(again), "states a value that another line states")
    return frame


def items() -> pd.DataFrame:
    """Every figure and table of both papers: measured here, in part, or reported only, and why."""
    return _read("items", ITEM_COLUMNS)


def stated_values(here: str) -> dict[str, str]:
    """The values in a cell of `here`: dotted key of a profile -> its value as YAML.

    Parts are separated by "; "; a part that is not "key = value" is a remark.
    """
    parts = [_STATED.fullmatch(part) for part in here.split("; ")]
    return {found[1]: found[2] for found in parts if found}


def _read(name: str, columns: list[str]) -> pd.DataFrame:
    """A file of data/reported as text."""
    try:
        frame = pd.read_csv(REPORTED / f"{name}.csv", dtype=str, keep_default_na=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise SageError(f"{name}.csv cannot be read: {error}") from None
    if list(frame.columns) != columns or frame.isna().any(axis=None):
        raise SageError(f"{name}.csv: the columns must be {columns}, filled in every line")
    return frame


def _require(name: str, good: pd.Series, fault: str) -> None:
    """SageError with the first line of a file that is not good."""
    if not good.all():
        raise SageError(f"{name}.csv, line {good.to_numpy().argmin() + 2} {fault}")
