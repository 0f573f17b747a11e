"""Word problems in the style of GSM8K, generated from GSM-Symbolic's templates by reasoning-gym."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.tasks import problem as shared
from sage_lib.tasks.problem import Problem, TaskSettings
from sage_lib.tasks.verifier import judge_by_math, require_math_golds

#: Problems that one seed makes; reasoning-gym plans all of them at once.
SIZE = 20_000
LOGGED = COUNTED = ()
judge, require_golds = judge_by_math, require_math_golds
measures, completions = shared.no_measures, shared.no_completions


@dataclass(frozen=True, kw_only=True, config=shared.STRICT)
class Settings(TaskSettings):
    name: str = "gsm_symbolic"
    #: Characters of the longest working; shorter ones are simpler.
    longest: Annotated[int, Field(ge=1)] | None = None
    #: No number of the question, the working and the answer is larger: a small model multiplies
    #: small numbers only.
    largest: Annotated[float, Field(gt=0)] | None = None


def label(settings: Settings) -> str:
    return settings.name


def could_draw(settings: Settings, problem: Problem) -> bool:
    """Whether it is made from the same templates, or stands in a file, which may hold such ones."""
    return problem.task in (settings.name, "file")


def _drawn(settings: Settings, seed: int) -> Iterator[Problem]:
    import reasoning_gym

    made = reasoning_gym.create_dataset("gsm_symbolic", size=SIZE, seed=seed)
    for index in range(SIZE):
        entry = made[index]
        question = " ".join(entry["question"].split())
        working = entry["metadata"]["answer_cot"].partition("####")[0].strip()
        gold = str(entry["answer"])
        if settings.longest is not None and len(working) > settings.longest:
            continue
        if settings.largest is None or largest_of(question, working, gold) <= settings.largest:
            identity = f"{seed}-{index}"
            yield Problem(identity, label(settings), question, gold, settings.name, working=working)


def largest_of(*texts: str) -> float:
    """The largest number that stands in the texts; commas group its digits by three."""
    found = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", " ".join(texts))
    return max((float(number.replace(",", "")) for number in found), default=0.0)


stream = shared.stream_of(_drawn)


problems = shared.problems_of(stream)
demonstrations = shared.demonstrations_of(stream, any_length=True)
