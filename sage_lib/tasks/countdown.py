"""Countdown: reach a target from digits with ``+ - *`` in two ways, whose use can be measured.

The digits keep their order; what differs is where the brackets go. From left to right (``L``, the
common way) 2 5 2 8 is (((2 . 5) . 2) . 8), from right to left (``R``, the rare way)
(2 . (5 . (2 . 8))). The work names its way and writes each step; the answer is the expression. The
reward reads the answer alone: an expression of exactly these digits, each once and in this order,
with ``+ - *`` and brackets, whose value is the target. Running values lie in 0..limit by
definition of the problem, since the vocabulary has no others.

A problem is of one of three kinds: both ways reach the target, or one way only ("forward",
"reverse"). Of the latter no other bracketing reaches it at all, running values of any size: the
reward can be had in that way alone. Nothing here needs torch.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from sage_lib.errors import SageError
from sage_lib.tasks.problem import Demonstration, Problem, TaskSettings, no_revision
from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START, WORK_END, WORK_START
from sage_lib.tasks.verifier import LENGTH_LIMIT, Verifier, require_math_golds

OPERATORS = ("+", "-", "*")
WAYS = ("L", "R")
KINDS = ("both", "forward", "reverse")
LOGGED = ("valid", "rare", "unsound")
COUNTED = ("rare", "valid_common", "valid_rare")
require_golds = require_math_golds

_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
}
_STEP = re.compile(r"\s*([0-9]+)\s*([-+*])\s*([0-9]+)\s*=\s*([0-9]+)\s*")
#: Draws after which a kind of problem counts as exhausted.
_TRIES = 10_000


@dataclass(frozen=True, kw_only=True)
class Settings(TaskSettings):
    """Which problems a stream has."""

    name: str = "countdown"
    fewest: int = 3  # digits shown in a problem, drawn between these two
    most: int = 5
    limit: int = 50  # running values stay in 0..limit, each one token
    #: The question's first word. With another one the same puzzles are asked in other words; give
    #: them the seed of a set in the usual words, which training then holds out.
    verb: str = "reach"
    kinds: dict[str, float] = field(default_factory=lambda: {"both": 1.0})  # share of each kind
    rare_share: float | None = None  # of demonstrations that take the rare way
    #: The same of the first half of the demonstrations; None is ``rare_share``. It teaches a way
    #: that the second half makes rare; SFT must then read its rows in order.
    early_rare_share: float | None = None
    #: Of demonstrations, the share that aims at nothing: true steps, with operators and a way drawn
    #: at random. A policy that learns from them searches, as a pretrained one does.
    aimless_share: float = 0.0
    #: Distinct puzzles that demonstrations are made of; None is one for each row. Short puzzles are
    #: few: with fewer distinct ones, each shown several times, they make up more of the rows.
    distinct: int | None = None
    #: Of the profile as a whole: the label names other numbers of digits.
    usual_fewest: int | None = field(default=None, metadata={"filled": "fewest"})
    usual_most: int | None = field(default=None, metadata={"filled": "most"})

    def __post_init__(self) -> None:
        if not 2 <= self.fewest <= self.most <= 6:
            raise SageError(
                "countdown shows 2 to 6 digits, from fewest to most, "
                f"not {self.fewest} to {self.most}"
            )
        if self.limit < 1:
            raise SageError(f"countdown needs a limit of 1 or more, not {self.limit}")
        if not re.fullmatch(r"[a-z]+", self.verb):
            raise SageError(f"countdown's verb is one word of small letters, not {self.verb!r}")
        shares = list(self.kinds.values())
        known = set(self.kinds) <= set(KINDS)
        if not known or min(shares, default=-1) < 0 or abs(sum(shares) - 1) > 1e-9:
            raise SageError(
                f"the shares of problem kinds must be of {', '.join(KINDS)} and sum to 1, "
                f"not {self.kinds}"
            )
        if self.distinct is not None and self.distinct < 1:
            raise SageError(f"countdown's distinct puzzles must be 1 or more, not {self.distinct}")
        for name in ("rare_share", "early_rare_share", "aimless_share"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise SageError(f"countdown's {name} must be in 0..1, not {share}")
        # One order whatever the file's, since the stream depends on it.
        ordered = {kind: float(self.kinds[kind]) for kind in KINDS if self.kinds.get(kind)}
        object.__setattr__(self, "kinds", ordered)


@dataclass(frozen=True)
class Puzzle:
    """The ``digits`` in the order they are shown, the ``target`` to reach, and which ways reach it
    (``kind``) through running values in 0..``limit``."""

    digits: tuple[int, ...]
    target: int
    kind: str
    limit: int

    @property
    def id(self) -> str:
        return f"{self.target}<{'.'.join(map(str, self.digits))}"

    @property
    def question(self) -> str:
        return self.asked("reach")

    def asked(self, verb: str) -> str:
        return f"{verb} {self.target} from {' '.join(map(str, self.digits))}"


def label(settings: Settings) -> str:
    """The kind, or "mixed", and the words and the numbers of digits where they are not the usual
    ones."""
    kinds = next(iter(settings.kinds)) if len(settings.kinds) == 1 else "mixed"
    kinds += "" if settings.verb == Settings.verb else "_other_words"
    own, usual = (settings.fewest, settings.most), (settings.usual_fewest, settings.usual_most)
    if None in usual or own == usual:
        return kinds
    numbers = str(own[0]) if own[0] == own[1] else f"{own[0]}_to_{own[1]}"
    return f"{kinds}_{numbers}_digits"


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
        Problem(p.id, dataset, p.asked(settings.verb), str(p.target), settings.name, p)
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
    """Worked puzzles, of which a share of ``rare_share`` takes the rare way, or in the first half
    ``early_rare_share``. All are short: nothing is left out for its length. Raises SageError where
    a puzzle cannot be solved in the way drawn.
    """
    late, early = settings.rare_share, settings.early_rare_share
    if late is None:
        raise SageError("demonstrations of countdown need the setting rare_share, such as 0.03")
    rng = random.Random(seed)
    drawn = problems(settings, min(rows, settings.distinct or rows), seed, exclude, revision)
    shown = drawn if settings.distinct is None and early is None else []
    while len(shown) < rows:
        # Short puzzles come first in a stream of distinct ones: every part needs some.
        shown += rng.sample(drawn, len(drawn))
    found = []
    for number, problem in enumerate(shown[:rows]):
        share = late if early is None or number >= rows // 2 else early
        if settings.aimless_share and rng.random() < settings.aimless_share:
            working, answer = aimless(problem.detail, rng)
        else:
            working, answer = demonstration(problem.detail, share, rng)
        found.append(Demonstration(problem.question, working, answer))
    return found


def could_draw(settings: Settings, problem: Problem) -> bool:
    """Whether the question is one of countdown's with as many digits, wherever it comes from."""
    found = re.fullmatch(r"reach [0-9]+ from ([1-9](?: [1-9])*)", problem.question)
    return found is not None and settings.fewest <= len(found[1].split()) <= settings.most


