"""The tables of ``make fire`` in Markdown: what was killed and broken, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from sage_lib import paths
from sage_lib.files import read_json

#: By part: the columns that a page shows, and what it calls them. All rows are shown.
COLUMNS: dict[str, dict[str, str]] = {
    "kills": {
        "stage": "what ran",
        "manner": "killed",
        "progress": "how far it was",
        "orphans": "processes left",
        "resumed": "came to its end",
        "identical": "as undisturbed",
    },
    "faults": {
        "fault": "fault",
        "said": "what was said",
        "resumed": "went on to its end",
        "identical": "as undisturbed",
    },
    "files": {
        "file": "file",
        "tried": "broken copies",
        "taken": "read",
        "refused": "refused",
        "traceback": "tracebacks",
    },
    "profiles": {
        "profile": "profile",
        "change": "each key was",
        "tried": "tried",
        "taken": "taken",
        "refused": "refused",
        "traceback": "tracebacks",
        "silent": "misspelt and taken",
    },
    "answers": {
        "reason": "the verifier said",
        "answers": "answers",
        "credited": "credited",
    },
}
_WORDS = {
    "manner": {"group": "all its processes", "parent": "the first process"},
    "reason": {"verified": "compared, and not equal", "timeout": "no result in time"},
}


def measured(part: str) -> tuple[pd.DataFrame, Mapping]:
    """A part's table and its record. Raises FileNotFoundError where it was never measured."""
    file = paths.BENCHMARKS / f"fire_{part}.csv"
    return pd.read_csv(file, keep_default_na=False), read_json(file.with_suffix(".json"))


def shown(part: str) -> str:
    """A part's table in Markdown, and at which revision and on what machine it was measured."""
    table, record = measured(part)
    columns = COLUMNS[part]
    cells = {name: [_cell(key, one) for one in table[key]] for key, name in columns.items()}
    machine = record["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores"
    said = f"Revision `{record['revision']}`, {where}."
    if part == "kills":
        said = f"{moments(table)} {said}"
    return f"{markdown(pd.DataFrame(cells))}\n\n{said}"


def moments(kills: pd.DataFrame) -> str:
    """How many kills came in the middle of a run, and how far half of them were at the least."""
    middle = kills["progress"] < 1
    return (
        f"{middle.sum()} of {len(kills)} kills came before the run had logged all that it logs, "
        f"half of these at {kills.loc[middle, 'progress'].median():.0%} or later."
    )


def markdown(table: pd.DataFrame) -> str:
    """A table of texts in Markdown, no column wider than it needs."""
    rows = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(str(one) for one in row)} |" for row in rows)


def _cell(column: str, value: object) -> str:
    if column == "progress":
        return f"{float(str(value)):.0%}"
    if value == "" or value is None:
        return "-"
    words = {"True": "yes", "False": "no", **_WORDS.get(column, {})}
    said = words.get(str(value), str(value))
    return said.removeprefix("error: ").replace("|", r"\|")
