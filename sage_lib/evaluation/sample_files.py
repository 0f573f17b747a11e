"""Samples of this project and of three others, read from their own files as right or wrong.

The fields of its lines tell a file's format. A line that cannot be read is listed with its number
and the reason; nothing is filled in. A reader of a line raises ValueError, whose text continues
"line 3 ...". These sources write the formats of other projects:

- lm-evaluation-harness 0.4, ``samples_*.jsonl``: lm_eval/evaluator.py (the fields),
  lm_eval/loggers/evaluation_tracker.py (the file), lm_eval/filters/selection.py (repeats)
- lighteval 0.13, ``details_*.parquet``: src/lighteval/logging/info_loggers.py (the fields) and
  evaluation_tracker.py (the file), src/lighteval/metrics/metrics_sample.py (AvgAtN, PassAtK)
- limit-of-RLVR, ``.jsonl``: math/examples/math_eval/math_eval.py and evaluate.py
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sage_lib.errors import SageError
from sage_lib.experiment.checked import digest

KNOWN = (
    "known are lines with dataset, problem, number and correct, lm-evaluation-harness's "
    "samples_*.jsonl, lighteval's details_*.parquet and limit-of-RLVR's .jsonl"
)
#: Columns that are read of a Parquet file; a file has some of them.
_COLUMNS = ["method", "seed", "dataset", "problem", "number", "correct"]
_COLUMNS += ["doc.id", "doc.task_name", "doc.query", "model_response.text", "metric"]


@dataclass(frozen=True)
class SampleFile:
    """The samples of a file.

    frame: a row for each sample, with source (the path), seed (of training; -1 where the file has
    none), problem, sample (its number, from 0) and correct.
    unreadable: for each line that cannot be read its number, from 1, and the reason.
    """

    format: str
    frame: pd.DataFrame
    unreadable: list[tuple[int, str]]


def read_sample_file(
    path: Path, method: str | None = None, metric: str | None = None, filter: str | None = None
) -> SampleFile:
    """Read the samples of a file in any of the FORMATS.

    Args:
        path: of the file.
        method: of samples.parquet.
        metric: that says which samples are correct, where a file has several.
        filter: of lm-evaluation-harness, where a file has several.

    Returns:
        The samples. SageError for a file that is not there, damaged or in no known format, without
        a readable line, or with a choice that is missing.
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
    filter = _choice(path, "filter", (line.filter for _, line in lines), filter)
    metrics = (name for _, line in lines for name in line.is_correct)
    metric = _choice(path, "metric", metrics, metric)
    readable: list[Line] = []
    seen: dict[tuple[int, str, int | None], int] = {}
    for place, line in lines:
        if line.filter != filter:
            continue
        is_correct = line.is_correct.get(metric, f"has no {metric}")
        before = seen.setdefault((line.seed, line.problem, line.number), place)
        if isinstance(is_correct, str):
            unreadable.append((place, is_correct))
        elif before != place:
            unreadable.append((place, f"repeats what line {before} has of {line.problem}"))
        else:
            readable.append(line)
    unreadable.sort()
    if not readable:
        first = "line {} {}".format(*unreadable[0])
        raise SageError(f"{path.name} has no line that can be read: {first}")
    by_line = [line.is_correct[metric] for line in readable]
    sizes = [len(of_line) for of_line in by_line]
    starts = [line.number or 0 for line in readable]
    frame = pd.DataFrame(
        {
            "source": str(path),
            "seed": np.repeat([line.seed for line in readable], sizes),
            "problem": np.repeat([line.problem for line in readable], sizes),
            "sample": [i + start for start, n in zip(starts, sizes, strict=True) for i in range(n)],
            "correct": [bool(of_sample) for of_line in by_line for of_sample in of_line],
        }
    )
    return SampleFile(known, frame, unreadable)


