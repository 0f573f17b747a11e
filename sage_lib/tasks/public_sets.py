"""Public data sets by name: fetched at a pinned revision, or read from a local folder with the same
files. Checksums of the files are compared.

Set ``SAGE_DATA`` to a folder with the files that :data:`SOURCES` names. Missing files are fetched.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass as plain_dataclass
from http.client import HTTPException
from operator import itemgetter
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.request import urlopen

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import write_bytes
from sage_lib.tasks import lines
from sage_lib.tasks.lines import Line
from sage_lib.tasks.problem import Demonstration, Problem
from sage_lib.tasks.task import Task
from sage_lib.tasks.verifier import last_boxed
from sage_lib.validation import STRICT


@plain_dataclass(frozen=True)
class File:
    local: str  # path below a local folder
    url: str  # with {revision}
    revision: str  # a commit, or a branch where no commit is known
    sha256: str


@plain_dataclass(frozen=True)
class Hub:
    """A set read by the package datasets or from a JSON-lines export. It has no checksum."""

    local: str
    repository: str
    configuration: str | None
    split: str
    revision: str


@plain_dataclass(frozen=True)
class Source:
    parts: tuple[File | Hub, ...]
    question: str  # column
    gold: Callable[[dict], object]
    rows: int  # after ``keep``
    keep: Callable[[dict], bool] = lambda row: True
    working: Callable[[dict], str] | None = None  # of sets with worked answers, for SFT


def _github(local: str, path: str, revision: str = "main") -> File:
    url = f"https://raw.githubusercontent.com/{path}"
    return File(f"{local}.jsonl", url, revision, _SHA256[local])


def _whole_answer(row: dict) -> object:
    """Return the answer, and 27 for 27.0."""
    value = row["answer"]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _after_hashes(row: dict) -> str:
    gold: str = row["answer"].rpartition("####")[2]
    return gold.strip().replace(",", "")


def _minerva(row: dict) -> str | None:
    """Return the last box of the solution, with mistakes of the data set corrected."""
    gold = last_boxed(row["solution"])
    for wrong, corrected in (
        ("np.", "\\"),
        ("$ $", ""),
        (r"\frac{37}{4} m", r"\frac{37 m}{4}"),
        (r"\frac{1}{\sqrt{2}}c", r"\frac{c}{\sqrt{2}}"),
    ):
        gold = gold and gold.replace(wrong, corrected)
    return gold


def _without_annotations(row: dict) -> str:
    working: str = row["answer"].rpartition("####")[0]
    return re.sub(r"<<[^<>]*>>", "", working).strip()


def _without_think_tags(row: dict) -> str:
    working: str = row["generated_solution"]
    return working.replace("<think>", "").replace("</think>", "").strip()


_SHA256 = {
    "benchmarks/aime2024": "a0f7eb9915f60f70fdaa9375414869d101eab639a67acf652cde98166efcd1cc",
    "benchmarks/aime2025_I": "fcdf97fe9bf3768e586c4f3b3d34d98a763893847e72234aa41e1ed5c67d977a",
    "benchmarks/aime2025_II": "69d966f7badd83a681d30efa9b4d587b4c692e4892b6ea5dc57d11d3934bf79a",
    "benchmarks/amc23": "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
    "benchmarks/minerva_math": "0e656b430d3a0a1dab6aa853f453ba3805e28e2cabe4fc72486a897cc09d8ba2",
    "gsm8k/train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "gsm8k/test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
_AIME = "GAIR-NLP/AIME-Preview/{revision}/eval/data/aime"
_QWEN = "QwenLM/Qwen2.5-Math/{revision}/evaluation/data"
_GSM8K = "openai/grade-school-math/{revision}/grade_school_math/data"
_AIME_PARTS = (
    _github("benchmarks/aime2024", f"{_AIME}/test2024.jsonl"),
    _github("benchmarks/aime2025_I", f"{_AIME}/test2025-I.jsonl"),
    _github("benchmarks/aime2025_II", f"{_AIME}/test2025-II.jsonl"),
)
_AMC23 = _github("benchmarks/amc23", f"{_QWEN}/amc23/test.jsonl")
_MINERVA = _github("benchmarks/minerva_math", f"{_QWEN}/minerva_math/test.jsonl")
_MATH500 = File(
    "benchmarks/math500.jsonl",
    "https://huggingface.co/datasets/HuggingFaceH4/MATH-500/resolve/{revision}/test.jsonl",
    "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
)
_GSM8K_TRAIN = _github("gsm8k/train", f"{_GSM8K}/train.jsonl", "master")
_GSM8K_TEST = _github("gsm8k/test", f"{_GSM8K}/test.jsonl", "master")
_DAPO = Hub(
    "dapo_math_17k.jsonl",
    "open-r1/DAPO-Math-17k-Processed",
    "en",
    "train",
    "31dd309567e3da778038cc87d868b6097a3ccf68",
)
_OPEN = Hub("open_math_reasoning_mini.jsonl", "unsloth/OpenMathReasoning-mini", None, "cot", "main")

SOURCES = {
    # Section 5.1: "AIME 2024-2025 (60 problems)", "AMC23 (40 problems)".
    "aime": Source(_AIME_PARTS, "problem", itemgetter("answer"), 60),
    "amc23": Source((_AMC23,), "question", _whole_answer, 40),
    # Section 5.1: "the level-5 subset of MATH-500 (134 problems)".
    "math500_level5": Source(
        (_MATH500,), "problem", itemgetter("answer"), 134, lambda row: int(row["level"]) == 5
    ),
    # Appendix I.
    "minerva": Source((_MINERVA,), "problem", _minerva, 272),
    "gsm8k_train": Source(
        (_GSM8K_TRAIN,), "question", _after_hashes, 7473, working=_without_annotations
    ),
    "gsm8k_test": Source((_GSM8K_TEST,), "question", _after_hashes, 1319),
    # Table 8: "First 2,000 instances of DAPO-Math-17K"; Section 5.1 names the processed set.
    "dapo_math_17k": Source((_DAPO,), "prompt", itemgetter("solution"), 14116),
    # Section 5.1: "a small subset of numerically answerable instances from OpenMathReasoning-mini".
    "open_math_reasoning_mini": Source(
        (_OPEN,), "problem", itemgetter("expected_answer"), 19252, working=_without_think_tags
    ),
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PublicSet(Task):
    """A key of :data:`SOURCES`."""

    HAS_REVISIONS: ClassVar[bool] = True

    only: Annotated[tuple[str, ...], Field(strict=False)] | None = None  # ids of problems

    def stream(self, seed: int, exclude: frozenset[str], revision: str | None) -> Iterator[Problem]:
        """Yield the problems in file order: all, or those in ``only``."""
        problems = load(self.name, revision)
        if self.only is not None:
            missing_ids = sorted(set(self.only) - {p.id for p in problems})
            if missing_ids:
                raise SageError(f"{self.name} has no problem {missing_ids[0]!r}: correct its id")
            problems = [p for p in problems if p.id in self.only]
        return (p for p in problems if p.question not in exclude)

    def worked(self, problems: Iterator[Problem], rows: int, seed: int) -> Iterator[Demonstration]:
        """Yield the demonstrations whose answer is a number. Args are as in :meth:`Task.worked`."""
        examples = super().worked(problems, rows, seed)
        return (example for example in examples if _is_number(example.answer))

    def could_draw(self, problem: Problem) -> bool:
        """Return False: no problem is left out of a published set."""
        return False


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def load(name: str, revision: str | None = None) -> list[Problem]:
    """Return the problems of a public data set, a key of :data:`SOURCES`, in file order.

    SageError where checksum or number are not those of the pinned revision, None.
    """
    source, problems, ids = SOURCES[name], list[Problem](), set[str]()
    for place, row in (line for part in source.parts for line in _rows(part, revision)):
        try:
            if not source.keep(row):
                continue
            question, gold = str(row[source.question]), source.gold(row)
            working = source.working(row) if source.working else None
        except KeyError as error:
            raise SageError(f"{place}: the column {error} is missing") from None
        row_ids = [row[column] for column in ("id", "unique_id", "idx") if column in row]
        identity = f"{place.rsplit(':', 1)[0]}/{(row_ids or [len(problems)])[0]}"
        if identity in ids:
            raise SageError(f"{place}: the id {identity} occurs twice")
        ids.add(identity)
        gold_text = lines.text(place, gold, "gold answer")
        problems.append(Problem(identity, name, question, gold_text, name, working=working))
    if revision is None and len(problems) != source.rows:
        raise SageError(f"{name} should have {source.rows} problems and has {len(problems)}")
    return problems


def _cached(file: File, revision: str | None) -> Path:
    return paths.build("data") / (revision or file.revision) / file.local


def _local_path(part: File | Hub, revision: str | None) -> Path | None:
    """Return the part's file in the folder ``SAGE_DATA``, or from an earlier fetch, if any."""
    folder = os.environ.get("SAGE_DATA")
    candidates = [Path(folder) / part.local] if folder and revision is None else []
    candidates += [_cached(part, revision)] if isinstance(part, File) else []
    return next((path for path in candidates if path.is_file()), None)


