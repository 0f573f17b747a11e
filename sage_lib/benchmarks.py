"""Public data sets by name: from the hub at a revision, or from a local folder of the same files.

Set ``SAGE_DATA`` to a folder with ``benchmarks/*.jsonl`` and ``gsm8k/*.jsonl`` to load from there. Every set becomes a
list of :class:`Item`; odd formats are mended here and nowhere else, and a damaged file is refused, not guessed at.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sage_lib.errors import SageError


@dataclass(frozen=True)
class Item:
    """One problem with its gold answer as text."""

    id: str
    question: str
    gold: str


@dataclass(frozen=True)
class Source:
    """Where a set lives: files below a local folder, or a name (and configuration, split) on the hub; and its size."""

    files: tuple[str, ...]
    hub: tuple[str, str | None, str] | None
    question: str
    gold: Callable[[dict], object]
    rows: int | None
    keep: Callable[[dict], bool] = lambda row: True


def last_boxed(text: str) -> str | None:
    r"""Contents of the last \boxed{...} with balanced braces; None when there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len(r"\boxed{")
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None


def _number(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _after_hashes(row: dict) -> str:
    return row["answer"].rpartition("####")[2].strip().replace(",", "")


SOURCES = {
    # Section 5.1: "AIME 2024-2025 (60 problems)". The hub has no set of both years in one format, so files only.
    "aime": Source(("benchmarks/aime2024.jsonl", "benchmarks/aime2025_I.jsonl", "benchmarks/aime2025_II.jsonl"), None, "problem", lambda r: r["answer"], 60),
    # Section 5.1: "AMC23 (40 problems)".
    "amc23": Source(("benchmarks/amc23.jsonl",), ("zwhe99/amc23", None, "test"), "question", lambda r: _number(r["answer"]), 40),
    # Section 5.1: "the level-5 subset of MATH-500 (134 problems)".
    "math500_level5": Source(("benchmarks/math500.jsonl",), ("HuggingFaceH4/MATH-500", None, "test"), "problem", lambda r: r["answer"], 134, lambda r: int(r["level"]) == 5),
    # Appendix I.
    "minerva": Source(("benchmarks/minerva_math.jsonl",), ("math-ai/minervamath", None, "test"), "question|problem", lambda r: r["answer"] if "answer" in r else last_boxed(r["solution"]), 272),
    "gsm8k_train": Source(("gsm8k/train.jsonl",), ("openai/gsm8k", "main", "train"), "question", _after_hashes, 7473),
    "gsm8k_test": Source(("gsm8k/test.jsonl",), ("openai/gsm8k", "main", "test"), "question", _after_hashes, 1319),
    # Table 8: "First 2,000 instances of DAPO-Math-17K"; Section 5.1 names the processed set.
    "dapo_math_17k": Source(("dapo_math_17k.jsonl",), ("open-r1/DAPO-Math-17k-Processed", "en", "train"), "prompt", lambda r: r["solution"], None),
}
#: Section 5.1: "a small subset of numerically answerable instances from OpenMathReasoning-mini".
OPEN_MATH_REASONING = ("open_math_reasoning_mini.jsonl", ("unsloth/OpenMathReasoning-mini", None, "cot"))


def load(name: str, revision: str | None = None, folder: str | Path | None = None) -> list[Item]:
    """The data set ``name``, in file order, its size asserted.

    Args:
        name: a key of :data:`SOURCES`.
        revision: of the hub's repository; None is its main branch.
        folder: local folder to load from; default the environment variable ``SAGE_DATA``, and without it the hub.

    Raises:
        SageError: unknown name, missing file, changed checksum, half-written line, missing column, duplicate id,
            empty gold answer, or another number of rows than the paper's.
    """
    if name not in SOURCES:
        raise SageError(f"there is no data set {name!r}: choose one of {', '.join(SOURCES)}")
    source = SOURCES[name]
    rows = [(where, row) for where, row in _rows(name, source.files, source.hub, revision, folder) if _kept(name, where, row, source)]
    items, seen = [], set()
    for where, row in rows:
        column = next((c for c in source.question.split("|") if c in row), None)
        try:
            if column is None:
                raise KeyError(source.question.replace("|", " or "))
            gold = source.gold(row)
        except KeyError as error:
            raise SageError(f"{where}: the column {error} is missing") from None
        if gold is None or not str(gold).strip():
            raise SageError(f"{where}: there is no gold answer")
        identity = f"{where.rsplit(':', 1)[0]}/{row.get('id', row.get('unique_id', row.get('idx', len(items))))}"
        if identity in seen:
            raise SageError(f"{where}: the id {identity} occurs twice")
        seen.add(identity)
        items.append(Item(identity, str(row[column]), str(gold).strip()))
    if source.rows is not None and len(items) != source.rows:
        raise SageError(f"the data set {name} should have {source.rows} problems and has {len(items)}: its files were changed")
    return items


def load_sft(name: str, revision: str | None, max_seq_length: int, count_tokens: Callable[[str], int]) -> list[tuple[str, str, str]]:
    """(question, working, answer) of OpenMathReasoning-mini: numeric answers, whose text fits half the context (App. E.2)."""
    if name != "open_math_reasoning_mini":
        raise SageError(f"there is no SFT data set {name!r}: choose open_math_reasoning_mini")
    file, hub = OPEN_MATH_REASONING
    chosen = []
    for where, row in _rows(name, (file,), hub, revision, None):
        try:
            answer, working = row["expected_answer"].strip(), row["generated_solution"]
            question = row["problem"]
            float(answer)
        except KeyError as error:
            raise SageError(f"{where}: the column {error} is missing") from None
        except ValueError:
            continue  # not numeric
        working = working.replace("<think>", "").replace("</think>", "").strip()
        if count_tokens(question + working) <= max_seq_length / 2:
            chosen.append((question, working, answer))
    return chosen


def _kept(name: str, where: str, row: dict, source: Source) -> bool:
    try:
        return source.keep(row)
    except KeyError as error:
        raise SageError(f"{where}: the column {error} is missing") from None


def _rows(name: str, files: tuple[str, ...], hub: tuple | None, revision: str | None, folder: str | Path | None) -> list[tuple[str, dict]]:
    folder = folder or os.environ.get("SAGE_DATA")
    if folder:
        return [row for file in files for row in _local(Path(folder), file)]
    if hub is None:
        raise SageError(f"the data set {name} has no copy on the hub: set SAGE_DATA to a folder that holds {', '.join(files)}")
    from datasets import load_dataset

    repository, configuration, split = hub
    try:
        return [(f"{repository}:{i}", row) for i, row in enumerate(load_dataset(repository, configuration, split=split, revision=revision), 1)]
    except Exception as error:
        raise SageError(f"{repository} could not be loaded from the hub ({type(error).__name__}): connect to the network, "
                        f"or set SAGE_DATA to a folder that holds {', '.join(files)}") from error


def _local(folder: Path, file: str) -> list[tuple[str, dict]]:
    path = folder / file
    if not path.is_file():
        raise SageError(f"the data file {file} is missing from the folder in SAGE_DATA: put it there, or unset SAGE_DATA to load from the hub")
    data = path.read_bytes()
    sums = folder / "SHA256SUMS"
    listed = dict(reversed(line.split(maxsplit=1)) for line in sums.read_text().splitlines() if line.strip()) if sums.is_file() else {}
    expected = next((digest for name, digest in listed.items() if name.lstrip("*./") == file), None)
    if expected is not None and hashlib.sha256(data).hexdigest() != expected:
        raise SageError(f"the data file {file} does not have the checksum that SHA256SUMS gives: fetch it again")
    rows = []
    for number, line in enumerate(data.decode().splitlines(), 1):
        if line.strip():
            try:
                rows.append((f"{file}:{number}", json.loads(line)))
            except json.JSONDecodeError:
                raise SageError(f"{file}, line {number} is not valid JSON (half-written?): fetch the file again") from None
    return rows
