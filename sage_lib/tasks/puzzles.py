"""The arithmetic of countdown: which targets a way reaches from digits, and how work is written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import add, mul, sub
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sage_lib.tasks.prompts import split_completion

Operator = Literal["+", "-", "*", "max", "dist", "plus", "gap", "top"]
OPERATORS: tuple[Operator, ...] = ("+", "-", "*")  # of a puzzle that names no others
WAYS = ("L", "R")
#: On two numbers, or on arrays of them. `dist` is |a - b|.
_APPLY: dict[str, Callable[[Any, Any], Any]] = {
    "+": add,
    "-": sub,
    "*": mul,
    "max": lambda a, b: (a + b + abs(a - b)) // 2,
    "dist": lambda a, b: abs(a - b),
}
#: Operators that can be spelled in two ways.
SPELLINGS: dict[Any, Any] = {"+": "plus", "max": "top", "dist": "gap"}
_APPLY |= {word: _APPLY[operator] for operator, word in SPELLINGS.items()}


@dataclass(frozen=True)
class Puzzle:
    """Digits in the order they are shown, and a target to reach."""

    digits: tuple[int, ...]
    target: int
    kind: str  # which ways reach it
    limit: int  # of running values
    operators: tuple[str, ...] = OPERATORS

    @property
    def id(self) -> str:
        return f"{self.target}<{'.'.join(map(str, self.digits))}"

    def question(self, verb: str) -> str:
        return f"{verb} {self.target} from {' '.join(map(str, self.digits))}"


def reached(
    digits: tuple[int, ...], way: str, limit: int | None, operators: tuple[str, ...] = OPERATORS
) -> NDArray[np.float64]:
    """Return the value of every operator sequence, in the order of itertools.product.

    Digits are in the order they are shown. A value is NaN where a running value leaves 0..limit;
    None is no limit.
    """
    first, *rest = digits if way == "L" else digits[::-1]
    values = np.array([float(first)])
    for digit in rest:
        pair = (values, digit) if way == "L" else (digit, values)
        # The operator applied last is the last of its sequence in the way L, the first in R.
        steps = [_APPLY[operator](*pair) for operator in operators]
        values = np.stack(steps, axis=1 if way == "L" else 0).ravel()
        if limit is not None:
            values[(values < 0) | (values > limit)] = np.nan
    return values


@lru_cache(maxsize=20_000)  # the shorter digits come again and again
def targets(
    digits: tuple[int, ...], way: str, limit: int | None, operators: tuple[str, ...] = OPERATORS
) -> frozenset[int]:
    """Return every target that a way reaches; arguments are as in :func:`reached`."""
    values = reached(digits, way, limit, operators)
    return frozenset(values[~np.isnan(values)].astype(int).tolist())


@cache  # every sequence once in memory for all puzzles
def sequences(length: int, operators: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return every sequence of ``length`` operators."""
    return tuple(itertools.product(operators, repeat=length))


@lru_cache(maxsize=40_000)  # each puzzle is drawn from, demonstrated and listed many times
def solving(puzzle: Puzzle, way: str) -> tuple[tuple[str, ...], ...]:
    """Return the operator sequences, from left to right, by which a way reaches the target."""
    operators = sequences(len(puzzle.digits) - 1, puzzle.operators)
    values = reached(puzzle.digits, way, puzzle.limit, puzzle.operators)
    return tuple(operators[index] for index in np.flatnonzero(values == puzzle.target))


@lru_cache(maxsize=2000)
def allowed(puzzle: Puzzle, way: str) -> NDArray[np.int64]:
    """Return the indices, in :func:`sequences`, of the sequences within the limit.

    Sequences with one target are neighbours, and targets have the order in which they are first
    reached.
    """
    values = reached(puzzle.digits, way, puzzle.limit, puzzle.operators)
    indices = np.flatnonzero(~np.isnan(values))
    _, first, which = np.unique(values[indices], return_index=True, return_inverse=True)
    return indices[np.argsort(first[which], kind="stable")]


@lru_cache(maxsize=200_000)
def other_targets(
    digits: tuple[int, ...], ways: str = "LR", operators: tuple[str, ...] = OPERATORS
) -> frozenset[int]:
    """Return the value of every bracketing but those of some ways: "L", "R", both or none.

    Digits are in the order they are shown. Running values may have any size.
    """
    if len(digits) == 1:
        return frozenset(() if ways else digits)
    values: set[int] = set()
    for cut in range(1, len(digits)):
        left, right = digits[:cut], digits[cut:]
        # With one digit on its right the left part must not go from left to right, and so on.
        lefts = other_targets(left, "L" if "L" in ways and len(right) == 1 else "", operators)
        rights = other_targets(right, "R" if "R" in ways and len(left) == 1 else "", operators)
        for a, b in itertools.product(lefts, rights):
            values |= {_APPLY[operator](a, b) for operator in operators}
    return frozenset(values)


def solution(puzzle: Puzzle, way: str, operators: tuple[str, ...]) -> tuple[str, str]:
    """Return work and answer of a solution, as a completion has them.

    Operators are in the order from left to right, whatever the way.
    """
    forward = 1 if way == "L" else -1
    value, *digits = puzzle.digits[::forward]
    expression, steps = str(value), list[str]()
    for operator, digit in zip(operators[::forward], digits, strict=True):
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
    """Check a completion, which follows the generation prompt, step by step.

    It is valid where every step is true arithmetic on the digits in the way that it names, the last
    step reaches the target, and the answer is the expression of these steps and nothing else.
    """
    words, answer = split_completion(text)
    way = words[0] if words and words[0] in WAYS else None
    if way is None or answer is None:
        return Check(way, False)
    taken = tuple(words[2::6])  # the way, then six words a step: 3 + 5 = 8 ,
    operators = taken if way == "L" else taken[::-1]
    if operators not in solving(puzzle, way):
        return Check(way, False)
    true_work, true_answer = solution(puzzle, way, operators)
    return Check(way, words == true_work.split() and answer == true_answer.split())


def parse(answer: str, operators: tuple[str, ...] = OPERATORS) -> tuple[list[int], int] | None:
    """Return the numbers of an expression from left to right, and its value; None for other texts.

    Words stand between their numbers and bind as `*` does: from left to right, before + -.
    """
    tokens = re.findall(r"[0-9]+|[-+*()]|max|dist|plus|gap|top", answer)
    if "".join(tokens) != "".join(answer.split()):
        return None
    stack: list[str] = tokens[::-1]  # the next token is the last
    numbers: list[int] = []

    def factor() -> int | None:
        token = stack.pop() if stack else ""
        if token.isdigit():
            numbers.append(int(token))
            return numbers[-1]
        if token != "(":
            return None
        value = total()
        return value if stack and stack.pop() == ")" else None

    def total() -> int | None:
        summed, sign, product = 0, 1, factor()
        while product is not None and stack and stack[-1] in operators:
            operator, value = stack.pop(), factor()
            if value is None:
                return None
            if operator in "+-":
                summed, sign, product = summed + sign * product, 1 if operator == "+" else -1, value
            else:
                product = _APPLY[operator](product, value)
        return None if product is None else summed + sign * product

    value = total()
    return None if value is None or stack else (numbers, value)
