"""Samples in files of this project and of others, read as counts of right ones.

A file's format is known by the fields of its lines (:mod:`sage_lib.evaluation.sample_lines`). A
line that cannot be read is kept with its number and the reason; nothing is filled in. Blank lines
are skipped.
"""

import fnmatch
import gzip
import hashlib
import io
import json
import math
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sage_lib.errors import SageError
from sage_lib.evaluation.sample_lines import FORMATS, KNOWN, Format, Line
from sage_lib.evaluation.sample_texts import Sample, rows_of_samples, texts

#: The file that stands for the standard input.
STDIN = "-"
#: How the files begin that are no lines of text.
_PARQUET, _ZIP, _GZIP = b"PAR1", b"PK\x03\x04", b"\x1f\x8b"
_ZSTANDARD = 93
#: Bytes, or rows of a table, that a file may have once it is unpacked: a small one can have more
#: than any memory.
LARGEST, MOST_ROWS = 2**32, 10_000_000
#: Errors of damaged files; also of archives with a password, or packed in a way that is not known.
_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    zlib.error,
    zipfile.BadZipFile,
    struct.error,
)


@dataclass(frozen=True)
class SampleFile:
    """What :func:`read_sample_file` found.

    counts: samples and right ones by seed (of training; -1 where the file has none) and problem.
    unreadable: number of the line, from 1, and why. metric: the one that was taken, "" where the
    format has one alone. steps: of training. sha256: of the file. samples: with their texts, where
    those are asked for.
    """

    format: str
    metric: str
    counts: dict[tuple[int, str], tuple[int, int]]
    unreadable: list[tuple[int, str]]
    steps: list[int]
    sha256: str
    samples: list[Sample] = field(default_factory=list, repr=False)


def read_sample_file(
    path: Path,
    method: str | None = None,
    metric: str | None = None,
    filter: str | None = None,
    threshold: float | None = None,
    gold: str | None = None,
    judge: Callable[[str, str], bool] | None = None,
) -> SampleFile:
    """The samples of one file, whatever its format.

    Args:
        path: The file; ``-`` is the standard input.
        method: One of the methods of samples.parquet.
        metric: The verdict, where a file has several.
        filter: One of the filters of lm-evaluation-harness.
        threshold: A score of at least this is right; without it verdicts must be 0 or 1.
        gold: Field of the gold answers, where the format has none. With it texts are read, too.
        judge: Called with gold answer and completion in the place of the file's verdicts.

    Returns:
        Counts by seed and problem, and the lines that could not be read.

    SageError for a file that is not there, damaged or in no known format, for one without a
    readable line, where a choice is missing, and for a threshold that is not finite.
    """
    if threshold is not None and not math.isfinite(threshold):
        raise SageError(f"the threshold must be a number, not {threshold}: give a score")
    data, name = _bytes(path), "the standard input" if str(path) == STDIN else path.name
    lines: list[tuple[int, Line]] = []
    unreadable: list[tuple[int, str]] = []
    format: Format | None = None
    try:
        for number, raw in _rows(data, name, method, gold is not None):
            try:
                row = json.loads(raw) if isinstance(raw, bytes) else raw
                format = _format(name, row, format)
                if gold is None:
                    lines.append((number, format.read(row, threshold)))
                else:
                    of_row = _samples(format, row, threshold, gold, judge)
                    lines += [(number, line) for line in of_row]
            except (ValueError, OverflowError, RecursionError) as error:
                damaged = json.JSONDecodeError | UnicodeDecodeError | RecursionError
                is_json = not isinstance(error, damaged)
                unreadable.append((number, str(error) if is_json else f"is not JSON ({error})"))
    except _DAMAGE as error:
        raise _damaged(name, error) from None
    if format is None:
        first = "it is empty" if not unreadable else "line {} {}".format(*unreadable[0])
        raise SageError(f"{name} is in no known format ({first}): {KNOWN}")
    name_of_filter = _choice(name, "filter", (line.filter for _, line in lines), filter)
    filtered = [(number, line) for number, line in lines if line.filter == name_of_filter]
    metrics = _metrics([line for _, line in filtered], metric)
    verdict_name = _choice(name, "metric", metrics, None if judge else metric)
    samples = list[Sample]()
    counts: dict[tuple[int, str], tuple[int, int]] = {}
    seen: dict[tuple[int, str, int | None], int] = {}
    for number, line in filtered:
        verdict = line.verdicts.get(verdict_name, f"has no {verdict_name}")
        before = number
        if not line.is_sample or line.number is not None:
            before = seen.setdefault((line.seed, line.problem, line.number), number)
        if isinstance(verdict, str):
            unreadable.append((number, verdict))
        elif before != number:
            unreadable.append((number, f"repeats what line {before} has of {line.problem}"))
        else:
            key = (line.seed, line.problem)
            n, c = counts.get(key, (0, 0))
            counts[key] = (n + verdict[1], c + verdict[0])
            if line.sample:
                samples.append(line.sample._replace(is_correct=verdict[0] == 1))
    unreadable.sort()
    if not counts:
        first = "line {} {}".format(*unreadable[0])
        raise SageError(f"{name} has no line that can be read: {first}")
    steps = sorted({line.step for _, line in filtered if line.step is not None})
    sha256 = hashlib.sha256(data).hexdigest()
    return SampleFile(format.name, verdict_name, counts, unreadable, steps, sha256, samples)


