"""Public data sets by name: fetched at a pinned revision, or read from a local folder of the same
files; checksums decide.

Set ``SAGE_DATA`` to a folder laid out as :data:`SOURCES` names the files (``benchmarks/*.jsonl``,
``gsm8k/*.jsonl``); what is not there is fetched. Odd formats are mended here and nowhere else, and
a damaged file is refused, not guessed at.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import write_bytes
from sage_lib.tasks import lines
from sage_lib.tasks.lines import Line
from sage_lib.tasks.problem import (
    Demonstration,
    Problem,
    TaskSettings,
    no_completions,
    no_measures,
)
from sage_lib.tasks.verifier import judge_by_math, last_boxed, require_math_golds

#: Seconds without an answer after which a download is given up.
PATIENCE = 30
#: What to do about a line that is damaged.
_AGAIN = "fetch the file again"

LOGGED: tuple[str, ...] = ()
COUNTED: tuple[str, ...] = ()
judge = judge_by_math
require_golds = require_math_golds
measures = no_measures
completions = no_completions


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """A public set has its name, a key of :data:`SOURCES`."""

    only: tuple[str, ...] | None = None  # ids of the problems that are taken; None is all of them


@dataclass(frozen=True)
class File:
    """A public file: its place below a local folder, where it is fetched from, and the SHA-256 of
    its bytes.

    ``revision`` is a commit, or a branch where no commit is known; the checksum refuses whatever
    else stands there.
    """

    local: str
    url: str  # with {revision}
    revision: str
    sha256: str


def _github(local: str, repository: str, path: str, revision: str, sha256: str) -> File:
    url = f"https://raw.githubusercontent.com/{repository}/{{revision}}/{path}"
    return File(local, url, revision, sha256)


@dataclass(frozen=True)
class Hub:
    """A set that the hub keeps in its own format.

    It is read by the package datasets, or from a JSON-lines export in a local folder.

    No checksum of its content is known here: its number of rows is asserted, and a run's record
    holds the digest of what it read.
    """

    local: str
    repository: str
    configuration: str | None
    split: str
    revision: str


@dataclass(frozen=True)
class Source:
    """The parts of a set in order, the columns of question and gold, which rows are kept, and how
    many that are."""

    parts: tuple[File | Hub, ...]
    question: str
    gold: Callable[[dict], object]
    rows: int
    keep: Callable[[dict], bool] = lambda row: True


def _number(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _after_hashes(row: dict) -> str:
    gold: str = row["answer"].rpartition("####")[2]
    return gold.strip().replace(",", "")


#: Python, the end of one formula and the start of the next, and variables that would be read as
#: metres and as cents.
_ODD_GOLDS = (
    ("np.", "\\"),
    ("$ $", ""),
    (r"\frac{37}{4} m", r"\frac{37 m}{4}"),
    (r"\frac{1}{\sqrt{2}}c", r"\frac{c}{\sqrt{2}}"),
)


def _minerva(row: dict) -> str | None:
    """The last box of the solution, its odd spellings mended."""
    gold = last_boxed(row["solution"])
    for written, meant in _ODD_GOLDS:
        gold = gold and gold.replace(written, meant)
    return gold


SOURCES = {
    # Section 5.1: "AIME 2024-2025 (60 problems)".
    "aime": Source(
        (
            _github(
                "benchmarks/aime2024.jsonl",
                "GAIR-NLP/AIME-Preview",
                "eval/data/aime/test2024.jsonl",
                "main",
                "a0f7eb9915f60f70fdaa9375414869d101eab639a67acf652cde98166efcd1cc",
            ),
            _github(
                "benchmarks/aime2025_I.jsonl",
                "GAIR-NLP/AIME-Preview",
                "eval/data/aime/test2025-I.jsonl",
                "main",
                "fcdf97fe9bf3768e586c4f3b3d34d98a763893847e72234aa41e1ed5c67d977a",
            ),
            _github(
                "benchmarks/aime2025_II.jsonl",
                "GAIR-NLP/AIME-Preview",
                "eval/data/aime/test2025-II.jsonl",
                "main",
                "69d966f7badd83a681d30efa9b4d587b4c692e4892b6ea5dc57d11d3934bf79a",
            ),
        ),
        "problem",
        lambda r: r["answer"],
        60,
    ),
    # Section 5.1: "AMC23 (40 problems)".
    "amc23": Source(
        (
            _github(
                "benchmarks/amc23.jsonl",
                "QwenLM/Qwen2.5-Math",
                "evaluation/data/amc23/test.jsonl",
                "main",
                "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
            ),
        ),
        "question",
        lambda r: _number(r["answer"]),
        40,
    ),
    # Section 5.1: "the level-5 subset of MATH-500 (134 problems)".
    "math500_level5": Source(
        (
            File(
                "benchmarks/math500.jsonl",
                "https://huggingface.co/datasets/HuggingFaceH4/MATH-500/resolve/{revision}/test.jsonl",
                "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
                "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
            ),
        ),
        "problem",
        lambda r: r["answer"],
        134,
        lambda r: int(r["level"]) == 5,
    ),
    # Appendix I.
    "minerva": Source(
        (
            _github(
                "benchmarks/minerva_math.jsonl",
                "QwenLM/Qwen2.5-Math",
                "evaluation/data/minerva_math/test.jsonl",
                "main",
                "0e656b430d3a0a1dab6aa853f453ba3805e28e2cabe4fc72486a897cc09d8ba2",
            ),
        ),
        "problem",
        _minerva,
        272,
    ),
    "gsm8k_train": Source(
        (
            _github(
                "gsm8k/train.jsonl",
                "openai/grade-school-math",
                "grade_school_math/data/train.jsonl",
                "master",
                "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
            ),
        ),
        "question",
        _after_hashes,
        7473,
    ),
    "gsm8k_test": Source(
        (
            _github(
                "gsm8k/test.jsonl",
                "openai/grade-school-math",
                "grade_school_math/data/test.jsonl",
                "master",
                "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
            ),
        ),
        "question",
        _after_hashes,
        1319,
    ),
    # Table 8: "First 2,000 instances of DAPO-Math-17K"; Section 5.1 names the processed set.
    "dapo_math_17k": Source(
        (
            Hub(
                "dapo_math_17k.jsonl",
                "open-r1/DAPO-Math-17k-Processed",
                "en",
                "train",
                "31dd309567e3da778038cc87d868b6097a3ccf68",
            ),
        ),
        "prompt",
        lambda r: r["solution"],
        14116,
    ),
    # Section 5.1: "a small subset of numerically answerable instances from OpenMathReasoning-mini".
    "open_math_reasoning_mini": Source(
        (
            Hub(
                "open_math_reasoning_mini.jsonl",
                "unsloth/OpenMathReasoning-mini",
                None,
                "cot",
                "main",
            ),
        ),
        "problem",
        lambda r: r["expected_answer"],
        19252,
    ),
}
#: GSM8K's annotations, which nobody should learn to write.
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def _without_annotations(row: dict) -> str:
    working: str = row["answer"].rpartition("####")[0]
    return _CALCULATOR.sub("", working).strip()


def _without_think_tags(row: dict) -> str:
    working: str = row["generated_solution"]
    return working.replace("<think>", "").replace("</think>", "").strip()


#: Sets with worked answers, for SFT: name -> what gives the working of a row.
WORKED: dict[str, Callable[[dict], str]] = {
    "open_math_reasoning_mini": _without_think_tags,
    "gsm8k_train": _without_annotations,
}


def label(settings: Settings) -> str:
    """The set's name."""
    return settings.name