def _rows(path: Path, method: str | None) -> Iterator[tuple[int, Any]]:
    """Yield number and content of each line (bytes) or row of a table (a dict)."""
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
    """Return the rows of a Parquet file, of a method where it has several."""
    table = pq.ParquetFile(path).read(columns=_COLUMNS)
    if not any(fields <= set(table.column_names) for fields, _ in FORMATS.values()):
        raise SageError(f"{path.name} is in no known format: {KNOWN}")
    column = pa.array([])
    if "method" in table.column_names:
        column = pc.cast(table["method"], pa.string())
    methods = [str(name) for name in column.unique().to_pylist()]
    if method is not None and method not in methods:
        listed = f"it has {_some(methods)}" if methods else "it has no methods"
        raise SageError(f"{path.name} has no method {method}: {listed}")
    if method is None and len(methods) > 1:
        raise SageError(f"choose a method, as in {path.name}:{methods[0]}, of {_some(methods)}")
    rows: list[dict[str, Any]] = (
        table if method is None else table.filter(pc.equal(column, method))
    ).to_pylist()
    return rows


def _format(path: Path, row: Any, known: str | None) -> str:
    """Return the format whose fields a line has. ValueError where fields are missing."""
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, not an object with fields")
    formats = [name for name, (fields, _) in FORMATS.items() if fields <= row.keys()]
    several = sorted({*formats, *([known] if known else [])})
    if formats and len(several) > 1:
        raise SageError(f"{path.name} has the fields of {' and '.join(several)}: split it in two")
    if formats:
        return formats[0]
    if known is None:
        raise ValueError("has the fields of no format")
    lacking = sorted(FORMATS[known][0] - row.keys())
    raise ValueError(f"has no {' and no '.join(lacking)}")


def _choice(path: Path, kind: str, names: Iterable[str], wanted: str | None) -> str:
    """Return the only name, or the wanted name."""
    there = list(dict.fromkeys(names))
    if len(there) <= 1 and (wanted is None or not there or there == [""]):
        return there[0] if there else ""
    if wanted not in there:
        raise SageError(f"{path.name}: choose a {kind} by --{kind}, one of {_some(there)}")
    return wanted


def _some(names: list[str], most: int = 8) -> str:
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


# --- a line of each format ------------------------------------------------------------------------

#: Fields of a harness line that are no metric: evaluator.py; older files have no list "metrics".
_HARNESS = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"),
    *("doc_hash", "prompt_hash", "target_hash"),
}

#: Its writer prints what JSON does not know, such as NumPy's bools (handle_non_serializable in
#: lm_eval/utils.py).
_PRINTED = {"True": True, "False": False, "1.0": True, "0.0": False}


@dataclass(frozen=True)
class Line:
    """A line of a file.

    is_correct: by metric a truth value for each sample, or the reason why there is none.
    number: of the sample, where a line is a sample.
    """

    problem: str
    is_correct: dict[str, list[bool] | str]
    filter: str = ""
    seed: int = -1
    number: int | None = None


def _field(row: dict[str, Any], name: str, kind: type) -> Any:
    if name not in row:
        raise ValueError(f"has no {name}")
    if not isinstance(row[name], kind):
        raise ValueError(f"has a {name} that is a {type(row[name]).__name__}")
    return row[name]


def _truth(value: Any, name: str) -> bool:
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise ValueError(f"has {value!r:.40} for {name}, not 0 or 1")
    return bool(value)


def _own_line(row: dict[str, Any]) -> Line:
    if "correct" not in row:
        name = "samples.jsonl.gz"
        raise ValueError(f"does not say which samples are correct: give the evaluation's {name}")
    right, texts = _field(row, "correct", list), _field(row, "completions", list)
    if len(right) != len(texts):
        raise ValueError(f"has {len(texts)} completions and {len(right)} truth values")
    problem = f"{_field(row, 'dataset', str)}/{_field(row, 'problem', str)}"
    return Line(problem, {"": [_truth(value, "correct") for value in right]})


def _own_row(row: dict[str, Any]) -> Line:
    problem = f"{_field(row, 'dataset', str)}/{_field(row, 'problem', str)}"
    seed = -1 if row.get("seed") is None else _field(row, "seed", int)
    is_correct = [_truth(row["correct"], "correct")]
    return Line(problem, {"": is_correct}, seed=seed, number=_field(row, "number", int))


def _rlvr(row: dict[str, Any]) -> Line:
    """Read a question with a score for each pred. evaluate.py scores a timeout as False."""
    scores, preds = _field(row, "score", list), _field(row, "pred", list)
    if len(scores) != len(preds):
        raise ValueError(f"has {len(preds)} preds and {len(scores)} scores")
    problem = f"{_field(row, 'idx', int)}:{digest(_field(row, 'question', str))}"
    return Line(problem, {"": [_truth(score, "score") for score in scores]})


