"""A data set of one's own: a JSONL or CSV file, judged by Math-Verify or by a function. A profile
says ``{name: file, path: my.jsonl, question: problem, gold: answer, rows: 100, seed: 0}``."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.tasks import lines
from sage_lib.tasks import problem as shared
from sage_lib.tasks.problem import Problem, TaskSettings
from sage_lib.tasks.verifier import Verifier, judge_by_math, require_math_golds

LOGGED = COUNTED = ()
MATH = "math"
measures, completions = shared.no_measures, shared.no_completions


@dataclass(frozen=True, kw_only=True, config=shared.STRICT)
class Settings(TaskSettings):
    FILLED: ClassVar[Mapping[str, str]] = {"folder": "folder"}

    name: str = "file"
    #: Of the file, .jsonl or .csv; a relative one is below the profile's folder.
    path: Annotated[str, Field(pattern=r"\.(jsonl|csv)$")]
    question: str = "question"  # column of the questions
    gold: str = "answer"  # column of the gold answers
    id: str | None = None  # column of ids; null: lines are numbered from 1
    working: str | None = None  # column of worked solutions, for SFT
    #: Or package.module:function, called as f(gold, answer) -> bool.
    judge: Annotated[str, Field(pattern=r"^(math|\w+(\.\w+)*:\w+)$")] = MATH
    label: str | None = None  # in tables and figures; null: the file's name without its ending
    folder: str = ""  # the profile's

    @property
    def file(self) -> Path:
        return Path(self.folder).expanduser() / Path(self.path).expanduser()

    def identity(self) -> dict[str, Any]:
        """The content in place of the path: a changed file is noticed, a moved one is not."""
        chosen = self.given()
        del chosen["path"]
        content = self.file.read_bytes() if self.file.is_file() else b""
        return {**chosen, "label": label(self), "content": hashlib.sha256(content).hexdigest()}


def label(settings: Settings) -> str:
    return settings.label or Path(settings.path).stem


def stream(
    settings: Settings, seed: int, exclude: frozenset[str], revision: str | None
) -> Iterator[Problem]:
    shared.no_revision(settings, revision)
    if settings.judge != MATH:
        _function(settings.judge)
    return (problem for problem in _read(settings) if problem.question not in exclude)


def _worked(
    settings: Settings, seed: int, exclude: frozenset[str], revision: str | None
) -> Iterator[Problem]:
    if settings.working is None:
        raise SageError(f"{settings.path} needs a column of worked solutions: add working: COLUMN")
    return stream(settings, seed, exclude, revision)


problems = shared.problems_of(stream)
demonstrations = shared.demonstrations_of(_worked)


def could_draw(settings: Settings, problem: Problem) -> bool:
    return any(own.question == problem.question for own in _read(settings))


def require_golds(problems: Sequence[Problem], verifier: Verifier) -> None:
    """SageError for the first gold that Math-Verify cannot parse, where it judges."""
    require_math_golds([p for p in problems if p.detail == MATH], verifier)


def judge(
    problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
) -> list[bool]:
    """What Math-Verify, or the function named by the problem's line, says of each answer."""
    pairs = list(zip(problems, answers, strict=True))
    by_math = [(p, answer) for p, answer in pairs if p.detail == MATH]
    found = iter(judge_by_math([p for p, _ in by_math], [a for _, a in by_math], verifier))
    return [next(found) if p.detail == MATH else _ask(p, answer) for p, answer in pairs]


def _ask(problem: Problem, answer: str | None) -> bool:
    """The function's verdict. A fault in it stops the run: a wrong reward would not."""
    try:
        verdict = answer is not None and _function(problem.detail)(problem.gold, answer)
    except Exception as error:
        raise SageError(
            f"the judge {problem.detail} raised {error!r} for the gold {problem.gold!r} and the "
            f"answer {answer!r}: let it return False for answers that it does not understand"
        ) from error
    if not isinstance(verdict, (bool, np.bool_)):
        raise SageError(f"the judge {problem.detail} must return True or False, not {verdict!r}")
    return bool(verdict)


@lru_cache(maxsize=32)
def _function(judge: str) -> Callable[[str, str], bool]:
    module, _, name = judge.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise SageError(
            f"the judge {judge} cannot be imported ({error!r}): add its folder to PYTHONPATH"
        ) from error
    if not hasattr(found, name):
        raise SageError(f"the judge {judge} is not there: {found.__file__} has no {name!r}")
    return cast(Callable, getattr(found, name))


def _read(settings: Settings) -> tuple[Problem, ...]:
    if not settings.file.is_file():
        raise SageError(f"there is no data file {settings.file}: correct its path")
    status = settings.file.stat()
    return _read_once(settings, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _read_once(settings: Settings, changed: int, size: int) -> tuple[Problem, ...]:
    name, found, seen = settings.file.name, list[Problem](), set[str]()
    for where, line in lines.read(name, settings.file.read_bytes()):
        question = lines.cell(where, line, settings.question, "question")
        gold = lines.cell(where, line, settings.gold, "gold answer")
        identity, working = str(len(found) + 1), None
        if settings.id is not None:
            identity = lines.cell(where, line, settings.id, "id")
        if settings.working is not None:
            working = lines.cell(where, line, settings.working, "worked solution")
        lines.new_id(where, identity, seen)
        common = (label(settings), question, gold, settings.name, settings.judge, working)
        found.append(Problem(identity, *common))
    if not found:
        raise SageError(f"the data file {name} holds no problems")
    return tuple(found)
