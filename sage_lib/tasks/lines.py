"""Lines of data files, with what is wrong in them said by file, line and column."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from sage_lib.errors import SageError

#: Where a line stands ("amc23.jsonl:2"), and its columns.
Line = tuple[str, dict[str, Any]]


def json_lines(name: str, data: bytes, remedy: str = "correct or delete it") -> list[Line]:
    """The JSON objects of a file, one a line; empty lines are skipped."""
    found = []
    for number, text in enumerate(_decoded(name, data).split("\n"), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):  # also numbers and depths that no parser holds
            raise SageError(
                f"{name}, line {number} is not valid JSON (half-written?): {remedy}"
            ) from None
        if not isinstance(row, dict):
            raise SageError(f"{name}, line {number} is no JSON object with named columns: {remedy}")
        found.append((f"{name}:{number}", row))
    return found


def csv_lines(name: str, data: bytes) -> list[Line]:
    """The rows of a CSV file whose first line names the columns; values are texts."""
    reader = csv.DictReader(io.StringIO(_decoded(name, data), newline=""), strict=True)
    found = []
    try:
        for row in reader:
            where = f"{name}:{reader.line_num}"
            if None in row or None in row.values():
                raise SageError(
                    f"{where} has another number of columns than the first line: "
                    "put quotation marks around values with commas"
                )
            found.append((where, row))
    except csv.Error as error:
        number = reader.reader.line_num
        raise SageError(
            f"{name}, line {number} is not valid CSV ({error}): correct or delete it"
        ) from None
    return found


def column(where: str, row: dict[str, Any], name: str) -> Any:
    """The value of a column; SageError where the line has no such column."""
    if name not in row:
        raise SageError(f"{where}: the column {name!r} is missing; it has {', '.join(row)}")
    return row[name]


def text(where: str, value: Any, what: str) -> str:
    """``value`` as text without blanks around it; SageError where nothing is left."""
    if isinstance(value, (dict, list)):
        raise SageError(f"{where}: the {what} must be a text or a number, not {value!r}")
    found = "" if value is None else str(value).strip()
    if not found:
        raise SageError(f"{where}: there is no {what}")
    return found


def new_id(where: str, identity: str, seen: set[str]) -> None:
    """Add an id to those seen; SageError where it is among them."""
    if identity in seen:
        raise SageError(f"{where}: the id {identity} occurs twice")
    seen.add(identity)


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SageError(f"{name} is not UTF-8 text: save it as UTF-8") from None
