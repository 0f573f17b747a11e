"""Countdown: reach a target from digits with ``+ - *`` (and ``max`` and ``dist``, |a - b|, where a
profile says so) in two ways, whose use can be measured.

The digits keep their order; what differs is where the brackets go. From left to right (``L``, the
common way) 2 5 2 8 is (((2 . 5) . 2) . 8), from right to left (``R``, the rare way)
(2 . (5 . (2 . 8))). The work names its way and writes each step; the answer is the expression,
which alone is rewarded. Running values lie in 0..limit.

Both ways reach the target of a problem ("both"), or one way only ("forward", "reverse"): then no
other bracketing reaches it at all, with running values of any size.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Annotated, ClassVar

from pydantic import Field, Strict
from pydantic.dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.tasks import problem as shared
from sage_lib.tasks.problem import Demonstration, Problem, TaskSettings
from sage_lib.tasks.puzzles import (
    OPERATORS,
    WAYS,
    Operator,
    Puzzle,
    allowed,
    check,
    other_targets,
    parse,
    sequences,
    solution,
    solving,
    targets,
)
from sage_lib.tasks.verifier import LENGTH_LIMIT, Verifier, require_math_golds

KINDS = ("both", "forward", "reverse")
LOGGED = ("valid", "rare", "unsound")
COUNTED = ("rare", "valid_common", "valid_rare")
require_golds = require_math_golds

Digits = Annotated[int, Field(ge=2, le=8)]
#: Digits of one-way problems at most: all bracketings of more are too many.
ONE_WAY = 6
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=shared.STRICT)
class Settings(TaskSettings):
    #: The label names numbers of digits other than the profile's.
    FILLED: ClassVar[Mapping[str, str]] = {"usual_fewest": "fewest", "usual_most": "most"}

    name: str = "countdown"
    fewest: Digits = 3  # digits shown in a problem, drawn between these two
    most: Digits = 5
    limit: Annotated[int, Field(ge=1)] = 50  # running values stay in 0..limit, each one token
    operators: Annotated[tuple[Operator, ...], Strict(False), Field(min_length=1)] = OPERATORS
    #: The question's first word. Another one asks the same puzzles in other words.
    verb: Annotated[str, Field(pattern="^[a-z]+$")] = "reach"
    kinds: dict[str, Share] = field(default_factory=lambda: {"both": 1.0})  # share of each kind
    rare_share: Share | None = None  # of demonstrations that take the rare way
    #: The same of the first half of the demonstrations, which SFT must then read in order.
    early_rare_share: Share | None = None
    #: Of demonstrations that aim at nothing: true steps, with operators and a way drawn at random.
    aimless_share: Share = 0.0
    #: Distinct puzzles that demonstrations are made of; None is one for each row.
    distinct: Annotated[int, Field(ge=1)] | None = None
    usual_fewest: int | None = None
    usual_most: int | None = None

    def __post_init__(self) -> None:
        if self.fewest > self.most:
            raise SageError(f"countdown's fewest digits, {self.fewest}, are more than {self.most}")
        if not set(self.kinds) <= set(KINDS) or abs(sum(self.kinds.values()) - 1) > 1e-9:
            raise SageError(f"the shares of kinds must be of {', '.join(KINDS)} and sum to 1")
        if self.most > ONE_WAY and set(self.kinds) != {"both"}:
            raise SageError(f"one-way problems have at most {ONE_WAY} digits, not {self.most}")
        # One order whatever the file's, since the stream depends on it.
        ordered = {kind: float(self.kinds[kind]) for kind in KINDS if self.kinds.get(kind)}
        object.__setattr__(self, "kinds", ordered)

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(one for one in self.operators if one not in OPERATORS)


def label(settings: Settings) -> str:
    """The kind, or "mixed", and words and numbers of digits other than the usual ones."""
    kinds = next(iter(settings.kinds)) if len(settings.kinds) == 1 else "mixed"
    kinds += "" if settings.verb == Settings.verb else "_other_words"
    own, usual = (settings.fewest, settings.most), (settings.usual_fewest, settings.usual_most)
    if None in usual or own == usual:
        return kinds
    numbers = str(own[0]) if own[0] == own[1] else f"{own[0]}_to_{own[1]}"
    return f"{kinds}_{numbers}_digits"


def stream(
    settings: Settings, seed: int, exclude: frozenset[str], revision: str | None
) -> Iterator[Problem]:
    shared.no_revision(settings, revision)
    dataset, name = label(settings), settings.name
    for p in puzzles(settings, seed, exclude):
        yield Problem(p.id, dataset, p.asked(settings.verb), str(p.target), name, p)


problems = shared.problems_of(stream)


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
    """Worked puzzles, of which a share of ``rare_share`` takes the rare way. All are short."""
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
        share: float | None = late if early is None or number >= rows // 2 else early
        if settings.aimless_share and rng.random() < settings.aimless_share:
            share = None
        found.append(Demonstration(problem.question, *demonstration(problem.detail, share, rng)))
    return found


def could_draw(settings: Settings, problem: Problem) -> bool:
    """Whether the question is one of countdown's with as many digits, wherever it comes from."""
    found = re.fullmatch(r"reach [0-9]+ from ([1-9](?: [1-9])*)", problem.question)
    return found is not None and settings.fewest <= len(found[1].split()) <= settings.most


