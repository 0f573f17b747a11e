"""Lines of data files, with what is wrong in them said by file, line and column."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from sage_lib.errors import SageError

#: Where a line stands ("amc23.jsonl:2"), and its columns.
Line = tuple[str, dict[str, Any]]


def read(name: str, data: bytes) -> list[Line]:
    """The lines of a CSV file, whose first names the columns, or the JSON objects, one a line."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SageError(f"{name} is not UTF-8 text: save it as UTF-8") from None
    return _csv_lines(name, text) if name.endswith(".csv") else _json_lines(name, text)


def _json_lines(name: str, text: str) -> list[Line]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # also numbers and depths that no parser holds
            row = None
        if not isinstance(row, dict):
            raise SageError(
                f"{name}, line {number} is not valid JSON with named columns (half-written?): "
                "correct or delete it, or fetch the file again"
            )
        found.append((f"{name}:{number}", row))
    return found


def _csv_lines(name: str, text: str) -> list[Line]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
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
        raise SageError(
            f"{name}, line {reader.reader.line_num} is not valid CSV ({error}): correct it"
        ) from None
    return found


def cell(where: str, row: dict[str, Any], name: str, what: str) -> str:
    """The text in a column; SageError where the column is missing or the text empty."""
    if name not in row:
        raise SageError(f"{where}: the column {name!r} is missing; it has {', '.join(row)}")
    return text(where, row[name], what)


def text(where: str, value: Any, what: str) -> str:
    """``value`` as text without blanks around it; SageError where nothing is left."""
    found = "" if value is None else str(value).strip()
    if not found or isinstance(value, (dict, list)):
        raise SageError(f"{where}: there is no {what}, which must be a text or a number")
    return found


def new_id(where: str, identity: str, seen: set[str]) -> None:
    """Add an id to those seen; SageError where it is among them."""
    if identity in seen:
        raise SageError(f"{where}: the id {identity} occurs twice")
    seen.add(identity)
