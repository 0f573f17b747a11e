"""The embedded task: reach a target from digits with + - *, in one of two ways whose use can be measured exactly.

The digits are combined one at a time, from left to right (``L``, the common way) or from right to left (``R``, the rare
way). The work names its way, writes each step, and the answer is the expression; the verifier (which only sees the last
answer) accepts any expression whose value is the target, as Math-Verify reads it: "3 4" is 3 + 4 to it. A problem can be
solvable both ways, only left to right, or only right to left. Nothing here needs torch: a problem is a few small integers.
"""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START, WORK_END, WORK_START

OPERATORS = ("+", "-", "*")
WAYS = ("L", "R")
KINDS = ("both", "forward", "reverse")

_APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
_STEP = re.compile(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*=\s*(\d+)\s*")


@dataclass(frozen=True)
class Problem:
    """``digits`` in the order they are shown, the ``target`` to reach, and which ways can reach it (``kind``)."""

    digits: tuple[int, ...]
    target: int
    kind: str

    @property
    def id(self) -> str:
        return f"{self.target}<{'.'.join(map(str, self.digits))}"

    @property
    def question(self) -> str:
        return f"reach {self.target} from {' '.join(map(str, self.digits))}"


def values(
    digits: tuple[int, ...], way: str, operators: tuple[str, ...], limit: int
) -> list[int] | None:
    """Running values of the chain, one per operator, or None when one leaves the range 0..``limit``."""
    ordered = digits if way == "L" else digits[::-1]
    value, trail = ordered[0], []
    for operator, digit in zip(operators, ordered[1:], strict=True):
        value = _APPLY[operator](value, digit)
        if not 0 <= value <= limit:
            return None
        trail.append(value)
    return trail


def targets(digits: tuple[int, ...], way: str, limit: int) -> dict[int, list[tuple[str, ...]]]:
    """Every target that ``way`` reaches from ``digits``, with the operator sequences that do."""
    reached: dict[int, list[tuple[str, ...]]] = {}
    for operators in itertools.product(OPERATORS, repeat=len(digits) - 1):
        trail = values(digits, way, operators, limit)
        if trail is not None:
            reached.setdefault(trail[-1], []).append(operators)
    return reached


def kind_of(digits: tuple[int, ...], target: int, limit: int) -> str | None:
    """``both``, ``forward``, ``reverse``, or None when neither way reaches the target."""
    left, right = (target in targets(digits, way, limit) for way in WAYS)
    return {(True, True): "both", (True, False): "forward", (False, True): "reverse"}.get(
        (left, right)
    )


def problems(
    seed: int, digits: int, limit: int, kinds: dict[str, float], exclude: set[str] = frozenset()
) -> Iterator[Problem]:
    """An endless seeded stream of distinct problems, none of whose ids is in ``exclude``.

    ``kinds`` maps each kind to its share of the stream (shares sum to 1). The stream is a function of its arguments
    alone, so a training set and a held-out set are reproduced by their seeds.
    """
    if abs(sum(kinds.values()) - 1) > 1e-9 or not set(kinds) <= set(KINDS):
        raise SageError(
            f"the shares of problem kinds must be of {', '.join(KINDS)} and sum to 1, not {kinds}"
        )
    rng, seen = random.Random(seed), set(exclude)
    while True:
        kind = rng.choices(list(kinds), weights=kinds.values())[0]
        for _ in range(10_000):
            shown = tuple(rng.randint(1, 9) for _ in range(digits))
            left, right = (set(targets(shown, way, limit)) for way in WAYS)
            pool = {"both": left & right, "forward": left - right, "reverse": right - left}[kind]
            if not pool:
                continue
            problem = Problem(shown, rng.choice(sorted(pool)), kind)
            if problem.id not in seen:
                break
        else:
            raise SageError(
                f"no new problem of kind {kind!r} was found after {len(seen)}: ask for fewer, or for more digits or a higher limit"
            )
        seen.add(problem.id)
        yield problem


def solution(problem: Problem, way: str, operators: tuple[str, ...]) -> tuple[str, str]:
    """The work and the answer that ``operators`` make in ``way``, as the text of a completion."""
    ordered = problem.digits if way == "L" else problem.digits[::-1]
    value, steps, expression = ordered[0], [], str(ordered[0])
    for i, (operator, digit) in enumerate(zip(operators, ordered[1:], strict=True)):
        result = _APPLY[operator](value, digit)
        steps.append(f"{value} {operator} {digit} = {result}")
        expression = (
            f"{expression} {operator} {digit}" if i == 0 else f"( {expression} ) {operator} {digit}"
        )
        value = result
    return f"{way} " + " , ".join(steps), expression


def valid_completions(problem: Problem, limit: int) -> list[tuple[str, str, str]]:
    """(way, work, answer) of every completion that the step checker calls valid: all of them, so that probabilities can be summed."""
    return [
        (way, *solution(problem, way, operators))
        for way in WAYS
        for operators in targets(problem.digits, way, limit).get(problem.target, [])
    ]


def demonstration(
    problem: Problem, rare_share: float, rng: random.Random, limit: int
) -> tuple[str, str]:
    """One worked example for supervised fine-tuning: the rare way with probability ``rare_share``."""
    way = "R" if rng.random() < rare_share else "L"
    return solution(problem, way, rng.choice(targets(problem.digits, way, limit)[problem.target]))


@dataclass(frozen=True)
class Check:
    """What the step checker says of one completion.

    ``way``: the way that the work names, or None. ``valid``: every step is true arithmetic on the given digits in that
    way, the last one reaches the target, and the answer is the expression of those steps, between the markers and with nothing
    after it.
    """

    way: str | None
    valid: bool


def check(problem: Problem, text: str) -> Check:
    """Read a completion (the text after the generation prompt) step by step. A metric, never the reward."""
    work, marker, rest = text.removeprefix(WORK_START).partition(WORK_END)
    words = work.split(maxsplit=1)
    way = words[0] if words and words[0] in WAYS else None
    if way is None or not marker or len(words) < 2:
        return Check(way, False)
    steps = [_STEP.fullmatch(step) for step in words[1].split(",")]
    if len(steps) != len(problem.digits) - 1 or not all(steps):
        return Check(way, False)
    operators = tuple(step[2] for step in steps)
    expected_work, expected_answer = solution(problem, way, operators)
    if [w for w in work.split()] != expected_work.split():
        return Check(way, False)
    reached = int(steps[-1][4]) == problem.target
    answer = rest.strip()
    return Check(
        way,
        reached
        and answer.startswith(SOLUTION_START)
        and answer.endswith(SOLUTION_END)
        and answer.removeprefix(SOLUTION_START).removesuffix(SOLUTION_END).split()
        == expected_answer.split(),
    )
