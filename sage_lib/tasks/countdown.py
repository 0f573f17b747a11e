"""Countdown: reach a target from digits with + - *, in one of two ways whose use can be measured.

The digits are combined one at a time, from left to right (``L``, the common way) or from right to
left (``R``, the rare way). The work names its way, writes each step, and the answer is the
expression; the verifier (which only sees the last answer) accepts any expression whose value is the
target, as Math-Verify reads it: "3 4" is 3 + 4 to it. A problem can be solvable both ways, only
left to right, or only right to left. Nothing here needs torch: a problem is a few small integers.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sage_lib.errors import SageError
from sage_lib.tasks.problem import Demonstration, Problem, TaskSettings, no_revision
from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START, WORK_END, WORK_START
from sage_lib.tasks.verifier import judge_by_math, require_math_golds

OPERATORS = ("+", "-", "*")
WAYS = ("L", "R")
KINDS = ("both", "forward", "reverse")
LOGGED = ("valid", "rare", "unsound")
COUNTED = ("rare", "valid_common", "valid_rare")
judge = judge_by_math
require_golds = require_math_golds

_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
}
_STEP = re.compile(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*=\s*(\d+)\s*")
#: Draws after which a kind of problem counts as exhausted.
_TRIES = 10_000


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """Which problems a stream has."""

    name: str = "countdown"
    digits: int = 4  # shown in a problem
    limit: int = 50  # running values stay in 0..limit, each one token
    kinds: dict[str, float] = field(default_factory=lambda: {"both": 1.0})  # share of each kind
    rare_share: float | None = None  # of demonstrations that take the rare way
    #: Of the profile as a whole: the label names another number of digits.
    usual_digits: int | None = field(default=None, metadata={"filled": "digits"})

    def __post_init__(self) -> None:
        if self.digits < 2:
            raise SageError(f"countdown needs 2 digits or more, not {self.digits}")
        if self.limit < 1:
            raise SageError(f"countdown needs a limit of 1 or more, not {self.limit}")
        shares = list(self.kinds.values())
        known = set(self.kinds) <= set(KINDS)
        if not known or min(shares, default=-1) < 0 or abs(sum(shares) - 1) > 1e-9:
            raise SageError(
                f"the shares of problem kinds must be of {', '.join(KINDS)} and sum to 1, "
                f"not {self.kinds}"
            )
        if self.rare_share is not None and not 0 <= self.rare_share <= 1:
            raise SageError(f"countdown's rare_share must be in 0..1, not {self.rare_share}")
        # One order whatever the file's, since the stream depends on it.
        ordered = {kind: float(self.kinds[kind]) for kind in KINDS if kind in self.kinds}
        object.__setattr__(self, "kinds", ordered)


@dataclass(frozen=True)
class Puzzle:
    """The ``digits`` in the order they are shown, the ``target`` to reach, and which ways reach it
    (``kind``) through running values of at most ``limit``."""

    digits: tuple[int, ...]
    target: int
    kind: str
    limit: int

    @property
    def id(self) -> str:
        return f"{self.target}<{'.'.join(map(str, self.digits))}"

    @property
    def question(self) -> str:
        return f"reach {self.target} from {' '.join(map(str, self.digits))}"

    def ordered(self, way: str) -> tuple[int, ...]:
        """The digits in the order in which ``way`` takes them."""
        return self.digits if way == "L" else self.digits[::-1]


def label(settings: Settings) -> str:
    """The kind, or "mixed", and the number of digits where it is not the usual one."""
    kinds = next(iter(settings.kinds)) if len(settings.kinds) == 1 else "mixed"
    usual = settings.usual_digits
    return kinds if usual in (None, settings.digits) else f"{kinds}_{settings.digits}_digits"


def problems(
    settings: Settings,
    rows: int,
    seed: int,
    exclude: frozenset[str] = frozenset(),
    revision: str | None = None,
) -> list[Problem]:
    """The first ``rows`` puzzles of :func:`stream`, each with its Puzzle as ``detail``."""
    no_revision(settings, revision)
    dataset = label(settings)
    return [
        Problem(p.id, dataset, p.question, str(p.target), settings.name, p)
        for p in itertools.islice(stream(settings, seed, exclude), rows)
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
    """Worked puzzles, of which a share of ``rare_share`` takes the rare way. All are short: nothing
    is left out for its length. Raises SageError where a puzzle cannot be solved in the way drawn.
    """
    if settings.rare_share is None:
        raise SageError("demonstrations of countdown need the setting rare_share, such as 0.03")
    rng = random.Random(seed)
    found = []
    for problem in problems(settings, rows, seed, exclude, revision):
        working, answer = demonstration(problem.detail, settings.rare_share, rng)
        found.append(Demonstration(problem.question, working, answer))
    return found


def could_draw(settings: Settings, problem: Problem) -> bool:
    """Whether the question is one of countdown's with as many digits, wherever it comes from."""
    shown = r" ".join([r"[1-9]"] * settings.digits)
    return re.fullmatch(rf"reach \d+ from {shown}", problem.question) is not None


