"""Lines of data files. An error names the file, the line and the column."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from sage_lib.errors import SageError

#: The place of a line, such as "amc23.jsonl:2", and its columns.
Line = tuple[str, dict[str, Any]]


def read(name: str, data: bytes) -> list[Line]:
    """Return the lines of a CSV file with a header, or of a file of one JSON object a line."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SageError(f"{name} is not UTF-8 text: save it as UTF-8") from None
    return _csv_lines(name, text) if name.endswith(".csv") else _json_lines(name, text)


def _json_lines(name: str, text: str) -> list[Line]:
    lines = []
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
        lines.append((f"{name}:{number}", row))
    return lines


def _csv_lines(name: str, text: str) -> list[Line]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    lines = []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise csv.Error("another number of columns than in the first line")
            lines.append((f"{name}:{reader.line_num}", row))
    except csv.Error as error:
        raise SageError(
            f"{name}, line {reader.reader.line_num} is not valid CSV ({error}): correct it, with "
            "quotation marks around values with commas"
        ) from None
    return lines


def cell(place: str, row: dict[str, Any], column: str, content: str) -> str:
    """Return the text in a column of a row. ``place`` and ``content`` are as in :func:`text`."""
    content += f" (column {column!r}; there are {', '.join(row)})"
    return text(place, row.get(column), content)


def text(place: str, value: Any, content: str) -> str:
    """Return a value as text without blanks around it.

    SageError where it is empty, with its place and what it is, such as "gold answer" (``content``).
    """
    stripped = "" if value is None else str(value).strip()
    if not stripped or isinstance(value, (dict, list)):
        raise SageError(f"{place}: there is no {content}, which must be a text or a number")
    return stripped