NO_EXPRESSION, OTHER_DIGITS = "not an expression", "other digits"
OTHER_ORDER, BARE = "other order", "bare target"


def read(puzzle: Puzzle, answer: str) -> tuple[str | None, int | None]:
    """Why an answer is refused, if it is, and the value of an expression."""
    found = parse(answer, puzzle.operators) if len(answer) <= LENGTH_LIMIT else None
    if found is None:
        return NO_EXPRESSION, None
    numbers, value = found
    if numbers == [puzzle.target] and len(puzzle.digits) > 1:
        return BARE, value
    if sorted(numbers) != sorted(puzzle.digits):
        return OTHER_DIGITS, value
    return (None if tuple(numbers) == puzzle.digits else OTHER_ORDER), value


def judge(
    problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
) -> list[bool]:
    """Whether each answer is an expression of its problem's digits whose value is the target."""
    verdicts = []
    for problem, answer in zip(problems, answers, strict=True):
        reason, value = ("no answer", None) if answer is None else read(problem.detail, answer)
        verifier.counts["asked"] += 1
        verifier.counts[reason or "verified"] += 1
        verdicts.append(reason is None and value == problem.detail.target)
    return verdicts


def measures(problem: Problem, text: str, correct: bool) -> dict[str, bool]:
    """What the step checker says: ``valid`` is correct work to the target, ``rare`` work that names
    the rare way, ``unsound`` a correct answer without valid work."""
    found = check(problem.detail, text)
    return {
        "valid": found.valid,
        "rare": found.way == "R",
        "unsound": correct and not found.valid,
        "valid_common": found.valid and found.way == "L",
        "valid_rare": found.valid and found.way == "R",
    }


def completions(problem: Problem) -> list[tuple[str, str, str]]:
    """(way, working, answer) of every completion that the step checker calls valid."""
    puzzle: Puzzle = problem.detail
    return [
        (way, *solution(puzzle, way, operators))
        for way in WAYS
        for operators in solving(puzzle, way)
    ]


def demonstration(puzzle: Puzzle, rare_share: float | None, rng: random.Random) -> tuple[str, str]:
    """Work and answer of an example that takes the rare way with probability ``rare_share``.

    None is true steps that aim at nothing, within the limit of running values.
    """
    if rare_share is None:
        way = rng.choice(WAYS)
        every = sequences(len(puzzle.digits) - 1, puzzle.operators)
        return solution(puzzle, way, every[rng.choice(allowed(puzzle, way))])
    way = "R" if rng.random() < rare_share else "L"
    ending = solving(puzzle, way)
    if not ending:
        raise SageError(
            f"a problem of kind {puzzle.kind!r} has no solution in the way {way}: "
            "choose kinds: {both: 1.0}, or a rare_share of 0 or 1"
        )
    return solution(puzzle, way, rng.choice(ending))


def puzzles(settings: Settings, seed: int, exclude: frozenset[str]) -> Iterator[Puzzle]:
    """An endless stream of distinct puzzles not in ``exclude``; SageError where one runs out."""
    rng, seen = random.Random(seed), set(exclude)
    kinds, shares = list(settings.kinds), list(settings.kinds.values())
    while True:
        kind = rng.choices(kinds, weights=shares)[0]
        for _ in range(10_000):
            count = rng.randint(settings.fewest, settings.most)
            shown = tuple(rng.randint(1, 9) for _ in range(count))
            pool = sorted(_of_kind(shown, kind, settings.limit, settings.operators))
            if not pool:
                continue
            puzzle = Puzzle(shown, rng.choice(pool), kind, settings.limit, settings.operators)
            if puzzle.question not in seen:
                break
        else:
            raise SageError(
                f"no new problem of kind {kind!r} was found after {len(seen)}: "
                "ask for fewer, or for more digits or a higher limit"
            )
        seen.add(puzzle.question)
        yield puzzle


def _of_kind(
    digits: tuple[int, ...], kind: str, limit: int, operators: tuple[str, ...]
) -> frozenset[int]:
    """Targets that make a puzzle of this kind of these digits."""
    left, right = (targets(digits, way, limit, operators) for way in WAYS)
    if kind == "both":
        return left & right
    own, way = (left, "R") if kind == "forward" else (right, "L")
    alone = own - targets(digits, way, None, operators)
    return alone - other_targets(digits, operators=operators) if alone else alone