def measures(problem: Problem, text: str, correct: bool) -> dict[str, bool]:
    """What the step checker says of a completion.

    ``valid``: sound work to the target; ``rare``: the work names the rare way; ``unsound``: correct
    without being valid; ``valid_common`` and ``valid_rare``: valid, and in this way.
    """
    found = check(problem.detail, text)
    return {
        "valid": found.valid,
        "rare": found.way == "R",
        "unsound": correct and not found.valid,
        "valid_common": found.valid and found.way == "L",
        "valid_rare": found.valid and found.way == "R",
    }


def completions(problem: Problem) -> list[tuple[str, str, str]]:
    """(way, working, answer) of every completion that the step checker calls valid: all of them, so
    that probabilities can be summed."""
    puzzle: Puzzle = problem.detail
    found = []
    for way in WAYS:
        for operators in targets(puzzle.digits, way, puzzle.limit).get(puzzle.target, []):
            working, answer = solution(puzzle, way, operators)
            found.append((way, working, answer))
    return found


def values(
    digits: tuple[int, ...], way: str, operators: tuple[str, ...], limit: int
) -> list[int] | None:
    """Running values of the chain, one per operator, or None when one leaves 0..``limit``."""
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


def stream(
    settings: Settings, seed: int, exclude: frozenset[str] = frozenset()
) -> Iterator[Puzzle]:
    """An endless seeded stream of distinct puzzles, none of whose questions is in ``exclude``.

    A function of its arguments alone, so a training set and a held-out set are reproduced by their
    seeds. Raises SageError once a kind has no new puzzle.
    """
    rng, seen = random.Random(seed), set(exclude)
    kinds, shares = list(settings.kinds), list(settings.kinds.values())
    while True:
        kind = rng.choices(kinds, weights=shares)[0]
        puzzle = _draw(settings, kind, rng, seen)
        seen.add(puzzle.question)
        yield puzzle


def _draw(settings: Settings, kind: str, rng: random.Random, seen: set[str]) -> Puzzle:
    """A puzzle of this kind that has not been seen."""
    for _ in range(_TRIES):
        shown = tuple(rng.randint(1, 9) for _ in range(settings.digits))
        left = set(targets(shown, "L", settings.limit))
        right = set(targets(shown, "R", settings.limit))
        pool = {"both": left & right, "forward": left - right, "reverse": right - left}[kind]
        if not pool:
            continue
        puzzle = Puzzle(shown, rng.choice(sorted(pool)), kind, settings.limit)
        if puzzle.question not in seen:
            return puzzle
    raise SageError(
        f"no new problem of kind {kind!r} was found after {len(seen)}: "
        "ask for fewer, or for more digits or a higher limit"
    )


def solution(puzzle: Puzzle, way: str, operators: tuple[str, ...]) -> tuple[str, str]:
    """The work and the answer that ``operators`` make in ``way``, as the text of a completion."""
    first, *others = puzzle.ordered(way)
    value, expression = first, str(first)
    steps = []
    for operator, digit in zip(operators, others, strict=True):
        result = _APPLY[operator](value, digit)
        steps.append(f"{value} {operator} {digit} = {result}")
        inner = f"( {expression} )" if len(steps) > 1 else expression
        expression = f"{inner} {operator} {digit}"
        value = result
    return f"{way} " + " , ".join(steps), expression


def demonstration(puzzle: Puzzle, rare_share: float, rng: random.Random) -> tuple[str, str]:
    """Work and answer of one worked example: the rare way with probability ``rare_share``."""
    way = "R" if rng.random() < rare_share else "L"
    sequences = targets(puzzle.digits, way, puzzle.limit).get(puzzle.target)
    if not sequences:
        raise SageError(
            f"a problem of kind {puzzle.kind!r} has no solution in the way {way}: demonstrations "
            "take both ways, so choose kinds: {both: 1.0}, or a rare_share of 0 or 1"
        )
    return solution(puzzle, way, rng.choice(sequences))


@dataclass(frozen=True)
class Check:
    """What the step checker says of one completion.

    ``way``: the way that the work names, or None. ``valid``: every step is true arithmetic on the
    given digits in that way, the last one reaches the target, and the answer is the expression of
    those steps, between the markers and with nothing after it.
    """

    way: str | None
    valid: bool


def check(puzzle: Puzzle, text: str) -> Check:
    """Read a completion (the text after the generation prompt) step by step."""
    work, marker, rest = text.removeprefix(WORK_START).partition(WORK_END)
    words = work.split(maxsplit=1)
    way = words[0] if words and words[0] in WAYS else None
    if way is None or not marker or len(words) < 2:
        return Check(way, False)
    steps = [_STEP.fullmatch(step) for step in words[1].split(",")]
    read = [step.groups() for step in steps if step is not None]
    if len(read) < len(steps) or len(steps) != len(puzzle.digits) - 1:
        return Check(way, False)
    operators = tuple(operator for _, operator, _, _ in read)
    true_work, true_answer = solution(puzzle, way, operators)
    if work.split() != true_work.split():
        return Check(way, False)
    reached = int(read[-1][3]) == puzzle.target
    answered = _between_markers(rest) == true_answer.split()
    return Check(way, reached and answered)


def _between_markers(text: str) -> list[str] | None:
    """The words of an answer that has the markers around it and nothing else; None otherwise."""
    answer = text.strip()
    if not (answer.startswith(SOLUTION_START) and answer.endswith(SOLUTION_END)):
        return None
    return answer.removeprefix(SOLUTION_START).removesuffix(SOLUTION_END).split()
