"""Whether a completion's last answer is correct: training and evaluation ask the same function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from sage_lib.errors import SageError
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.tasks.task import ExactTask
from sage_lib.tasks.verifier import Verifier, last_answer


def judge(
    problems: Sequence[Problem],
    completions: Sequence[str],
    verifier: Verifier,
    boxed: bool = False,
) -> list[bool]:
    r"""Return of each completion whether its last answer is correct.

    There is a problem, of any task, for each completion. With ``boxed`` the last box, \boxed{...},
    is the answer where no solution markers are.
    """
    answers: list[str | None] = []
    for problem, text in zip(problems, completions, strict=True):
        answer = task_of(problem.task).last_answer(text)
        answers.append(last_answer(text, boxed=True) if boxed and answer is None else answer)
    correct: dict[int, bool] = {}
    for name in dict.fromkeys(problem.task for problem in problems):
        numbers = [number for number, problem in enumerate(problems) if problem.task == name]
        pairs = [problems[n] for n in numbers], [answers[n] for n in numbers]
        correct.update(zip(numbers, task_of(name).are_correct(*pairs, verifier), strict=True))
    return [correct[number] for number in range(len(problems))]


def require_golds(problems: Sequence[Problem], verifier: Verifier) -> None:
    """Raise SageError for the first gold that no answer could equal: before hours of sampling."""
    for name in dict.fromkeys(problem.task for problem in problems):
        task_of(name).require_golds([p for p in problems if p.task == name], verifier)


def require_steps(problems: Sequence[Problem]) -> None:
    """Raise SageError where the work of a problem cannot be checked, for the reward valid."""
    if not all(issubclass(task_of(name), ExactTask) for name in {p.task for p in problems}):
        raise SageError("the reward valid needs a task whose steps are checked, such as countdown")


def digest(rows: Iterable[Problem | Mapping | str]) -> str:
    """Return the hash (16 hex digits) of problems, training rows or texts in order."""
    sha256 = hashlib.sha256()
    for row in rows:
        content: object = row
        if isinstance(row, Problem):
            content = [row.task, row.dataset, row.id, row.question, row.gold]
        sha256.update(json.dumps(content, sort_keys=True).encode())
    return sha256.hexdigest()[:16]
