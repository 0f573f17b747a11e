"""What every task gives: problems, worked examples, settings; and the streams they come from."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pydantic.dataclasses

from sage_lib.errors import SageError

#: How pydantic checks the settings of tasks: nothing is converted, nothing unknown is taken.
STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer."""

    id: str  # unique within a data set
    dataset: str  # the label in tables
    question: str
    gold: str
    task: str  # a name of table.TASKS
    detail: Any = None  # what the task's own checks need
    working: str | None = None  # of a worked answer, where the data set has one


@dataclass(frozen=True)
class Demonstration:
    """A worked example for supervised fine-tuning."""

    question: str
    working: str
    answer: str


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class TaskSettings:
    """What a line of data in a profile says about its task; each task adds its own fields."""

    #: Fields that a line never names: they are filled from what holds for the whole profile.
    FILLED: ClassVar[Mapping[str, str]] = {}

    name: str  # of the task, a key of ``table.TASKS``

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the texts that the tiny model's vocabulary lacks."""
        return ()

    def given(self) -> dict[str, Any]:
        """The settings that are not at their defaults, the name first: for records."""
        chosen = {"name": self.name}
        for field in dataclasses.fields(self):
            made = field.default_factory
            usual = field.default if made is dataclasses.MISSING else made()
            if field.name not in self.FILLED and getattr(self, field.name) != usual:
                chosen[field.name] = getattr(self, field.name)
        return chosen

    def identity(self) -> dict[str, Any]:
        """What decides which problems the settings stand for, as JSON: for fingerprints."""
        return self.given()


#: (settings, seed, excluded questions, revision) -> problems, lazily and in order.
Stream = Callable[[Any, int, frozenset[str], str | None], Iterator[Problem]]


def problems_of(stream: Stream) -> Callable[..., list[Problem]]:
    """A task's function ``problems``: the first problems of its stream."""

    def problems(
        settings: Any,
        rows: int,
        seed: int,
        exclude: frozenset[str] = frozenset(),
        revision: str | None = None,
    ) -> list[Problem]:
        return list(itertools.islice(stream(settings, seed, exclude, revision), rows))

    return problems


def demonstrations_of(stream: Stream, any_length: bool = False) -> Callable[..., list]:
    """A task's function ``demonstrations``, of a stream of problems with working; unless
    ``any_length``, both fit half of the context (Appendix E.2)."""

    def demonstrations(
        settings: Any,
        rows: int,
        seed: int,
        exclude: frozenset[str] = frozenset(),
        revision: str | None = None,
        *,
        count_tokens: Callable[[str], int],
        max_seq_length: int,
    ) -> list[Demonstration]:
        worked = (
            Demonstration(p.question, p.working or "", p.gold)
            for p in stream(settings, seed, exclude, revision)
            if any_length or count_tokens(p.question + (p.working or "")) <= max_seq_length / 2
        )
        return list(itertools.islice(worked, rows))

    return demonstrations


def stream_of(drawn: Callable[[Any, int], Iterable[Problem]]) -> Stream:
    """A task's function ``stream``, of what it draws by settings and seed: without a revision."""

    def stream(
        settings: Any, seed: int, exclude: frozenset[str], revision: str | None
    ) -> Iterator[Problem]:
        no_revision(settings, revision)
        return distinct(drawn(settings, seed), exclude)

    return stream


def distinct(
    drawn: Iterable[Problem], exclude: frozenset[str], tries: int = 1000
) -> Iterator[Problem]:
    """Those of ``drawn`` whose questions are new and not in ``exclude``; SageError at the end, or
    after ``tries`` in a row that are not new."""
    seen, missed = set(exclude), 0
    for problem in drawn:
        missed = missed + 1 if problem.question in seen else 0
        if missed == tries:
            break
        if not missed:
            seen.add(problem.question)
            yield problem
    raise SageError(f"only {len(seen) - len(exclude)} different problems were found: ask for fewer")


def no_revision(settings: TaskSettings, revision: str | None) -> None:
    if revision is not None:
        raise SageError(f"the task {settings.name} has no revisions: leave out {revision!r}")


def no_measures(problem: Problem, text: str, correct: bool) -> dict[str, bool]:
    return {}


def no_completions(problem: Problem) -> list[tuple[str, str, str]]:
    return []
