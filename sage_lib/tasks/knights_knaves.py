"""Knights and Knaves (Figure 4, out of distribution): seeded puzzles of the package reasoning-gym,
whose answers are read strictly here.

The package's own scorer passes over what it does not know: it accepts "Zoey is false and Zoey is a
knight and Noah is a knave".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sage_lib.errors import SageError
from sage_lib.tasks.problem import (
    Demonstration,
    Problem,
    TaskSettings,
    no_completions,
    no_measures,
    no_revision,
)
from sage_lib.tasks.verifier import Verifier

#: A longer answer is refused unread (characters); eight people need about 200.
LENGTH_LIMIT = 400
PEOPLE = range(2, 9)
LOGGED: tuple[str, ...] = ()
COUNTED: tuple[str, ...] = ()
measures = no_measures
completions = no_completions

_PUNCTUATION = re.compile(r"[(),;.]")
_ARTICLES = ("a", "an")
#: Tries for each puzzle that is asked for.
_TRIES = 20


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """Which puzzles there are."""

    name: str = "knights_knaves"
    people: int  # in a puzzle, 2 to 8

    def __post_init__(self) -> None:
        if self.people not in PEOPLE:
            raise SageError(
                f"Knights and Knaves puzzles have {PEOPLE.start} to {PEOPLE.stop - 1} people, "
                f"not {self.people}"
            )


def label(settings: Settings) -> str:
    """The task's name and the number of people."""
    return f"{settings.name}_{settings.people}"


def problems(
    settings: Settings,
    rows: int,
    seed: int,
    exclude: frozenset[str] = frozenset(),
    revision: str | None = None,
) -> list[Problem]:
    """``rows`` distinct puzzles, a function of the arguments alone.

    Raises SageError when so many are not found.
    """
    no_revision(settings, revision)
    dataset = label(settings)
    made = _generator(settings.people, seed)
    seen = set(exclude)
    found: list[Problem] = []
    for index in range(_TRIES * rows):
        if len(found) == rows:
            break
        entry = made[index]
        question, answer = entry["question"], entry["answer"]
        if question in seen:
            continue
        seen.add(question)
        identity = f"{settings.people}-{seed}-{index}"
        found.append(Problem(identity, dataset, question, answer, settings.name))
    if len(found) < rows:
        raise SageError(
            f"only {len(found)} different puzzles with {settings.people} people were found: "
            "ask for fewer"
        )
    return found


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
    """There are none: reasoning-gym gives puzzles without their working. Raises SageError."""
    raise SageError(
        "Knights and Knaves puzzles have no worked answers to learn from: "
        "choose another data set for sft_data"
    )


def could_draw(settings: Settings, problem: Problem) -> bool:
    """Whether it is such a puzzle, or stands in a file, which may hold some."""
    return problem.task in (settings.name, "file")


def require_golds(problems: Sequence[Problem], verifier: Verifier) -> None:
    """Nothing to require: the gold is the generator's own, and no formula."""


def judge(
    problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
) -> list[bool]:
    """What :func:`correct` says of each answer; Math-Verify is not asked."""
    pairs = zip(problems, answers, strict=True)
    return [correct(problem.gold, answer) for problem, answer in pairs]


def correct(gold: str, answer: str | None) -> bool:
    """Whether ``answer`` gives every person of the gold the gold's role, each once, in any order,
    and says nothing else.

    Right is a list such as "Zoey is a knight, and Noah is a knave." Partial credit counts as wrong,
    and so do a repeated statement, an unknown word and another role, true or not.
    """
    if answer is None or len(answer) > LENGTH_LIMIT:
        return False
    roles = _roles(answer)
    return roles is not None and roles == _roles(gold)


def _roles(text: str) -> dict[str, str] | None:
    """Person -> role of a list of statements "Zoey is a knight", with commas, full stops, brackets
    or "and" between them; None for all else. Upper and lower case are the same."""
    if not text.isascii():
        return None  # some letters become ASCII in lower case
    words = iter(_PUNCTUATION.sub(" ", text).lower().split())
    found: dict[str, str] = {}
    for word in words:
        person = next(words, "") if word == "and" and found else word
        verb, role = next(words, ""), next(words, "")
        if role in _ARTICLES:
            role = next(words, "")
        if verb != "is" or not role or person in found:
            return None
        found[person] = role
    return found or None


@lru_cache(maxsize=16)
def _generator(people: int, seed: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(
        "knights_knaves",
        n_people=people,
        depth_constraint=2,
        width_constraint=2,
        size=2**31 - 1,
        seed=seed,
    )