def _harness(row: dict[str, Any]) -> Line:
    """Read a problem under a filter.

    With repeats a metric is a number for all responses. Only the share of right responses, pass@1,
    says how many are right (tasks/humaneval/utils.py, mbpp).
    """
    responses, filtered = _field(row, "resps", list), _field(row, "filtered_resps", list)
    if not (responses and filtered and isinstance(responses[0], list)):
        raise ValueError("has no responses")
    repeats = len(responses[0])

    def truths(name: str) -> list[bool]:
        value = row.get(name)
        value = _PRINTED.get(value, value) if isinstance(value, str) else value
        if repeats == 1:
            return [_truth(value, name)]
        if name in ("pass@1", "pass_at_1") and isinstance(filtered[0], list):
            return _shared(value, name, len(filtered[0]))
        raise ValueError(
            f"has one {name} for {repeats} responses: evaluate with the metric pass@1, or "
            "with repeats: 1 several times, and join the files by +"
        )

    names = [name for name in row if name not in _HARNESS]
    if "metrics" in row:
        names = [str(name) for name in _field(row, "metrics", list)]
    doc_hash = str(row.get("doc_hash", ""))[:8]
    problem = f"{_field(row, 'doc_id', int)}:{doc_hash}"
    return Line(problem, _by_metric(names, truths), str(row.get("filter", "")))


def _lighteval(row: dict[str, Any]) -> Line:
    """Read a problem with its texts.

    Details do not say which texts are right. But avg@n, and pass@k with k = 1, are the share of
    right texts among the first n (metrics_sample.py).
    """
    doc, metrics = _field(row, "doc", dict), _field(row, "metric", dict)
    texts = _field(_field(row, "model_response", dict), "text", list)

    def truths(name: str) -> list[bool]:
        kind, _, options = name.partition(":")
        numbers = {key: int(number) for key, number in re.findall(r"(\w+)=(\d+)", options)}
        n = numbers.get("n", len(texts))
        if n > len(texts):
            raise ValueError(f"has {len(texts)} texts, fewer than {name} tells of")
        if kind == "avg@n" or (kind.endswith("pass@k") and numbers.get("k") == 1):
            return _shared(metrics[name], name, n)
        if len(texts) <= 1:  # none where a choice was scored
            return [_truth(metrics[name], name)]
        raise ValueError(
            f"has one {name} for {len(texts)} texts: evaluate with the metric avg@n, or pass@k "
            "with k = 1"
        )

    name = f"{_field(doc, 'task_name', str)}/{doc.get('id', '')}"
    problem = f"{name}:{digest(_field(doc, 'query', str))}"
    return Line(problem, _by_metric(list(metrics), truths))


def _by_metric(
    names: list[str], truths: Callable[[str], list[bool]]
) -> dict[str, list[bool] | str]:
    is_correct: dict[str, list[bool] | str] = {}
    for name in names:
        try:
            is_correct[name] = truths(name)
        except ValueError as error:  # it matters only if this metric is chosen
            is_correct[name] = str(error)
    return is_correct


def _shared(share: Any, name: str, n: int) -> list[bool]:
    """Return truth values of ``n`` samples of which a share is right, in an arbitrary order."""
    right = share * n if isinstance(share, bool | int | float) and 0 <= share <= 1 else np.nan
    if n < 1 or not abs(right - np.round(right)) < 1e-6 * n:
        raise ValueError(f"has {share!r:.40} for {name}, which is no share of {n} samples")
    return [number < round(right) for number in range(n)]


#: Format -> the fields that tell it, and the reader of a line.
FORMATS: dict[str, tuple[set[str], Callable[[dict[str, Any]], Line]]] = {
    "samples of this project": ({"dataset", "problem", "completions"}, _own_line),
    "a sample a line, as published by this project": (
        {"dataset", "problem", "number", "correct"},
        _own_row,
    ),
    "lm-evaluation-harness": ({"doc_id", "resps", "filtered_resps"}, _harness),
    "lighteval": ({"doc", "metric", "model_response"}, _lighteval),
    "limit-of-RLVR": ({"idx", "question", "code", "pred"}, _rlvr),
}