def _samples(
    format: Format,
    row: dict[str, Any],
    threshold: float | None,
    gold: str,
    judge: Callable[[str, str], bool] | None,
) -> Iterator[Line]:
    """Yield a line for each sample of a row, with its texts and the judge's verdict, if any."""
    if format.name == "counts":
        raise ValueError("has counts and no texts")
    for sample_row in rows_of_samples(format.name, row, judge is not None):
        line = format.read(sample_row, threshold)
        try:
            sample = Sample(line.problem, *texts(format.name, sample_row, gold))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"has no text of its prompt and completion ({error!r})") from None
        if judge is not None:
            verdict = int(judge(sample.gold, sample.completion)), 1
            line = replace(line, verdicts={"": verdict})
        yield replace(line, sample=sample)


def _bytes(path: Path) -> bytes:
    """The content of a file, or of the standard input."""
    if str(path) == STDIN:
        return sys.stdin.buffer.read()
    if path.is_dir():
        raise SageError(f"{path} is a folder: name the files in it that have the samples")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SageError(f"{path} is not there: check the path") from None
    except OSError as error:
        raise _damaged(path.name, error) from None


def _damaged(name: str, error: Exception) -> SageError:
    said = " ".join(str(error).split())
    return SageError(f"{name} cannot be read ({said}): copy it again")


def _require_small(name: str, is_small: bool) -> None:
    if not is_small:
        size = f"{LARGEST:,} bytes or {MOST_ROWS:,} rows"
        raise SageError(f"{name} has more than {size} once it is unpacked: split it")


def _rows(
    data: bytes, name: str, method: str | None, with_texts: bool
) -> Iterable[tuple[int, Any]]:
    """Number and content of each line (bytes), or row of a table or log (a dict)."""
    if data.startswith(_PARQUET):
        return enumerate(_table(data, name, method, with_texts), 1)
    if method is not None:
        raise SageError(f"{name} has no methods: leave out :{method}")
    if data.startswith(_ZIP):
        return enumerate(_inspect_archive(data, name, with_texts), 1)
    if data.startswith(_GZIP):
        data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(LARGEST + 1)
        _require_small(name, len(data) <= LARGEST)
    if log := _inspect_log(data, name):
        return enumerate(log, 1)
    return ((number, line) for number, line in enumerate(io.BytesIO(data), 1) if line.strip())


def _table(data: bytes, name: str, method: str | None, with_texts: bool) -> list[dict[str, Any]]:
    """The rows of a Parquet file, of one method where it has several."""
    # Most files are no tables, and this library takes a while to load.
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(io.BytesIO(data))
        _require_small(name, file.metadata.num_rows <= MOST_ROWS)
        fields = set(file.schema_arrow.names)
        if not any(format.fields <= fields for format in FORMATS):
            raise SageError(f"{name} is in no known format: {KNOWN}")
        # Texts are not needed, but for the prompts that name problems.
        unused = {"completion", "completions", "code", "text"} - (
            {"completion"} if {"step", "advantage"} <= fields else set()
        )
        columns = [column for column in file.schema_arrow.names if column not in unused]
        if with_texts:
            columns = file.schema_arrow.names
        elif {"doc", "metric"} <= fields:
            columns = ["doc.id", "doc.task_name", "doc.query", "model_response.text", "metric"]
        table = file.read(columns=columns)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(name, error) from None
    methods_of_rows = (
        pc.cast(table["method"], pa.string()) if "method" in table.column_names else pa.array([])
    )
    methods = [str(name) for name in methods_of_rows.unique().to_pylist()]
    if method is not None and method not in methods:
        listed = f"it has {_some(methods)}" if methods else "it has no methods"
        raise SageError(f"{name} has no method {method}: {listed}")
    if method is None and len(methods) > 1:
        raise SageError(f"choose a method, as in {name}:{methods[0]}, of {_some(methods)}")
    rows_of_method = table if method is None else table.filter(pc.equal(methods_of_rows, method))
    rows: list[dict[str, Any]] = rows_of_method.to_pylist()
    return rows


