"""What every task gives: problems, worked examples, and settings of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sage_lib.errors import SageError


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer.

    ``id`` is unique within a ``dataset`` (the label in tables and figures); ``task`` is a name of
    ``table.TASKS``; ``detail`` is what the task's own checks need, and nobody else's business.
    """

    id: str
    dataset: str
    question: str
    gold: str
    task: str
    detail: Any = None


@dataclass(frozen=True)
class Demonstration:
    """A worked example for supervised fine-tuning."""

    question: str
    working: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What a line of data in a profile says about its task; each task adds fields of its own.

    A field with metadata ``filled`` is never written into a profile: the caller fills it, from what
    holds for the whole profile.
    """

    name: str  # of the task, a key of ``table.TASKS``

    def given(self) -> dict[str, Any]:
        """The settings that are not at their defaults, the name first: for records."""
        chosen = {"name": self.name}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "filled" not in field.metadata and value != default(field):
                chosen[field.name] = value
        return chosen

    def identity(self) -> dict[str, Any]:
        """What decides which problems the settings stand for, as JSON: for fingerprints."""
        return self.given()


def default(field: dataclasses.Field) -> Any:
    """The default value of a dataclass field; ``dataclasses.MISSING`` where it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def plain(
    questions: Sequence[str | Problem], golds: Sequence[str | int] = (), dataset: str = "questions"
) -> list[Problem]:
    """Problems from a plain list of questions, to be judged by Math-Verify where there are golds.

    What is a Problem already stays as it is; the others are numbered from 1. Without ``golds`` they
    can be sampled, not judged. Raises SageError for another number of golds than of questions.
    """
    if golds and len(golds) != len(questions):
        raise SageError(
            f"{len(questions)} questions need as many gold answers, not {len(golds)}: "
            "give one each, or none at all"
        )
    found = []
    for number, question in enumerate(questions, 1):
        if isinstance(question, Problem):
            found.append(question)
            continue
        gold = str(golds[number - 1]) if golds else ""
        found.append(Problem(str(number), dataset, question, gold, task="file", detail="math"))
    return found


def no_revision(settings: TaskSettings, revision: str | None) -> None:
    """SageError where a task that is made here is asked for a revision."""
    if revision is not None:
        raise SageError(f"the task {settings.name} has no revisions: leave out {revision!r}")


def no_measures(problem: Problem, text: str, correct: bool) -> dict[str, bool]:
    """``measures`` of a task that reads nothing but the answer."""
    return {}


def no_completions(problem: Problem) -> list[tuple[str, str, str]]:
    """``completions`` of a task whose valid completions cannot be listed."""
    return []
