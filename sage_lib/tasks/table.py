"""Every task by name. A new one is a module with these members, and a line in :data:`TASKS`.

- ``Settings``: a pydantic dataclass of what a profile can say; ``label(settings)``: the data set's
  name in tables and figures
- ``problems(settings, rows, seed, exclude, revision)``: the first ``rows`` problems whose questions
  are not in ``exclude``, a function of its arguments alone (``problem.problems_of``)
- ``demonstrations``: the same with working, for SFT (``problem.demonstrations_of``)
- ``could_draw(settings, problem)``: whether a problem, of any task, could stand in such a stream,
  and is to be held out of it
- ``require_golds(problems, verifier)``: SageError for the first gold that no answer could equal
- ``judge(problems, answers, verifier)``: whether each answer is correct; None is not
- ``measures(problem, text, correct)``: what is read off a completion besides its verdict, never the
  reward: ``LOGGED`` names the shares that RL logs, ``COUNTED`` the counts in counts.csv
- ``completions(problem)``: (way, working, answer) of every valid completion, [] where unknown

And where a task needs them:

- ``words`` of its settings: those of its texts that the tiny model's vocabulary lacks
- ``last_answer(text)``: the answer in a completion, where it is not ``verifier.last_answer``'s
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from sage_lib.errors import SageError
from sage_lib.tasks import (
    countdown,
    graph_color,
    knights_knaves,
    local_file,
    public_sets,
    reasoning_gym,
    word_problems,
)
from sage_lib.tasks.problem import TaskSettings

TASKS: dict[str, Any] = {
    "countdown": countdown,
    "graph_color": graph_color,
    "gsm_symbolic": word_problems,
    "knights_knaves": knights_knaves,
    "reasoning_gym": reasoning_gym,
    "file": local_file,
    **dict.fromkeys(public_sets.SOURCES, public_sets),
}


def task_of(name: str) -> Any:
    """The module of a task; SageError for an unknown name."""
    if name not in TASKS:
        raise SageError(f"there is no data set {name!r}: choose one of {', '.join(TASKS)}")
    return TASKS[name]


def check_settings(
    name: str,
    given: Mapping[str, Any],
    shared: Mapping[str, Any] | None = None,
    folder: str | Path = "",
) -> TaskSettings:
    """The settings of the task ``name``, of what a line of a profile has ``given``.

    ``shared`` holds for all lines of this task; relative paths are below ``folder``. SageError for
    an unknown task, and for an unknown, missing or mistyped setting.
    """
    settings: type[TaskSettings] = task_of(name).Settings
    shared = shared or {}
    known = {field.name for field in dataclasses.fields(settings)} - {"name", *settings.FILLED}
    for key in (*given, *shared):
        if key not in known:
            listed = ", ".join(sorted({*known, "rows", "seed"}))
            raise SageError(f"the task {name} has no setting {key!r}; its settings are: {listed}")
    context = {**shared, "folder": str(folder)}
    filled = {key: context[source] for key, source in settings.FILLED.items() if source in context}
    try:
        return settings(name=name, **{**shared, **given, **filled})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise SageError(f"the task {name} needs the setting {key}") from None
        raise SageError(
            f"the setting {key} of the task {name} is {first['input']!r}: {first['msg']}"
        ) from None