def _inspect_log(data: bytes, name: str) -> list[Any] | None:
    """The samples of an Inspect log that is one JSON document; None of any other file."""
    start = data[:2000]
    if not (start.lstrip().startswith(b"{") and b'"eval"' in start and b'"version"' in start):
        return None
    try:
        log = json.loads(data)
    except ValueError:
        return None
    samples = log.get("samples") if isinstance(log, dict) else None
    if samples is None:
        raise SageError(f"{name} is a log of Inspect without samples: run it with samples logged")
    return samples if isinstance(samples, list) else None


def _inspect_archive(data: bytes, name: str, with_texts: bool) -> list[Any]:
    """The samples of an Inspect ``.eval``: its summaries, or each sample of a run that was cut, or
    whose texts are needed."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    names = archive.namelist()
    _require_small(name, sum(member.file_size for member in archive.infolist()) <= LARGEST)
    if not any(member in names for member in ("header.json", "_journal/start.json")):
        raise SageError(f"{name} is in no known format (a ZIP archive without a header): {KNOWN}")
    if "summaries.json" in names and not with_texts:
        summaries = json.loads(_member(data, archive, "summaries.json"))
        return summaries if isinstance(summaries, list) else [summaries]
    members = fnmatch.filter(names, "samples/*.json")
    return [json.loads(_member(data, archive, member)) for member in members]


def _member(data: bytes, archive: zipfile.ZipFile, name: str) -> bytes:
    """A file of an archive. Inspect packs with Zstandard since 2026, which Python 3.11 cannot."""
    info = archive.getinfo(name)
    if info.compress_type != _ZSTANDARD:
        return archive.read(name)
    import pyarrow as pa

    # The local header: 30 bytes, the last two pairs of which are the lengths of what follows.
    at = info.header_offset
    name_length, extra_length = struct.unpack("<HH", data[at + 26 : at + 30])
    begin = at + 30 + name_length + extra_length
    packed = pa.BufferReader(data[begin : begin + info.compress_size])
    return bytes(pa.CompressedInputStream(packed, "zstd").read(info.file_size))


def _format(name: str, row: Any, known: Format | None) -> Format:
    """The format whose fields a line has, that of the lines before it (``known``) if it fits.
    ValueError where fields are missing."""
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, not an object with fields")
    if known is not None and known.fields <= row.keys():
        return known
    format = next((format for format in FORMATS if format.fields <= row.keys()), None)
    if format is None:
        if known is None:
            raise ValueError(f"has the fields of no format: {_some(sorted(map(str, row)))}")
        raise ValueError(f"has no {' and no '.join(sorted(known.fields - row.keys()))}")
    if known is not None and format.name != known.name:
        both = " and ".join(sorted([format.name, known.name]))
        raise SageError(f"{name} has the fields of {both}: split it in two")
    return format


def _metrics(lines: list[Line], metric: str | None) -> list[str]:
    """The metrics to choose from. If none is named: those that have a verdict, and of metrics with
    the same verdicts on all lines the first."""
    names = list(dict.fromkeys(name for line in lines for name in line.verdicts))
    if metric is not None or len(names) < 2:
        return names
    distinct: dict[tuple[Any, ...], str] = {}
    for name in names:
        verdicts = tuple(line.verdicts.get(name, "") for line in lines)
        if not all(isinstance(verdict, str) for verdict in verdicts):
            distinct.setdefault(verdicts, name)
    return list(distinct.values()) or names


def _choice(file: str, kind: str, names: Iterable[str], choice: str | None) -> str:
    """The only name, or the user's choice."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) <= 1 and (choice is None or not distinct or distinct == [""]):
        return distinct[0] if distinct else ""
    if choice not in distinct:
        raise SageError(f"{file}: choose a {kind} by --{kind}, one of {_some(distinct)}")
    return choice


def _some(names: list[str]) -> str:
    """The first eight of some names, and how many more there are."""
    further = [f"{len(names) - 8} more"] if len(names) > 8 else []
    return ", ".join([*names[:8], *further])
