"""The one decision of training and evaluation: whether a completion's last answer is correct."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from sage_lib.errors import SageError
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.tasks.verifier import Verifier, last_answer


def judge(
    problems: Sequence[Problem], completions: Sequence[str], verifier: Verifier
) -> list[bool]:
    """Whether the last answer of each completion is correct for the problem beside it."""
    pairs = []
    for problem, text in zip(problems, completions, strict=True):
        answer_in = getattr(task_of(problem.task), "last_answer", last_answer)
        pairs.append((problem, answer_in(text)))
    verdicts: dict[int, bool] = {}
    for task in dict.fromkeys(problem.task for problem in problems):
        own = [(number, *pair) for number, pair in enumerate(pairs) if pair[0].task == task]
        numbers, asked, given = zip(*own, strict=True)
        found = task_of(task).judge(asked, given, verifier)
        verdicts.update(zip(numbers, found, strict=True))
    return [verdicts[number] for number in range(len(pairs))]


def require_golds(problems: Sequence[Problem], verifier: Verifier) -> None:
    """Raise SageError for the first gold that no answer could equal: before hours of sampling."""
    for task in dict.fromkeys(problem.task for problem in problems):
        task_of(task).require_golds([p for p in problems if p.task == task], verifier)


def require_steps(problems: Sequence[Problem]) -> None:
    """Raise SageError where the work of a problem cannot be checked, for the reward valid."""
    if not all("valid" in task_of(task).LOGGED for task in {p.task for p in problems}):
        raise SageError("the reward valid needs a task whose steps are checked, such as countdown")


def digest(rows: Iterable[Problem | Mapping | str]) -> str:
    """Hash (16 hex digits) of problems, training rows or texts in order: what a run has read."""
    found = hashlib.sha256()
    for row in rows:
        content: object = row
        if isinstance(row, Problem):
            content = [row.task, row.dataset, row.id, row.question, row.gold]
        found.update(json.dumps(content, sort_keys=True).encode())
    return found.hexdigest()[:16]