def problems(
    settings: Settings,
    rows: int,
    seed: int,
    exclude: frozenset[str] = frozenset(),
    revision: str | None = None,
) -> list[Problem]:
    """The first ``rows`` problems in file order, or of those that ``only`` names; ``seed`` changes
    nothing. SageError for an id that the set does not have."""
    allowed = [p for p in load(settings.name, revision) if p.question not in exclude]
    if settings.only is not None:
        unknown = sorted(set(settings.only) - {p.id for p in allowed})
        if unknown:
            raise SageError(
                f"the data set {settings.name} has no problem {unknown[0]!r}: its ids are such as "
                f"{allowed[0].id}"
            )
        allowed = [p for p in allowed if p.id in settings.only]
    return allowed[:rows]


def demonstrations(
    settings: Settings,
    rows: int,
    seed: int,
    exclude: frozenset[str] = frozenset(),
    revision: str | None = None,
    *,
    count_tokens: Callable[[str], int],
    max_seq_length: int,
) -> list[Demonstration]:
    """Worked answers of a set in :data:`WORKED`: numeric answers, whose text fits half the context
    (Appendix E.2). Raises SageError for another set."""
    name = settings.name
    if name not in WORKED:
        raise SageError(f"there is no SFT data set {name!r}: choose one of {', '.join(WORKED)}")
    found: list[Demonstration] = []
    for problem, row in _load(name, revision, None):
        try:
            working = WORKED[name](row)
        except KeyError as error:
            raise SageError(f"{problem.id}: the column {error} is missing") from None
        if len(found) == rows or problem.question in exclude or not _numeric(problem.gold):
            continue
        if count_tokens(problem.question + working) <= max_seq_length / 2:
            found.append(Demonstration(problem.question, working, problem.gold))
    return found


def could_draw(settings: Settings, problem: Problem) -> bool:
    """No: a published set is taken as it was published, and nothing is held out of it."""
    return False


def load(name: str, revision: str | None = None, folder: str | Path | None = None) -> list[Problem]:
    """The data set ``name``, in file order, its size asserted.

    Args:
        name: a key of :data:`SOURCES`.
        revision: another one than the pinned revision, on purpose: it is fetched, and its checksum
            and size are not asserted.
        folder: local folder to look in first; default the environment variable ``SAGE_DATA``.

    Raises:
        SageError: unknown name, a file that cannot be had, another checksum than the pinned one,
            half-written line, missing column, duplicate id, empty gold answer, or another number of
            rows than the paper's.
    """
    return [problem for problem, _ in _load(name, revision, folder)]


