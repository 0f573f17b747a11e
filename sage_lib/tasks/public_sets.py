"""Public data sets by name: fetched at a pinned revision, or read from a local folder of the same files; checksums decide.

Set ``SAGE_DATA`` to a folder laid out as :data:`SOURCES` names the files (``benchmarks/*.jsonl``, ``gsm8k/*.jsonl``); what is
not there is fetched. Every set becomes a list of :class:`Item`; odd formats are mended here and nowhere else, and a damaged
file is refused, not guessed at.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import write_bytes
from sage_lib.tasks.verifier import last_boxed

#: Seconds without an answer after which a download is given up.
PATIENCE = 30


@dataclass(frozen=True)
class Item:
    """One problem with its gold answer as text."""

    id: str
    question: str
    gold: str


@dataclass(frozen=True)
class File:
    """A public file: its place below a local folder, where it is fetched from, and the SHA-256 of its bytes.

    ``revision`` is a commit, or a branch where no commit is known; the checksum refuses whatever else stands there.
    """

    local: str
    url: str  # with {revision}
    revision: str
    sha256: str


def _github(local: str, repository: str, path: str, revision: str, sha256: str) -> File:
    return File(
        local,
        f"https://raw.githubusercontent.com/{repository}/{{revision}}/{path}",
        revision,
        sha256,
    )


@dataclass(frozen=True)
class Hub:
    """A set that the hub keeps in its own format: read by the package datasets, or from a JSON-lines export in a local folder.

    No checksum of its content is known here: its number of rows is asserted, and a run's record holds the digest of what it read.
    """

    local: str
    repository: str
    configuration: str | None
    split: str
    revision: str


@dataclass(frozen=True)
class Source:
    """The parts of a set in order, the columns of question and gold, which rows are kept, and how many that are."""

    parts: tuple[File | Hub, ...]
    question: str
    gold: Callable[[dict], object]
    rows: int
    keep: Callable[[dict], bool] = lambda row: True
    unparseable: tuple[
        str, ...
    ] = ()  # golds that Math-Verify cannot read: loaded, and left out of runs


def _number(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _after_hashes(row: dict) -> str:
    return row["answer"].rpartition("####")[2].strip().replace(",", "")


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
        lambda r: last_boxed(r["solution"]),
        272,
        unparseable=(
            "np.arcsin(10/13)",
            "E_{1},E_{2}",
            r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}",
            r"\frac{dM}{dt}=\frac{10^{5} L_{\odot}}{0.007 c^{2} M_{\odot}^{6}} M^{6}",
        ),
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
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # GSM8K's annotations, which nobody should learn to write
#: Sets with worked answers, for SFT: name -> what gives the working of a row.
WORKED = {
    "open_math_reasoning_mini": lambda row: (
        row["generated_solution"].replace("<think>", "").replace("</think>", "").strip()
    ),
    "gsm8k_train": lambda row: _CALCULATOR.sub("", row["answer"].rpartition("####")[0]).strip(),
}


def load(name: str, revision: str | None = None, folder: str | Path | None = None) -> list[Item]:
    """The data set ``name``, in file order, its size asserted.

    Args:
        name: a key of :data:`SOURCES`.
        revision: another one than the pinned revision, on purpose: it is fetched, and its checksum and size are not asserted.
        folder: local folder to look in first; default the environment variable ``SAGE_DATA``.

    Raises:
        SageError: unknown name, a file that cannot be had, another checksum than the pinned one, half-written line, missing
            column, duplicate id, empty gold answer, or another number of rows than the paper's.
    """
    return [item for item, _ in _load(name, revision, folder)]


def load_sft(
    name: str, revision: str | None, max_seq_length: int, count_tokens: Callable[[str], int]
) -> list[tuple[str, str, str]]:
    """(question, working, answer) of a set in :data:`WORKED`: numeric answers, whose text fits half the context (App. E.2)."""
    if name not in WORKED:
        raise SageError(f"there is no SFT data set {name!r}: choose one of {', '.join(WORKED)}")
    chosen = []
    for item, row in _load(name, revision, None):
        try:
            working = WORKED[name](row)
        except KeyError as error:
            raise SageError(f"{item.id}: the column {error} is missing") from None
        if _numeric(item.gold) and count_tokens(item.question + working) <= max_seq_length / 2:
            chosen.append((item.question, working, item.gold))
    return chosen


def _numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _load(name: str, revision: str | None, folder: str | Path | None) -> list[tuple[Item, dict]]:
    if name not in SOURCES:
        raise SageError(f"there is no data set {name!r}: choose one of {', '.join(SOURCES)}")
    source = SOURCES[name]
    folder = folder or os.environ.get("SAGE_DATA")
    rows = [
        row
        for part in source.parts
        for row in (
            _file(part, revision, folder)
            if isinstance(part, File)
            else _hub(part, revision, folder)
        )
    ]
    items, seen = [], set()
    for where, row in rows:
        try:
            if not source.keep(row):
                continue
            question, gold = row[source.question], source.gold(row)
        except KeyError as error:
            raise SageError(f"{where}: the column {error} is missing") from None
        if gold is None or not str(gold).strip():
            raise SageError(f"{where}: there is no gold answer")
        identity = f"{where.rsplit(':', 1)[0]}/{row.get('id', row.get('unique_id', row.get('idx', len(items))))}"
        if identity in seen:
            raise SageError(f"{where}: the id {identity} occurs twice")
        seen.add(identity)
        items.append((Item(identity, str(question), str(gold).strip()), row))
    if revision is None and len(items) != source.rows:
        raise SageError(
            f"the data set {name} should have {source.rows} problems and has {len(items)}: its files were changed"
        )
    return items


def _file(file: File, revision: str | None, folder: str | Path | None) -> list[tuple[str, dict]]:
    local = Path(folder) / file.local if folder else None
    if revision is None and local is not None and local.is_file():
        return _json_lines(
            file.local,
            _checked(
                file,
                local.read_bytes(),
                "put the original into the folder in SAGE_DATA, or remove it there to have it fetched",
            ),
        )
    kept = paths.build("data") / (revision or file.revision) / file.local
    if kept.is_file():
        data, remedy = (
            kept.read_bytes(),
            "remove it from the folder data of the build to have it fetched again",
        )
    else:
        data, remedy = (
            _fetch(file, revision),
            "it was changed at its source; name a revision in the profile to take another one on purpose",
        )
    if revision is None:
        _checked(file, data, remedy)
    rows = _json_lines(file.local, data)
    if not kept.is_file():
        write_bytes(kept, data)
    return rows


def _checked(file: File, data: bytes, remedy: str) -> bytes:
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise SageError(
            f"the data file {file.local} does not have the checksum of the pinned file: {remedy}"
        )
    return data


def _fetch(file: File, revision: str | None) -> bytes:
    url = file.url.format(revision=revision or file.revision)
    try:
        with urlopen(url, timeout=PATIENCE) as answer:
            return answer.read()
    except (OSError, HTTPException) as error:  # HTTPException: an answer that broke off
        raise SageError(
            f"the data file {file.local} could not be fetched from {url} ({error}): connect to the network, or set SAGE_DATA to a folder that holds it"
        ) from None


def _hub(part: Hub, revision: str | None, folder: str | None) -> list[tuple[str, dict]]:
    path = Path(folder) / part.local if folder else None
    if revision is None and path is not None and path.is_file():
        return _json_lines(part.local, path.read_bytes())
    from datasets import load_dataset

    try:
        return [
            (f"{part.repository}:{i}", row)
            for i, row in enumerate(
                load_dataset(
                    part.repository,
                    part.configuration,
                    split=part.split,
                    revision=revision or part.revision,
                ),
                1,
            )
        ]
    except Exception as error:
        raise SageError(
            f"{part.repository} could not be loaded from the hub ({type(error).__name__}): connect to the network, "
            f"or set SAGE_DATA to a folder that holds {part.local}"
        ) from error


def _json_lines(name: str, data: bytes) -> list[tuple[str, dict]]:
    rows = []
    for number, line in enumerate(data.decode().split("\n"), 1):
        if line.strip():
            try:
                rows.append((f"{name}:{number}", json.loads(line)))
            except json.JSONDecodeError:
                raise SageError(
                    f"{name}, line {number} is not valid JSON (half-written?): fetch the file again"
                ) from None
    return rows