#: Why an answer earns nothing before its value is asked for.
NO_EXPRESSION, OTHER_DIGITS, OTHER_ORDER, BARE = (
    "not an expression",
    "other digits",
    "other order",
    "bare target",
)


def refusal(puzzle: Puzzle, answer: str) -> str | None:
    """Why an answer is no expression of the puzzle's digits, each once and in their order.

    None where it is one, whatever its value; otherwise one of the four reasons above.
    """
    return _read(puzzle, answer)[0]


def _read(puzzle: Puzzle, answer: str) -> tuple[str | None, int | None]:
    """The reason of :func:`refusal`, and the value of an answer that is an expression."""
    found = _parse(answer) if len(answer) <= LENGTH_LIMIT else None
    if found is None:
        return NO_EXPRESSION, None
    numbers, value = found
    if numbers == [puzzle.target] and len(puzzle.digits) > 1:
        return BARE, value
    if sorted(numbers) != sorted(puzzle.digits):
        return OTHER_DIGITS, value
    return (None if tuple(numbers) == puzzle.digits else OTHER_ORDER), value


def _parse(answer: str) -> tuple[list[int], int] | None:
    """The numbers of an expression from left to right, and its value; None for all that is not one.

    sum = product (+|- product)*, product = part (* part)*, part = number | ( sum ).
    """
    tokens = _TOKEN.findall(answer)
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