def _rows(part: File | Hub, revision: str | None) -> list[Line]:
    path = _local_path(part, revision)
    if isinstance(part, Hub):
        return lines.read(part.local, path.read_bytes()) if path else _from_hub(part, revision)
    data = path.read_bytes() if path else _fetch(part, revision)
    if revision is None and hashlib.sha256(data).hexdigest() != part.sha256:
        raise SageError(
            f"the data file {part.local} does not have the checksum of the pinned file: remove it "
            "to have it fetched again; if it was changed at its source, name a revision in the "
            "profile to take another one"
        )
    rows = lines.read(part.local, data)
    if path is None:
        write_bytes(_cached(part, revision), data)
    return rows


def _fetch(file: File, revision: str | None) -> bytes:
    url = file.url.format(revision=revision or file.revision)
    try:
        with urlopen(url, timeout=30) as answer:
            return bytes(answer.read())
    except (OSError, HTTPException) as error:  # HTTPException: the connection broke off
        raise SageError(
            f"the data file {file.local} could not be fetched from {url} ({error}): "
            "connect to the network, or set SAGE_DATA to a folder that holds it"
        ) from None


def _from_hub(part: Hub, revision: str | None) -> list[Line]:
    from datasets import load_dataset

    version = {"split": part.split, "revision": revision or part.revision}
    try:
        rows = load_dataset(part.repository, part.configuration, **version)
        return [(f"{part.repository}:{number}", row) for number, row in enumerate(rows, 1)]
    except Exception as error:
        raise SageError(
            f"{part.repository} could not be loaded from the hub ({type(error).__name__}): "
            f"connect to the network, or set SAGE_DATA to a folder that holds {part.local}"
        ) from error
