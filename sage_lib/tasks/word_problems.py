"""Word problems in the style of GSM8K, generated from GSM-Symbolic's templates by reasoning-gym."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from sage_lib.tasks.problem import Demonstration, Problem
from sage_lib.tasks.reasoning_gym import SIZE
from sage_lib.tasks.task import Share, Task, distinct_problems
from sage_lib.validation import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WordProblems(Task):
    ANY_LENGTH: ClassVar[bool] = True

    name: Literal["gsm_symbolic"] = "gsm_symbolic"
    #: Characters of the longest working; shorter ones are simpler.
    longest: Annotated[int, Field(ge=1)] | None = None
    #: No number of the question, the working and the answer is larger: a small model multiplies
    #: small numbers only.
    largest: Annotated[float, Field(gt=0)] | None = None
    #: Share of demonstrations that aim at nothing: true steps, with operators drawn at random.
    aimless_share: Share = 0.0

    def stream(self, seed: int, exclude: frozenset[str], revision: str | None) -> Iterator[Problem]:
        return distinct_problems(self._drawn(seed), exclude)

    def _drawn(self, seed: int) -> Iterator[Problem]:
        import reasoning_gym

        entries = reasoning_gym.create_dataset("gsm_symbolic", size=SIZE, seed=seed)
        for index in range(SIZE):
            entry = entries[index]
            question = " ".join(entry["question"].split())
            working = entry["metadata"]["answer_cot"].partition("####")[0].strip()
            gold, identity = str(entry["answer"]), f"{seed}-{index}"
            if self.longest is not None and len(working) > self.longest:
                continue
            if self.largest is None or largest_of(question, working, gold) <= self.largest:
                label = self.display_label
                yield Problem(identity, label, question, gold, self.name, working=working)

    def worked(self, problems: Iterator[Problem], rows: int, seed: int) -> Iterator[Demonstration]:
        rng, bound = random.Random(seed), self.largest or float("inf")
        for example in super().worked(problems, rows, seed):
            is_aimless = rng.random() < self.aimless_share
            yield aimless(example, bound, rng) if is_aimless else example


def largest_of(*texts: str) -> float:
    """Return the largest number in the texts, 0 if there is none; commas group digits by three."""
    numbers = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", " ".join(texts))
    return max((float(number.replace(",", "")) for number in numbers), default=0.0)


def aimless(worked: Demonstration, bound: float, rng: random.Random) -> Demonstration:
    """Replace the operators of a worked example at random, and calculate on from there.

    Sentences stay as they are. A step stays where no operators give a whole value from 0 to the
    bound, or where it holds more than whole numbers and operators.
    """
    values: dict[str, str] = {}  # value in the working -> value in its place

    def step(match: re.Match[str]) -> str:
        left, equals, value = match.group("left", "equals", "value")
        if match["other"]:
            return match[0]
        if left is None:  # a number between steps
            return values.get(match[0], match[0])
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
            return match[0]
        operators, result = rng.choice(possible)
        values[value] = str(result)
        pairs = zip(operators, numbers[1:], strict=True)
        steps = "".join(f"{space}{operator}{space}{number}" for operator, number in pairs)
        return numbers[0] + steps + equals + values[value]

    working = _STEP.sub(step, worked.working)
    return Demonstration(worked.question, working, values.get(worked.answer, worked.answer))


#: A step, such as 4 + 2 = 6; another calculation, with amounts, shares or decimals; or a whole
#: number that stands alone.
_STEP = re.compile(
    r"(?<![\d.,])(?P<left>\d+(?: ?[-+*/] ?\d+)+)(?P<equals> ?= ?)(?P<value>\d+)(?!%|\d|[.,]\d)"
    r"|(?P<other>[$£€]?\d[\d.,]*%?(?: ?[-+*/] ?[$£€]?\d[\d.,]*%?)+(?: ?= ?[$£€]?\d[\d.,]*%?)?)"
    r"|(?<![\d.,])\d+(?!\d|[.,]\d)"
)


def _calculated(numbers: Sequence[str], operators: Sequence[str]) -> int | None:
    """Calculate from left to right; None where a value is negative or no whole number."""
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
