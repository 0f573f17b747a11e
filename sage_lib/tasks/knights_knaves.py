"""Knights and Knaves (Figure 4, out of distribution): seeded puzzles of reasoning-gym, judged here,
since the package's own scorer passes over what it does not know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.tasks.problem import Problem
from sage_lib.tasks.reasoning_gym import SIZE, generator
from sage_lib.tasks.task import Task, distinct_problems
from sage_lib.tasks.verifier import LENGTH_LIMIT
from sage_lib.validation import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KnightsKnaves(Task):
    name: Literal["knights_knaves"] = "knights_knaves"
    people: Annotated[int, Field(ge=2, le=8)]  # in a puzzle

    @property
    def display_label(self) -> str:
        return f"{self.name}_{self.people}"

    def stream(self, seed: int, exclude: frozenset[str], revision: str | None) -> Iterator[Problem]:
        return distinct_problems(self._drawn(seed), exclude)

    def _drawn(self, seed: int) -> Iterator[Problem]:
        shape = {"n_people": self.people, "depth_constraint": 2, "width_constraint": 2}
        entries = generator("knights_knaves", json.dumps(shape), seed, SIZE)
        for number in range(SIZE):
            entry, identity = entries[number], f"{self.people}-{seed}-{number}"
            pair = (entry["question"], entry["answer"])
            yield Problem(identity, self.display_label, *pair, self.name)

    @classmethod
    def is_correct(cls, problem: Problem, answer: str | None) -> bool:
        """Return whether an answer gives each person the gold's role, once, and says nothing else.

        A right answer is a list such as "Zoey is a knight, and Noah is a knave." in any order.
        """
        if answer is None or len(answer) > LENGTH_LIMIT:
            return False
        roles = _roles(answer)
        return roles is not None and roles == _roles(problem.gold)


def _roles(text: str) -> dict[str, str] | None:
    """Return person -> role, in lower case, of statements "Zoey is a knight"; None otherwise."""
    if not text.isascii():
        return None  # some letters become ASCII in lower case
    words = iter(re.sub(r"[(),;.]", " ", text).lower().split())
    roles: dict[str, str] = {}
    for word in words:
        person = next(words, "") if word == "and" and roles else word
        verb, role = next(words, ""), next(words, "")
        if role in ("a", "an"):
            role = next(words, "")
        if verb != "is" or not role or person in roles:
            return None
        roles[person] = role
    return roles or None
