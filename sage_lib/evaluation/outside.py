"""Samples of this project and of three others, read from their own files as right or wrong.

A file's format is known by the fields of its lines. A line that cannot be read is kept with its
number and the reason; nothing is filled in.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sage_lib.errors import SageError
from sage_lib.evaluation.outside_formats import FORMATS, Line

KNOWN = (
    "known are lines with dataset, problem, number and correct, lm-evaluation-harness's "
    "samples_*.jsonl, lighteval's details_*.parquet and limit-of-RLVR's .jsonl"
)
#: What is read of a Parquet file; a file has some of them.
_COLUMNS = ["method", "seed", "dataset", "problem", "number", "correct"]
_COLUMNS += ["doc.id", "doc.task_name", "doc.query", "model_response.text", "metric"]


@dataclass(frozen=True)
class Samples:
    """What :func:`read` found.

    frame: a row for each sample; source (the path), seed (of training; -1 where the file has none),
    problem, sample (its number, from 0), correct. unreadable: number of the line, from 1, and why.
    """

    format: str
    frame: pd.DataFrame
    unreadable: list[tuple[int, str]]


def read(
    path: Path, method: str | None = None, metric: str | None = None, filter: str | None = None
) -> Samples:
    """The samples of one file, whatever its format.

    ``method`` picks one of samples.parquet, ``metric`` the verdict where a file has several, and
    ``filter`` one of the harness's. SageError for a file that is not there, damaged or in no known
    format, for one without a readable line, and where a choice is missing.
    """
    lines: list[tuple[int, Line]] = []
    unreadable: list[tuple[int, str]] = []
    known = None
    for place, raw in _rows(path, method):
        try:
            row = json.loads(raw) if isinstance(raw, bytes) else raw
            known = _format(path, row, known)
            lines.append((place, FORMATS[known][1](row)))
        except (ValueError, RecursionError) as error:
            damaged = isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError)
            unreadable.append((place, f"is not JSON ({error})" if damaged else str(error)))
    if known is None:
        first = "it is empty" if not unreadable else "line {} {}".format(*unreadable[0])
        raise SageError(f"{path.name} is in no known format ({first}): {KNOWN}")
    chosen = _choice(path, "filter", (line.filter for _, line in lines), filter)
    every = (name for _, line in lines for name in line.verdicts)
    judge = _choice(path, "metric", every, metric)
    found: list[Line] = []
    seen: dict[tuple[int, str, int | None], int] = {}
    for place, line in lines:
        if line.filter != chosen:
            continue
        verdicts = line.verdicts.get(judge, f"has no {judge}")
        before = seen.setdefault((line.seed, line.problem, line.number), place)
        if isinstance(verdicts, str):
            unreadable.append((place, verdicts))
        elif before != place:
            unreadable.append((place, f"repeats what line {before} has of {line.problem}"))
        else:
            found.append(line)
    unreadable.sort()
    if not found:
        first = "line {} {}".format(*unreadable[0])
        raise SageError(f"{path.name} has no line that can be read: {first}")
    verdicts_of = [line.verdicts[judge] for line in found]
    sizes = [len(verdicts) for verdicts in verdicts_of]
    starts = [line.number or 0 for line in found]
    frame = pd.DataFrame(
        {
            "source": str(path),
            "seed": np.repeat([line.seed for line in found], sizes),
            "problem": np.repeat([line.problem for line in found], sizes),
            "sample": [i + start for start, n in zip(starts, sizes, strict=True) for i in range(n)],
            "correct": [bool(one) for verdicts in verdicts_of for one in verdicts],
        }
    )
    return Samples(known, frame, unreadable)


def _rows(path: Path, method: str | None) -> Iterator[tuple[int, Any]]:
    """Number and content of each line (bytes) or row of a table (a dict)."""
    if path.is_dir():
        raise SageError(f"{path} is a folder: name the file in it that has the samples")
    try:
        with path.open("rb") as file:
            start = file.read(4)
        if start == b"PAR1":
            yield from enumerate(_table(path, method), 1)
            return
        if method is not None:
            raise SageError(f"{path.name} has no methods: leave out :{method}")
        with (gzip.open if start[:2] == b"\x1f\x8b" else open)(path, "rb") as lines:
            yield from enumerate(lines, 1)
    except FileNotFoundError:
        raise SageError(f"{path} is not there: check the path") from None
    except (OSError, EOFError, zlib.error, ValueError, pa.ArrowException) as error:
        said = " ".join(str(error).split())
        raise SageError(f"{path.name} cannot be read ({said}): copy it again") from None


def _table(path: Path, method: str | None) -> list[dict[str, Any]]:
    """The rows of a Parquet file, of one method where it has several."""
    table = pq.ParquetFile(path).read(columns=_COLUMNS)
    if not any(fields <= set(table.column_names) for fields, _ in FORMATS.values()):
        raise SageError(f"{path.name} is in no known format: {KNOWN}")
    own = pc.cast(table["method"], pa.string()) if "method" in table.column_names else pa.array([])
    methods = [str(name) for name in own.unique().to_pylist()]
    if method is not None and method not in methods:
        listed = f"it has {_some(methods)}" if methods else "it has no methods"
        raise SageError(f"{path.name} has no method {method}: {listed}")
    if method is None and len(methods) > 1:
        raise SageError(f"choose a method, as in {path.name}:{methods[0]}, of {_some(methods)}")
    rows: list[dict[str, Any]] = (
        table if method is None else table.filter(pc.equal(own, method))
    ).to_pylist()
    return rows


def _format(path: Path, row: Any, known: str | None) -> str:
    """The format whose fields a line has. ValueError where fields are missing."""
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, not an object with fields")
    found = [name for name, (fields, _) in FORMATS.items() if fields <= row.keys()]
    several = sorted({*found, *([known] if known else [])})
    if found and len(several) > 1:
        raise SageError(f"{path.name} has the fields of {' and '.join(several)}: split it in two")
    if found:
        return found[0]
    if known is None:
        raise ValueError("has the fields of no format")
    lacking = sorted(FORMATS[known][0] - row.keys())
    raise ValueError(f"has no {' and no '.join(lacking)}")


def _choice(path: Path, kind: str, names: Iterable[str], wanted: str | None) -> str:
    """The one name that there is, or the wanted one."""
    there = list(dict.fromkeys(names))
    if len(there) <= 1 and (wanted is None or not there or there == [""]):
        return there[0] if there else ""
    if wanted not in there:
        raise SageError(f"{path.name}: choose a {kind} by --{kind}, one of {_some(there)}")
    return wanted


def _some(names: list[str], most: int = 8) -> str:
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])
