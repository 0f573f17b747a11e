"""Knights and Knaves (Figure 4, out of distribution): seeded puzzles of reasoning-gym, whose own
scorer passes over what it does not know."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.tasks import problem as shared
from sage_lib.tasks.problem import Problem, TaskSettings
from sage_lib.tasks.verifier import LENGTH_LIMIT, Verifier

LOGGED = COUNTED = ()
measures, completions = shared.no_measures, shared.no_completions
_SIZE = 2**31 - 1  # puzzles that one seed makes


@dataclass(frozen=True, kw_only=True, config=shared.STRICT)
class Settings(TaskSettings):
    name: str = "knights_knaves"
    people: Annotated[int, Field(ge=2, le=8)]  # in a puzzle


def label(settings: Settings) -> str:
    return f"{settings.name}_{settings.people}"


def stream(
    settings: Settings, seed: int, exclude: frozenset[str], revision: str | None
) -> Iterator[Problem]:
    shared.no_revision(settings, revision)
    dataset, made = label(settings), _generator(settings.people, seed)
    entries = ((f"{settings.people}-{seed}-{index}", made[index]) for index in range(_SIZE))
    drawn = (Problem(i, dataset, e["question"], e["answer"], settings.name) for i, e in entries)
    return shared.distinct(drawn, exclude)


problems = shared.problems_of(stream)


def _worked(*given: object) -> Iterator[Problem]:
    raise SageError("Knights and Knaves has no worked answers: choose another set for sft_data")


demonstrations = shared.demonstrations_of(_worked)


def could_draw(settings: Settings, problem: Problem) -> bool:
    """Whether it is such a puzzle, or stands in a file, which may hold some."""
    return problem.task in (settings.name, "file")


def require_golds(problems: Sequence[Problem], verifier: Verifier) -> None:
    """Every gold is the generator's own, and no formula."""


def judge(
    problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
) -> list[bool]:
    return [correct(p.gold, answer) for p, answer in zip(problems, answers, strict=True)]


def correct(gold: str, answer: str | None) -> bool:
    """Whether ``answer`` gives every person the gold's role, each once, and says nothing else.

    Right is a list such as "Zoey is a knight, and Noah is a knave." in any order.
    """
    if answer is None or len(answer) > LENGTH_LIMIT:
        return False
    roles = _roles(answer)
    return roles is not None and roles == _roles(gold)


def _roles(text: str) -> dict[str, str] | None:
    """Person -> role, in lower case, of statements "Zoey is a knight"; None for all else."""
    if not text.isascii():
        return None  # some letters become ASCII in lower case
    words = iter(re.sub(r"[(),;.]", " ", text).lower().split())
    found: dict[str, str] = {}
    for word in words:
        person = next(words, "") if word == "and" and found else word
        verb, role = next(words, ""), next(words, "")
        if role in ("a", "an"):
            role = next(words, "")
        if verb != "is" or not role or person in found:
            return None
        found[person] = role
    return found or None


@lru_cache(maxsize=16)
def _generator(people: int, seed: int) -> Any:
    import reasoning_gym

    shape = {"n_people": people, "depth_constraint": 2, "width_constraint": 2}
    return reasoning_gym.create_dataset("knights_knaves", **shape, size=_SIZE, seed=seed)
