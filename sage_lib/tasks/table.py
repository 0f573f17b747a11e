"""Every task by name. A new one is a module with a class, as ``task.py`` says, and a line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_lib.tasks.countdown import Countdown
from sage_lib.tasks.graph_color import GraphColor
from sage_lib.tasks.knights_knaves import KnightsKnaves
from sage_lib.tasks.local_file import LocalFile
from sage_lib.tasks.public_sets import SOURCES, PublicSet
from sage_lib.tasks.reasoning_gym import ReasoningGym
from sage_lib.tasks.task import Task
from sage_lib.tasks.word_problems import WordProblems
from sage_lib.validation import make, pick, unknown

TASKS: dict[str, type[Task]] = {
    "countdown": Countdown,
    "graph_color": GraphColor,
    "gsm_symbolic": WordProblems,
    "knights_knaves": KnightsKnaves,
    "reasoning_gym": ReasoningGym,
    "file": LocalFile,
    **dict.fromkeys(SOURCES, PublicSet),
}


def task_of(name: str) -> type[Task]:
    """Return the class of a task; SageError for an unknown name."""
    return pick(name, TASKS, "data", "task")


def make_task(
    name: str,
    raw: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    folder: str | Path = "",
    where: str = "data",
) -> Task:
    """Build a task from a line of a profile.

    SageError for an unknown task, and for an unknown, missing or wrong setting.

    Args:
        name: a key of :data:`TASKS`.
        raw: the settings that the line names.
        defaults: the settings that the profile has for all lines of this task.
        folder: the profile's; relative paths are below it.
        where: the place of the line. An error begins with it.
    """
    cls, defaults = pick(name, TASKS, where, "task"), defaults or {}
    fields = {field.name for field in dataclasses.fields(cls)}
    fields -= {"name", *cls.FILLED}
    for key in (*raw, *defaults):
        if key not in fields:
            raise unknown(where, key, sorted({*fields, "rows", "seed"} - {key}))
    context = {**defaults, "folder": str(folder)}
    filled = {key: context[source] for key, source in cls.FILLED.items() if source in context}
    return make(cls, {"name": name, **defaults, **raw, **filled}, where)