_TOKEN = re.compile(r"[0-9]+|[-+*()]")


def judge(
    problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
) -> list[bool]:
    """Whether each answer is an expression of its problem's digits whose value is the target.

    The values are exact, of :func:`_parse`; Math-Verify is not asked. ``verifier.counts`` says of
    every answer that it was "asked", and that there was "no answer", why it was refused, by
    :func:`refusal`'s reasons, or that its value was "verified".
    """
    verdicts = []
    for problem, answer in zip(problems, answers, strict=True):
        reason, value = ("no answer", None) if answer is None else _read(problem.detail, answer)
        verifier.counts["asked"] += 1
        verifier.counts[reason or "verified"] += 1
        verdicts.append(reason is None and value == problem.detail.target)
    return verdicts


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
    digits: tuple[int, ...], way: str, operators: tuple[str, ...], limit: int | None
) -> list[int] | None:
    """Running values in the order of the steps, or None when one leaves 0..``limit``.

    ``operators`` stand between the digits, from left to right. Without a limit none is left out.
    """
    value, trail = (digits[0], []) if way == "L" else (digits[-1], [])
    chain = list(zip(operators, digits[1:], strict=True))
    if way == "R":
        chain = list(zip(operators, digits[:-1], strict=True))[::-1]
    for operator, digit in chain:
        value = _APPLY[operator](*((value, digit) if way == "L" else (digit, value)))
        if limit is not None and not 0 <= value <= limit:
            return None
        trail.append(value)
    return trail


# All puzzles of up to four digits: each is drawn from, demonstrated and listed many times.
@lru_cache(maxsize=40_000)
def targets(
    digits: tuple[int, ...], way: str, limit: int | None
) -> Mapping[int, Sequence[tuple[str, ...]]]:
    """Every target that ``way`` reaches from ``digits``, with the operator sequences that do."""
    reached: dict[int, list[tuple[str, ...]]] = {}
    for operators in _sequences(len(digits) - 1):
        trail = values(digits, way, operators, limit)
        if trail is not None:
            reached.setdefault(trail[-1], []).append(operators)
    return reached


@cache
def _sequences(length: int) -> tuple[tuple[str, ...], ...]:
    """Every sequence of operators, once in memory for all puzzles."""
    return tuple(itertools.product(OPERATORS, repeat=length))


def other_targets(digits: tuple[int, ...]) -> frozenset[int]:
    """Every value that a bracketing other than the two ways gives, running values of any size.

    Of up to three digits there is none.
    """
    if len(digits) <= 3:
        return frozenset()
    found: set[int] = set()
    for cut in range(1, len(digits)):
        left, right = digits[:cut], digits[cut:]
        # With one digit on its right the rest must not go from left to right, and so on.
        lefts = _without(left, "L") if len(right) == 1 else _reached(left)
        rights = _without(right, "R") if len(left) == 1 else _reached(right)
        found |= _combined(lefts, rights)
    return frozenset(found)


@lru_cache(maxsize=100_000)
def _reached(digits: tuple[int, ...]) -> frozenset[int]:
    """Every value of an expression of these digits in this order, however it is bracketed."""
    if len(digits) == 1:
        return frozenset(digits)
    cuts = range(1, len(digits))
    parts = [_combined(_reached(digits[:cut]), _reached(digits[cut:])) for cut in cuts]
    return frozenset().union(*parts)


