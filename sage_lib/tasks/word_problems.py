"""Word problems in the style of GSM8K, generated from GSM-Symbolic's templates by reasoning-gym."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.tasks import problem as shared
from sage_lib.tasks.problem import Demonstration, Problem, TaskSettings
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
    #: Of demonstrations that aim at nothing: true steps, with operators drawn at random.
    aimless_share: Annotated[float, Field(ge=0, le=1)] = 0.0


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
_worked = shared.demonstrations_of(stream, any_length=True)


def demonstrations(
    settings: Settings, rows: int, seed: int, *more: Any, **limits: Any
) -> list[Demonstration]:
    """The problems of ``stream`` with their working, and ``aimless_share`` of them without aim."""
    rng, bound = random.Random(seed), settings.largest or float("inf")
    return [
        aimless(one, bound, rng) if rng.random() < settings.aimless_share else one
        for one in _worked(settings, rows, seed, *more, **limits)
    ]


def aimless(worked: Demonstration, bound: float, rng: random.Random) -> Demonstration:
    """The same sentences with operators drawn at random, calculated on from there.

    Values are whole, and at most ``bound``. A step stays where no operators give such a value, or
    where it holds more than whole numbers and operators.
    """
    values: dict[str, str] = {}  # of the working -> of what is made of it

    def step(found: re.Match[str]) -> str:
        left, equals, value = found.group("left", "equals", "value")
        if left is None:  # a number between steps
            return values.get(found[0], found[0])
        numbers = [values.get(number, number) for number in re.findall(r"\d+", left)]
        space = " " if " " in left else ""
        possible = [
            (operators, result)
            for operators in itertools.product(
                "+-*/" if len(numbers) == 2 else "+-", repeat=len(numbers) - 1
            )
            if (result := _calculated(numbers, operators)) is not None and result <= bound
        ]
        if not possible:
            values[value] = value
            return found[0]
        operators, result = rng.choice(possible)
        values[value] = str(result)
        rest = "".join(f"{space}{o}{space}{n}" for o, n in zip(operators, numbers[1:], strict=True))
        return numbers[0] + rest + equals + values[value]

    working = _STEP.sub(step, worked.working)
    return Demonstration(worked.question, working, values.get(worked.answer, worked.answer))


#: A step, such as 4 + 2 = 6, or a whole number that stands alone.
_STEP = re.compile(
    r"(?<![\d.,])(?P<left>\d+(?: ?[-+*/] ?\d+)+)(?P<equals> ?= ?)(?P<value>\d+)(?!\d|[.,]\d)"
    r"|\b\d+\b"
)


def _calculated(numbers: Sequence[str], operators: Sequence[str]) -> int | None:
    """From the left to the right; None for what is negative or no whole number on the way."""
    value = int(numbers[0])
    for operator, number in zip(operators, map(int, numbers[1:]), strict=True):
        if operator == "/" and (number == 0 or value % number):
            return None
        if operator == "/":
            value //= number
        else:
            value = {"+": value + number, "-": value - number, "*": value * number}[operator]
        if value < 0:
            return None
    return value
