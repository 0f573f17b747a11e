"""A user's data set: a JSONL or CSV file, judged by Math-Verify or by a function. A profile says
``{name: file, path: my.jsonl, question: problem, gold: answer, rows: 100, seed: 0}``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib import consent
from sage_lib.errors import SageError
from sage_lib.tasks import lines
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.task import Task
from sage_lib.tasks.verifier import Verifier
from sage_lib.validation import STRICT

MATH = "math"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LocalFile(Task):
    FILLED: ClassVar[Mapping[str, str]] = {"folder": "folder"}

    name: Literal["file"] = "file"
    #: Of the file, .jsonl or .csv; a relative one is below the profile's folder.
    path: Annotated[str, Field(pattern=r"\.(jsonl|csv)$")]
    question: str = "question"  # column of the questions
    gold: str = "answer"  # column of the gold answers
    id: str | None = None  # column of ids; null: lines are numbered from 1
    working: str | None = None  # column of worked solutions, for SFT
    #: Or package.module:function, called as f(gold, answer) -> bool, once the user consents.
    judge: Annotated[str, Field(pattern=r"^(math|\w+(\.\w+)*:\w+)$")] = MATH
    label: str | None = None  # in tables and figures; null: the file's name without its ending
    folder: str = ""  # the profile's

    @property
    def file(self) -> Path:
        return Path(self.folder).expanduser() / Path(self.path).expanduser()

    @property
    def display_label(self) -> str:
        return self.label or Path(self.path).stem

    def identity(self) -> dict[str, Any]:
        """Return the content in place of the path: a moved file is the same, a changed one not."""
        changed = self.changes()
        del changed["path"]
        content = self.file.read_bytes() if self.file.is_file() else b""
        content_hash = hashlib.sha256(content).hexdigest()
        return {**changed, "label": self.display_label, "content": content_hash}

    def stream(self, seed: int, exclude: frozenset[str], revision: str | None) -> Iterator[Problem]:
        """Yield the problems in the order of the lines, after a look at the file and the judge."""
        if self.judge != MATH:
            consent.imported(self.judge, "judge")
        return (problem for problem in self._read() if problem.question not in exclude)

    def could_draw(self, problem: Problem) -> bool:
        return any(line.question == problem.question for line in self._read())

    @classmethod
    def is_correct(cls, problem: Problem, answer: str | None) -> bool | None:
        """Return what the line's function says. A fault in it stops the run: a wrong reward would
        not."""
        if problem.detail == MATH:
            return None
        try:
            judge = consent.imported(problem.detail, "judge")
            verdict = answer is not None and judge(problem.gold, answer)
            if not isinstance(verdict, (bool, np.bool_)):
                raise TypeError(f"it must return True or False, not {verdict!r}")
        except SageError:
            raise
        except Exception as error:
            raise SageError(
                f"the judge {problem.detail} raised {error!r} for the gold {problem.gold!r} and "
                f"the answer {answer!r}: let it return False for answers that it cannot read"
            ) from error
        return bool(verdict)

    @classmethod
    def require_golds(cls, problems: Sequence[Problem], verifier: Verifier) -> None:
        # A function may take answers of another form than its golds have.
        super().require_golds([p for p in problems if p.detail == MATH], verifier)

    def _read(self) -> tuple[Problem, ...]:
        if not self.file.is_file():
            raise SageError(f"there is no data file {self.file}: correct its path")
        status = self.file.stat()
        return _read_once(self, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _read_once(task: LocalFile, changed: int, size: int) -> tuple[Problem, ...]:
    """Return the problems of a file. Its time and size tell a changed file from the cached one."""
    problems, ids, label = list[Problem](), set[str](), task.display_label
    golds: dict[str, str] = {}
    for place, line in lines.read(task.file.name, task.file.read_bytes()):
        question = lines.cell(place, line, task.question, "question")
        gold = lines.cell(place, line, task.gold, "gold answer")
        identity, working = str(len(problems) + 1), None
        if task.id is not None:
            identity = lines.cell(place, line, task.id, "id")
        if task.working is not None:
            working = lines.cell(place, line, task.working, "worked solution")
        if identity in ids:
            raise SageError(f"{place}: the id {identity} occurs twice")
        if golds.setdefault(question, gold) != gold:
            raise SageError(f"{place}: its question stands above with another gold answer")
        ids.add(identity)
        problems.append(Problem(identity, label, question, gold, task.name, task.judge, working))
    if not problems:
        raise SageError(f"the data file {task.file.name} holds no problems")
    return tuple(problems)
