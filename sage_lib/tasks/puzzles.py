"""The arithmetic of countdown: what a way reaches from digits, and how its work is written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import add, mul, sub
from typing import NamedTuple

from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START, WORK_END, WORK_START

OPERATORS = ("+", "-", "*")
WAYS = ("L", "R")
_APPLY: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}


@dataclass(frozen=True)
class Puzzle:
    """Digits in the order they are shown, and a target to reach."""

    digits: tuple[int, ...]
    target: int
    kind: str  # which ways reach it
    limit: int  # of running values

    @property
    def id(self) -> str:
        return f"{self.target}<{'.'.join(map(str, self.digits))}"

    @property
    def question(self) -> str:
        return self.asked("reach")

    def asked(self, verb: str) -> str:
        return f"{verb} {self.target} from {' '.join(map(str, self.digits))}"


def _steps(
    digits: tuple[int, ...], way: str, operators: tuple[str, ...]
) -> tuple[int, list[tuple[str, int]]]:
    """The first value, and operator and digit of each step; ``operators`` from left to right."""
    if way == "L":
        return digits[0], list(zip(operators, digits[1:], strict=True))
    return digits[-1], list(zip(operators, digits[:-1], strict=True))[::-1]


# All puzzles of up to four digits: each is drawn from, demonstrated and listed many times.
@lru_cache(maxsize=40_000)
def targets(
    digits: tuple[int, ...], way: str, limit: int | None
) -> Mapping[int, Sequence[tuple[str, ...]]]:
    """Every target that ``way`` reaches from ``digits``, with the operator sequences that do."""
    reached: dict[int, list[tuple[str, ...]]] = {}
    for operators in _sequences(len(digits) - 1):
        value, steps = _steps(digits, way, operators)
        for operator, digit in steps:
            value = _APPLY[operator](*((value, digit) if way == "L" else (digit, value)))
            if limit is not None and not 0 <= value <= limit:
                break
        else:
            reached.setdefault(value, []).append(operators)
    return reached


@cache  # every sequence once in memory for all puzzles
def _sequences(length: int) -> tuple[tuple[str, ...], ...]:
    return tuple(itertools.product(OPERATORS, repeat=length))


@lru_cache(maxsize=200_000)
def other_targets(digits: tuple[int, ...], ways: str = "LR") -> frozenset[int]:
    """Every value of a bracketing other than those of ``ways``, running values of any size."""
    if len(digits) == 1:
        return frozenset(() if ways else digits)
    found: set[int] = set()
    for cut in range(1, len(digits)):
        left, right = digits[:cut], digits[cut:]
        # With one digit on its right the rest must not go from left to right, and so on.
        lefts = other_targets(left, "L" if "L" in ways and len(right) == 1 else "")
        rights = other_targets(right, "R" if "R" in ways and len(left) == 1 else "")
        for a, b in itertools.product(lefts, rights):
            found |= {apply(a, b) for apply in _APPLY.values()}
    return frozenset(found)


def solution(puzzle: Puzzle, way: str, operators: tuple[str, ...]) -> tuple[str, str]:
    """Work and answer, as a completion has them, of ``operators`` (from left to right)."""
    value, chain = _steps(puzzle.digits, way, operators)
    expression, steps = str(value), list[str]()
    for operator, digit in chain:
        inner = f"( {expression} )" if steps else expression
        if way == "L":
            (a, b), expression = (value, digit), f"{inner} {operator} {digit}"
        else:
            (a, b), expression = (digit, value), f"{digit} {operator} {inner}"
        value = _APPLY[operator](a, b)
        steps.append(f"{a} {operator} {b} = {value}")
    return f"{way} " + " , ".join(steps), expression


class Check(NamedTuple):
    way: str | None  # that the work names
    valid: bool


def check(puzzle: Puzzle, text: str) -> Check:
    """Read a completion (the text after the generation prompt) step by step.

    It is valid where every step is true arithmetic on the digits in the way that it names, the last
    one reaches the target, and the answer is the expression of those steps and nothing else.
    """
    work, marker, rest = text.removeprefix(WORK_START).partition(WORK_END)
    words, answer = work.split(), rest.strip()
    way = words[0] if words and words[0] in WAYS else None
    if way is None or not marker:
        return Check(way, False)
    taken = tuple(words[2::6])  # the way, then six words a step: 3 + 5 = 8 ,
    operators = taken if way == "L" else taken[::-1]
    if operators not in targets(puzzle.digits, way, puzzle.limit).get(puzzle.target, ()):
        return Check(way, False)
    true_work, true_answer = solution(puzzle, way, operators)
    marked = answer.startswith(SOLUTION_START) and answer.endswith(SOLUTION_END)
    inside = answer.removeprefix(SOLUTION_START).removesuffix(SOLUTION_END)
    right = words == true_work.split() and inside.split() == true_answer.split()
    return Check(way, marked and right)


def parse(answer: str) -> tuple[list[int], int] | None:
    """The numbers of an expression from left to right, and its value; None for all else."""
    tokens = re.findall(r"[0-9]+|[-+*()]", answer)
    if "".join(tokens) != "".join(answer.split()):
        return None
    rest: list[str] = tokens[::-1]  # the next token is the last
    numbers: list[int] = []

    def part() -> int | None:
        token = rest.pop() if rest else ""
        if token.isdigit():
            numbers.append(int(token))
            return numbers[-1]
        if token != "(":
            return None
        value = total()
        return value if rest and rest.pop() == ")" else None

    def total() -> int | None:
        done, product = 0, part()
        while product is not None and rest and rest[-1] in OPERATORS:
            operator, value = rest.pop(), part()
            if value is None:
                return None
            if operator == "*":
                product *= value
            else:
                done, product = done + product, value if operator == "+" else -value
        return None if product is None else done + product

    value = total()
    return None if value is None or rest else (numbers, value)