@lru_cache(maxsize=100_000)
def _without(digits: tuple[int, ...], way: str) -> frozenset[int]:
    """As :func:`_reached`, of all bracketings but that of ``way``; of two digits there is none."""
    if len(digits) <= 2:
        return frozenset()
    found: set[int] = set()
    for cut in range(1, len(digits)):
        left, right = digits[:cut], digits[cut:]
        lefts = _without(left, way) if way == "L" and len(right) == 1 else _reached(left)
        rights = _without(right, way) if way == "R" and len(left) == 1 else _reached(right)
        found |= _combined(lefts, rights)
    return frozenset(found)


def _combined(lefts: frozenset[int], rights: frozenset[int]) -> set[int]:
    pairs = itertools.product(lefts, rights)
    return {apply(a, b) for a, b in pairs for apply in _APPLY.values()}


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
        count = rng.randint(settings.fewest, settings.most)
        shown = tuple(rng.randint(1, 9) for _ in range(count))
        pool = sorted(_of_kind(shown, kind, settings.limit))
        if not pool:
            continue
        puzzle = Puzzle(shown, rng.choice(pool), kind, settings.limit)
        if puzzle.question not in seen:
            return puzzle
    raise SageError(
        f"no new problem of kind {kind!r} was found after {len(seen)}: "
        "ask for fewer, or for more digits or a higher limit"
    )


def _of_kind(digits: tuple[int, ...], kind: str, limit: int) -> set[int]:
    """Targets that make a puzzle of this kind of these digits."""
    left, right = (set(targets(digits, way, limit)) for way in WAYS)
    if kind == "both":
        return left & right
    own, way = (left, "R") if kind == "forward" else (right, "L")
    alone = own - set(targets(digits, way, None))
    return alone - other_targets(digits) if alone else alone


def solution(puzzle: Puzzle, way: str, operators: tuple[str, ...]) -> tuple[str, str]:
    """The work and the answer that ``operators`` (from left to right) make in ``way``, as the text
    of a completion."""
    digits = puzzle.digits
    chain = list(zip(operators, digits[1:], strict=True))
    value = digits[0]
    if way == "R":
        chain = list(zip(operators, digits[:-1], strict=True))[::-1]
        value = digits[-1]
    steps: list[str] = []
    expression = str(value)
    for operator, digit in chain:
        inner = f"( {expression} )" if steps else expression
        if way == "L":
            result = _APPLY[operator](value, digit)
            steps.append(f"{value} {operator} {digit} = {result}")
            expression = f"{inner} {operator} {digit}"
        else:
            result = _APPLY[operator](digit, value)
            steps.append(f"{digit} {operator} {value} = {result}")
            expression = f"{digit} {operator} {inner}"
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


def aimless(puzzle: Puzzle, rng: random.Random) -> tuple[str, str]:
    """Work and answer of true steps on the puzzle's digits that aim at nothing: a way, and then
    operators, each as likely as any other whose running values stay in 0..``limit``."""
    way = rng.choice(WAYS)
    reached = targets(puzzle.digits, way, puzzle.limit).values()
    return solution(puzzle, way, rng.choice([one for some in reached for one in some]))


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
    taken = tuple(operator for _, operator, _, _ in read)
    operators = taken if way == "L" else taken[::-1]
    true_work, true_answer = solution(puzzle, way, operators)
    if work.split() != true_work.split():
        return Check(way, False)
    reached = int(read[-1][3]) == puzzle.target
    answered = _between_markers(rest) == true_answer.split()
    small = all(int(result) <= puzzle.limit for *_, result in read)
    return Check(way, reached and answered and small)


def _between_markers(text: str) -> list[str] | None:
    """The words of an answer that has the markers around it and nothing else; None otherwise."""
    answer = text.strip()
    if not (answer.startswith(SOLUTION_START) and answer.endswith(SOLUTION_END)):
        return None
    return answer.removeprefix(SOLUTION_START).removesuffix(SOLUTION_END).split()