def elsewhere(name: str, revision: str | None = None) -> str:
    """Where a set would be fetched from; "" for one that lies on this machine, and for what is no
    public set. Of a set that the hub keeps, its cache is not looked into."""
    source, folder = SOURCES.get(name), os.environ.get("SAGE_DATA")
    for part in source.parts if source else ():
        local = Path(folder) / part.local if folder and revision is None else None
        if local is not None and local.is_file():
            continue
        if isinstance(part, Hub):
            return part.repository
        if not _kept(part, revision).is_file():
            return part.url.format(revision=revision or part.revision)
    return ""


def _numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _load(
    name: str, revision: str | None, folder: str | Path | None
) -> list[tuple[Problem, dict[str, Any]]]:
    """Every problem of a set with its row."""
    if name not in SOURCES:
        raise SageError(f"there is no data set {name!r}: choose one of {', '.join(SOURCES)}")
    source = SOURCES[name]
    folder = folder or os.environ.get("SAGE_DATA")
    found: list[tuple[Problem, dict[str, Any]]] = []
    seen: set[str] = set()
    for where, row in _rows(source, revision, folder):
        try:
            if not source.keep(row):
                continue
            question, gold = row[source.question], source.gold(row)
        except KeyError as error:
            raise SageError(f"{where}: the column {error} is missing") from None
        gold_text = lines.text(where, gold, "gold answer")
        file = where.rsplit(":", 1)[0]
        identity = f"{file}/{_id(row, len(found))}"
        lines.new_id(where, identity, seen)
        found.append((Problem(identity, name, str(question), gold_text, name), row))
    if revision is None and len(found) != source.rows:
        raise SageError(
            f"the data set {name} should have {source.rows} problems and has {len(found)}: "
            "its files were changed"
        )
    return found


def _id(row: dict, number: int) -> object:
    """The first of the columns that hold ids, or the row's number."""
    for column in ("id", "unique_id", "idx"):
        if column in row:
            return row[column]
    return number


def _rows(source: Source, revision: str | None, folder: str | Path | None) -> list[Line]:
    """The rows of all parts, each with the place where it stands."""
    found = []
    for part in source.parts:
        if isinstance(part, File):
            found += _file(part, revision, folder)
        else:
            found += _hub(part, revision, folder)
    return found


def _file(file: File, revision: str | None, folder: str | Path | None) -> list[Line]:
    local = Path(folder) / file.local if folder else None
    if revision is None and local is not None and local.is_file():
        data = local.read_bytes()
        remedy = (
            "put the original into the folder in SAGE_DATA, or remove it there to have it fetched"
        )
        _check(file, data, remedy)
        return lines.json_lines(file.local, data, _AGAIN)
    kept = _kept(file, revision)
    already = kept.is_file()
    if already:
        data = kept.read_bytes()
        remedy = "remove it from the folder data of the build to have it fetched again"
    else:
        data = _fetch(file, revision)
        remedy = "it was changed at its source; name a revision in the profile to take another one"
    if revision is None:
        _check(file, data, remedy)
    rows = lines.json_lines(file.local, data, _AGAIN)
    if not already:
        write_bytes(kept, data)
    return rows


def _kept(file: File, revision: str | None) -> Path:
    """Where a file is kept once it was fetched."""
    return paths.build("data") / (revision or file.revision) / file.local


def _check(file: File, data: bytes, remedy: str) -> None:
    """SageError, with the remedy, where the bytes are not those of the pinned file."""
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise SageError(
            f"the data file {file.local} does not have the checksum of the pinned file: {remedy}"
        )


def _fetch(file: File, revision: str | None) -> bytes:
    url = file.url.format(revision=revision or file.revision)
    try:
        with urlopen(url, timeout=PATIENCE) as answer:
            return bytes(answer.read())
    except (OSError, HTTPException) as error:  # HTTPException: an answer that broke off
        raise SageError(
            f"the data file {file.local} could not be fetched from {url} ({error}): "
            "connect to the network, or set SAGE_DATA to a folder that holds it"
        ) from None


def _hub(part: Hub, revision: str | None, folder: str | Path | None) -> list[Line]:
    path = Path(folder) / part.local if folder else None
    if revision is None and path is not None and path.is_file():
        return lines.json_lines(part.local, path.read_bytes(), _AGAIN)
    from datasets import load_dataset

    try:
        rows = load_dataset(
            part.repository,
            part.configuration,
            split=part.split,
            revision=revision or part.revision,
        )
        return [(f"{part.repository}:{number}", row) for number, row in enumerate(rows, 1)]
    except Exception as error:
        raise SageError(
            f"{part.repository} could not be loaded from the hub ({type(error).__name__}): "
            f"connect to the network, or set SAGE_DATA to a folder that holds {part.local}"
        ) from error
