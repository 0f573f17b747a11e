"""The one decision of training and evaluation: whether a completion's last answer is correct."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of
from sage_lib.tasks.verifier import Verifier, last_answer


def judge(
    problems: Sequence[Problem], completions: Sequence[str], verifier: Verifier
) -> list[bool]:
    """Whether the last answer of each completion is correct for the problem beside it.

    ``problems`` and ``completions`` (texts) have the same length, as has the result.
    """
    if len(problems) != len(completions):
        raise ValueError(f"{len(problems)} problems with {len(completions)} completions")
    answers = [last_answer(text) for text in completions]
    verdicts = [False] * len(problems)
    for task, numbers in _by_task(problems).items():
        asked = [problems[n] for n in numbers]
        given = [answers[n] for n in numbers]
        found = task_of(task).judge(asked, given, verifier)
        for n, verdict in zip(numbers, found, strict=True):
            verdicts[n] = verdict
    return verdicts


def require_golds(problems: Sequence[Problem], verifier: Verifier) -> None:
    """Raise SageError for the first gold that no answer could equal: before hours of sampling."""
    for task, numbers in _by_task(problems).items():
        task_of(task).require_golds([problems[n] for n in numbers], verifier)


def digest(rows: Iterable[Problem | Mapping | str]) -> str:
    """Hash (16 hex digits) of problems, training rows or texts in order: what a run has read."""
    found = hashlib.sha256()
    for row in rows:
        content: object = row
        if isinstance(row, Problem):
            content = [row.task, row.dataset, row.id, row.question, row.gold]
        found.update(json.dumps(content, sort_keys=True).encode())
    return found.hexdigest()[:16]


def _by_task(problems: Sequence[Problem]) -> dict[str, list[int]]:
    """The numbers of the problems of each task, in order."""
    found: dict[str, list[int]] = {}
    for number, problem in enumerate(problems):
        found.setdefault(problem.task, []).append(number)
    return found
