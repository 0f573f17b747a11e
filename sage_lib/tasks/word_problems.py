"""Word problems in the style of GSM8K, generated and seeded.

GSM-Symbolic's templates, as the package reasoning-gym has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.tasks.problem import (
    Demonstration,
    Problem,
    TaskSettings,
    no_completions,
    no_measures,
    no_revision,
)
from sage_lib.tasks.verifier import judge_by_math, require_math_golds

#: Problems that one seed makes; reasoning-gym plans all of them at once.
SIZE = 20_000
LOGGED: tuple[str, ...] = ()
COUNTED: tuple[str, ...] = ()
judge = judge_by_math
require_golds = require_math_golds
measures = no_measures
completions = no_completions


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """Which problems a stream has."""

    name: str = "gsm_symbolic"
    longest: int | None = None  # characters of the longest working; shorter ones are simpler

    def __post_init__(self) -> None:
        if self.longest is not None and self.longest < 1:
            raise SageError(f"gsm_symbolic's longest must be 1 or more, not {self.longest}")


def label(settings: Settings) -> str:
    """The task's name."""
    return settings.name


def problems(
    settings: Settings,
    rows: int,
    seed: int,
    exclude: frozenset[str] = frozenset(),
    revision: str | None = None,
) -> list[Problem]:
    """The first ``rows`` problems of the stream of this seed."""
    no_revision(settings, revision)
    dataset = label(settings)
    return [
        Problem(identity, dataset, worked.question, worked.answer, settings.name)
        for identity, worked in itertools.islice(stream(settings, seed, exclude), rows)
    ]


def demonstrations(
    settings: Settings,
    rows: int,
    seed: int,
    exclude: frozenset[str] = frozenset(),
    revision: str | None = None,
    *,
    count_tokens: Callable[[str], int],
    max_seq_length: int,
) -> list[Demonstration]:
    """The same problems with their working; ``longest`` alone bounds their length."""
    no_revision(settings, revision)
    chosen = itertools.islice(stream(settings, seed, exclude), rows)
    return [worked for _, worked in chosen]


def could_draw(settings: Settings, problem: Problem) -> bool:
    """Whether it is made from the same templates, or stands in a file, which may hold such ones."""
    return problem.task in (settings.name, "file")


def stream(
    settings: Settings, seed: int, exclude: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Demonstration]]:
    """A seeded stream of ids and distinct worked problems, none with a question in ``exclude``.

    A function of its arguments alone. Raises SageError when it runs dry, after :data:`SIZE` tries.
    """
    import reasoning_gym

    made = reasoning_gym.create_dataset("gsm_symbolic", size=SIZE, seed=seed)
    seen = set(exclude)
    for index in range(SIZE):
        entry = made[index]
        question = " ".join(entry["question"].split())
        working = entry["metadata"]["answer_cot"].partition("####")[0].strip()
        too_long = settings.longest is not None and len(working) > settings.longest
        if question in seen or too_long:
            continue
        seen.add(question)
        yield f"{seed}-{index}", Demonstration(question, working, str(entry["answer"]))
    raise SageError(f"the word problems ran out after {len(seen) - len(exclude)}: ask for fewer")
