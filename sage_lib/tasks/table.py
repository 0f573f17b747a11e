"""Every task by name. A new one is a module with the members of :class:`Task`, and a line here."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sage_lib.errors import SageError
from sage_lib.tasks import countdown, knights_knaves, local_file, public_sets, word_problems
from sage_lib.tasks.problem import Demonstration, Problem, TaskSettings, default
from sage_lib.tasks.verifier import Verifier


class Task(Protocol):
    """What a module of tasks has. ``settings`` is always an instance of its own ``Settings``."""

    @property
    def Settings(self) -> type[TaskSettings]:
        """Dataclass of what a profile can say; refuses values that make no sense."""

    @property
    def LOGGED(self) -> tuple[str, ...]:
        """Names among ``measures`` whose shares RL logs as task/NAME."""

    @property
    def COUNTED(self) -> tuple[str, ...]:
        """Names among ``measures`` whose counts an evaluation writes into counts.csv."""

    def label(self, settings: Any) -> str:
        """The data set's name in tables and figures."""

    def problems(
        self,
        settings: Any,
        rows: int,
        seed: int,
        exclude: frozenset[str] = frozenset(),
        revision: str | None = None,
    ) -> list[Problem]:
        """The first ``rows`` problems none of whose questions is in ``exclude``.

        A function of its arguments alone. ``seed`` is for tasks that are generated, ``revision``
        for sets that are fetched. Raises SageError where there are none to be had; a set that has
        fewer than ``rows`` gives all of them.
        """

    def demonstrations(
        self,
        settings: Any,
        rows: int,
        seed: int,
        exclude: frozenset[str] = frozenset(),
        revision: str | None = None,
        *,
        count_tokens: Callable[[str], int],
        max_seq_length: int,
    ) -> list[Demonstration]:
        """Worked examples for supervised fine-tuning, as :meth:`problems` otherwise.

        Where texts have any length, question and working fit half of ``max_seq_length`` by
        ``count_tokens`` (Appendix E.2). Raises SageError for a task that has none.
        """

    def could_draw(self, settings: Any, problem: Problem) -> bool:
        """Whether a stream with these settings could hold ``problem``, which may be of any task:
        what is then to be held out of it."""

    def require_golds(self, problems: Sequence[Problem], verifier: Verifier) -> None:
        """SageError for the first gold that no answer could ever equal."""

    def judge(
        self, problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
    ) -> list[bool]:
        """Whether each answer is correct for the problem beside it; an answer of None is not."""

    def measures(self, problem: Problem, text: str, correct: bool) -> dict[str, bool]:
        """What the task reads off one completion besides its verdict ``correct``; {} if nothing.

        ``text`` is what follows the generation prompt. Metrics, never the reward.
        """

    def completions(self, problem: Problem) -> list[tuple[str, str, str]]:
        """(way, working, answer) of every valid completion; [] where they cannot be listed."""


TASKS: dict[str, Task] = {
    "countdown": countdown,
    "gsm_symbolic": word_problems,
    "knights_knaves": knights_knaves,
    "file": local_file,
    **dict.fromkeys(public_sets.SOURCES, public_sets),
}


def task_of(name: str) -> Task:
    """The module of a task; SageError for an unknown name, with the list of what there is."""
    if name not in TASKS:
        raise SageError(f"there is no data set {name!r}: choose one of {', '.join(TASKS)}")
    return TASKS[name]


def check_settings(
    name: str,
    given: Mapping[str, Any],
    shared: Mapping[str, Any] | None = None,
    folder: str | Path = "",
) -> TaskSettings:
    """The settings of the task ``name``, as a line of a profile gives them.

    Args:
        given: what the line says besides the name, and besides what every line has (rows, seed,
            revision and so on, which are not the task's).
        shared: what the profile says for all lines of this task: taken where the line says nothing.
        folder: that relative paths are below.

    Raises:
        SageError: unknown task, or an unknown, missing or mistyped setting, or one without meaning.
    """
    task = task_of(name)
    fields = {field.name: field for field in dataclasses.fields(task.Settings)}
    written = _written(task)
    known = ", ".join(written) or "none"
    shared = shared or {}
    for key in (*given, *shared):
        if key not in written:
            raise SageError(f"the task {name} has no setting {key!r}; its settings are: {known}")
    values = {**shared, **given}
    for key, field in written.items():
        if key not in values and default(field) is dataclasses.MISSING:
            raise SageError(f"the task {name} needs the setting {key!r}; its settings are: {known}")
    context = {**shared, "folder": str(folder)}
    for key, field in fields.items():
        source = field.metadata.get("filled")
        if source in context:
            values[key] = context[source]
    expected = typing.get_type_hints(task.Settings)
    checked = {key: _typed(value, expected[key], name, key) for key, value in values.items()}
    return task.Settings(name=name, **checked)


def _written(task: Task) -> dict[str, dataclasses.Field]:
    """The settings that a profile can write, the name apart."""
    return {
        field.name: field
        for field in dataclasses.fields(task.Settings)
        if field.name != "name" and "filled" not in field.metadata
    }


def _typed(value: Any, expected: Any, task: str, key: str) -> Any:
    """``value`` as ``expected`` (a type, a union of types, dict[str, float] or tuple[str, ...]);
    whole numbers may stand for others."""
    origin = typing.get_origin(expected)
    choices = (
        typing.get_args(expected) if origin in (typing.Union, types.UnionType) else (expected,)
    )
    for choice in choices:
        if typing.get_origin(choice) is dict and isinstance(value, Mapping):
            inner = typing.get_args(choice)[1]
            return {str(k): _typed(v, inner, task, f"{key}.{k}") for k, v in value.items()}
        if typing.get_origin(choice) is tuple and isinstance(value, (list, tuple)):
            return tuple(_typed(v, typing.get_args(choice)[0], task, key) for v in value)
        if choice is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(choice, type) and type(value) is choice and value == value:  # not nan
            return value
    of_parts = {dict: "a section of numbers", tuple: "a list of texts"}
    words = " or ".join(
        _WORDS.get(choice) or of_parts[typing.get_origin(choice) or choice] for choice in choices
    )
    raise SageError(f"the setting {key} of the task {task} must be {words}, not {value!r}")


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}
