"""A data set of one's own: a JSONL or CSV file, judged by Math-Verify or by a function.

In a profile it is a line such as
``{name: file, path: my.jsonl, question: problem, gold: answer, rows: 100, seed: 0}``.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sage_lib.errors import SageError
from sage_lib.tasks import lines
from sage_lib.tasks.problem import (
    Demonstration,
    Problem,
    TaskSettings,
    no_completions,
    no_measures,
    no_revision,
)
from sage_lib.tasks.verifier import Verifier, judge_by_math, require_math_golds

LOGGED: tuple[str, ...] = ()
COUNTED: tuple[str, ...] = ()
MATH = "math"
measures = no_measures
completions = no_completions

#: What a judge's function is: of the gold and the answer, both as text, whether they are equal.
Judge = Callable[[str, str], bool]

_FUNCTION = re.compile(r"\w+(\.\w+)*:\w+")
_FORMATS = {".jsonl": lines.json_lines, ".csv": lines.csv_lines}


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """The file, its columns, and who judges an answer."""

    name: str = "file"
    path: str  # of the file, .jsonl or .csv; a relative one is below the profile's folder
    question: str = "question"  # column of the questions
    gold: str = "answer"  # column of the gold answers
    id: str | None = None  # column of ids; null: lines are numbered from 1
    working: str | None = None  # column of worked solutions, for SFT
    judge: str = MATH  # or package.module:function, called as f(gold, answer) -> bool
    label: str | None = None  # in tables and figures; null: the file's name without its ending
    #: The profile's folder.
    folder: str = field(default="", metadata={"filled": "folder"})

    def __post_init__(self) -> None:
        if Path(self.path).suffix not in _FORMATS:
            raise SageError(
                f"the data file {self.path!r} is not read: its name must end in "
                f"{' or '.join(_FORMATS)}"
            )
        if self.judge != MATH and not _FUNCTION.fullmatch(self.judge):
            raise SageError(
                f"the judge of a file is {MATH} or package.module:function, not {self.judge!r}"
            )

    @property
    def file(self) -> Path:
        """Where the file lies."""
        return Path(self.folder).expanduser() / Path(self.path).expanduser()

    def identity(self) -> dict[str, Any]:
        """The content in place of the path, so that a changed file is noticed and a moved one is
        not; no content where there is no file."""
        chosen = self.given()
        del chosen["path"]
        content = self.file.read_bytes() if self.file.is_file() else b""
        return {**chosen, "label": label(self), "content": hashlib.sha256(content).hexdigest()}


def label(settings: Settings) -> str:
    """The label, or the file's name without its ending."""
    return settings.label or Path(settings.path).stem


def problems(
    settings: Settings,
    rows: int,
    seed: int,
    exclude: frozenset[str] = frozenset(),
    revision: str | None = None,
) -> list[Problem]:
    """The first ``rows`` lines; ``seed`` changes nothing. The ``detail`` is the judge.

    Raises SageError: no such file, a line that cannot be read, a missing column, a question or gold
    that is empty, an id that occurs twice, a judge that cannot be had.
    """
    no_revision(settings, revision)
    if settings.judge != MATH:
        _function(settings.judge)
    allowed = [p for p, _ in _read(settings) if p.question not in exclude]
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
    """Lines with the column ``working`` whose text fits half the context (Appendix E.2)."""
    no_revision(settings, revision)
    if settings.working is None:
        raise SageError(
            f"the file {settings.path} is to teach, and no column is named that holds its worked "
            "solutions: add working: COLUMN"
        )
    found: list[Demonstration] = []
    for problem, line in _read(settings):
        where = f"{settings.path}, problem {problem.id}"
        value = lines.column(where, line, settings.working)
        working = lines.text(where, value, f"text in the column {settings.working!r}")
        fits = count_tokens(problem.question + working) <= max_seq_length / 2
        if len(found) < rows and fits and problem.question not in exclude:
            found.append(Demonstration(problem.question, working, problem.gold))
    return found


def could_draw(settings: Settings, problem: Problem) -> bool:
    """Whether the file holds the question."""
    return any(own.question == problem.question for own, _ in _read(settings))


def require_golds(problems: Sequence[Problem], verifier: Verifier) -> None:
    """SageError for the first gold that Math-Verify cannot parse, where it judges."""
    require_math_golds([p for p in problems if p.detail == MATH], verifier)


def judge(
    problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
) -> list[bool]:
    """What Math-Verify, or the function named by the problem's line, says of each answer."""
    verdicts = [False] * len(problems)
    by_math = [n for n, problem in enumerate(problems) if problem.detail == MATH]
    math_problems = [problems[n] for n in by_math]
    math_answers = [answers[n] for n in by_math]
    math_verdicts = judge_by_math(math_problems, math_answers, verifier)
    for n, verdict in zip(by_math, math_verdicts, strict=True):
        verdicts[n] = verdict
    for n, (problem, answer) in enumerate(zip(problems, answers, strict=True)):
        if problem.detail != MATH and answer is not None:
            verdicts[n] = _ask(problem.detail, problem.gold, answer)
    return verdicts


def _ask(judge: str, gold: str, answer: str) -> bool:
    """The function's verdict. A fault in it stops the run: a wrong reward would not."""
    function = _function(judge)
    try:
        verdict = function(gold, answer)
    except Exception as error:
        raise SageError(
            f"the judge {judge} raised {error!r} for the gold {gold!r} and the answer {answer!r}: "
            "let it return False for answers that it does not understand"
        ) from error
    if not isinstance(verdict, (bool, np.bool_)):
        raise SageError(f"the judge {judge} must return True or False, not {verdict!r}")
    return bool(verdict)


@lru_cache(maxsize=32)
def _function(judge: str) -> Judge:
    module, _, name = judge.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise SageError(
            f"the judge {judge} cannot be imported ({error}): install its package, or add its "
            "folder to PYTHONPATH"
        ) from None
    except AttributeError:
        raise SageError(
            f"the judge {judge} is unknown: {module} has no function {name!r}"
        ) from None
    except Exception as error:
        raise SageError(f"the judge {judge} cannot be imported: {error!r}") from error
    if not callable(found):
        raise SageError(f"the judge {judge} is not a function, but {found!r}")
    judged: Judge = found
    return judged


def _read(settings: Settings) -> tuple[tuple[Problem, dict[str, Any]], ...]:
    """Every problem with its line, checked."""
    if not settings.file.is_file():
        raise SageError(
            f"there is no data file {settings.file}: the path of a file is absolute, or below the "
            "profile's folder"
        )
    status = settings.file.stat()
    return _read_once(settings, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _read_once(
    settings: Settings, changed: int, size: int
) -> tuple[tuple[Problem, dict[str, Any]], ...]:
    name, dataset = settings.file.name, label(settings)
    read = _FORMATS[settings.file.suffix]
    found: list[tuple[Problem, dict[str, Any]]] = []
    seen: set[str] = set()
    for where, line in read(name, settings.file.read_bytes()):
        question = lines.text(where, lines.column(where, line, settings.question), "question")
        gold = lines.text(where, lines.column(where, line, settings.gold), "gold answer")
        identity = str(len(found) + 1)
        if settings.id is not None:
            identity = lines.text(where, lines.column(where, line, settings.id), "id")
        lines.new_id(where, identity, seen)
        problem = Problem(identity, dataset, question, gold, settings.name, settings.judge)
        found.append((problem, line))
    if not found:
        raise SageError(f"the data file {name} holds no problems")
    return tuple(found)
