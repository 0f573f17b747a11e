"""A problem, and a worked example of one."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A question with its gold answer."""

    id: str  # unique within a data set
    dataset: str  # the data set's name in tables
    question: str
    gold: str
    task: str  # a name of table.TASKS
    detail: Any = None  # what the checks of the task read
    working: str | None = None  # how the gold is reached, where the data set says so


@dataclass(frozen=True)
class Demonstration:
    """A worked example for supervised fine-tuning."""

    question: str
    working: str
    answer: str
