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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Strict
from pydantic.dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.puzzles import (
    OPERATORS,
    SPELLINGS,
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
from sage_lib.tasks.task import ExactTask, Share
from sage_lib.tasks.verifier import LENGTH_LIMIT, Verifier
from sage_lib.validation import STRICT

KINDS = ("both", "forward", "reverse")
Digits = Annotated[int, Field(ge=2, le=8)]
#: Digits of one-way problems at most: all bracketings of more are too many.
ONE_WAY = 6


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Countdown(ExactTask):
    COUNTED: ClassVar[tuple[str, ...]] = ("rare", "valid_common", "valid_rare")
    WAYS: ClassVar[Mapping[str, str]] = {"L": "common", "R": "rare"}
    #: The label names numbers of digits that differ from the profile's.
    FILLED: ClassVar[Mapping[str, str]] = {"usual_fewest": "fewest", "usual_most": "most"}

    name: Literal["countdown"] = "countdown"
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
    #: Of aimless demonstrations in the rare way: the probability that an operator is spelled as a
    #: word, as in 3 plus 5. The common way has signs alone. None: both are drawn as any operator.
    spelled: Share | None = None
    usual_fewest: int | None = None
    usual_most: int | None = None

    def __post_init__(self) -> None:
        if self.fewest > self.most:
            raise ValueError(f"fewest digits, {self.fewest}, are more than most, {self.most}")
        if not set(self.kinds) <= set(KINDS) or abs(sum(self.kinds.values()) - 1) > 1e-9:
            raise ValueError(f"the shares of kinds must be of {', '.join(KINDS)} and sum to 1")
        if self.most > ONE_WAY and set(self.kinds) != {"both"}:
            raise ValueError(f"one-way problems have at most {ONE_WAY} digits, not {self.most}")
        # One order whatever the file's, since the stream depends on it.
        ordered = {kind: float(self.kinds[kind]) for kind in KINDS if self.kinds.get(kind)}
        object.__setattr__(self, "kinds", ordered)

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(operator for operator in self.operators if operator not in OPERATORS)

    @property
    def display_label(self) -> str:
        """The kind, or "mixed", and words and numbers of digits that differ from the usual ones."""
        kinds = next(iter(self.kinds)) if len(self.kinds) == 1 else "mixed"
        kinds += "" if self.verb == Countdown.verb else "_other_words"
        digits, usual = (self.fewest, self.most), (self.usual_fewest, self.usual_most)
        if None in usual or digits == usual:
            return kinds
        numbers = str(digits[0]) if digits[0] == digits[1] else f"{digits[0]}_to_{digits[1]}"
        return f"{kinds}_{numbers}_digits"

    def stream(self, seed: int, exclude: frozenset[str], revision: str | None) -> Iterator[Problem]:
        """Yield problems without end. Raises SageError where no new one is found."""
        rng, seen, label = random.Random(seed), set(exclude), self.display_label
        kinds, shares = list(self.kinds), list(self.kinds.values())
        while True:
            kind = rng.choices(kinds, weights=shares)[0]
            for _ in range(10_000):
                count = rng.randint(self.fewest, self.most)
                digits = tuple(rng.randint(1, 9) for _ in range(count))
                pool = sorted(_targets_of_kind(digits, kind, self.limit, self.operators))
                if not pool:
                    continue
                puzzle = Puzzle(digits, rng.choice(pool), kind, self.limit, self.operators)
                question = puzzle.question(self.verb)
                if question not in seen:
                    break
            else:
                raise SageError(
                    f"no new problem of kind {kind!r} was found after {len(seen)}: "
                    "ask for fewer, or for more digits or a higher limit"
                )
            seen.add(question)
            yield Problem(puzzle.id, label, question, str(puzzle.target), self.name, puzzle)

    def demonstrate(
        self, problem: Problem, rng: random.Random, aimless: bool, early: bool
    ) -> tuple[str, str]:
        """Draw work to the target, in the rare way with the probability ``rare_share``.

        Args and result are as in :meth:`ExactTask.demonstrate`. SageError where the drawn way does
        not reach the target.
        """
        share, puzzle = self.rare_share, problem.detail
        if share is None:
            raise SageError("demonstrations of countdown need the setting rare_share, such as 0.03")
        if aimless:
            return self._aimless(puzzle, rng)
        if early and self.early_rare_share is not None:
            share = self.early_rare_share
        way = "R" if rng.random() < share else "L"
        operators = solving(puzzle, way)
        if not operators:
            raise SageError(
                f"a problem of kind {puzzle.kind!r} has no solution in the way {way}: "
                "choose kinds: {both: 1.0}, or a rare_share of 0 or 1"
            )
        return solution(puzzle, way, rng.choice(operators))

    def _aimless(self, puzzle: Puzzle, rng: random.Random) -> tuple[str, str]:
        """Draw true steps within the limit of running values, to any target."""
        way = rng.choice(WAYS)
        indices = allowed(puzzle, way)
        drawn = sequences(len(puzzle.digits) - 1, puzzle.operators)[rng.choice(indices)]
        if self.spelled is not None:
            signs = {word: sign for sign, word in SPELLINGS.items()}
            share = self.spelled if way == "R" else 0.0
            plain = [signs.get(operator, operator) for operator in drawn]
            drawn = tuple(SPELLINGS.get(o, o) if rng.random() < share else o for o in plain)
        return solution(puzzle, way, drawn)

    @property
    def _is_shuffled(self) -> bool:
        # Short puzzles come first in a stream of distinct ones: both halves need some.
        return self.distinct is not None or self.early_rare_share is not None

    def could_draw(self, problem: Problem) -> bool:
        """Return whether the question is one of countdown's with as many digits, from any task."""
        match = re.fullmatch(self.verb + r" [0-9]+ from ([1-9](?: [1-9])*)", problem.question)
        return match is not None and self.fewest <= len(match[1].split()) <= self.most

    @classmethod
    def are_correct(
        cls, problems: Sequence[Problem], answers: Sequence[str | None], verifier: Verifier
    ) -> list[bool]:
        """Return whether each answer is an expression of the digits with the target's value.

        Args and result are as in :meth:`Task.are_correct`; ``verifier`` only counts.
        """
        correct = []
        for problem, answer in zip(problems, answers, strict=True):
            reason, value = ("no answer", None) if answer is None else read(problem.detail, answer)
            verifier.counts["pairs"] += 1
            verifier.counts[reason or "verified"] += 1
            correct.append(reason is None and value == problem.detail.target)
        return correct

    @classmethod
    def way_of(cls, problem: Problem, text: str) -> str | None:
        work = check(problem.detail, text)
        return work.way if work.valid else None

    @classmethod
    def measures(cls, problem: Problem, text: str, correct: bool) -> dict[str, bool]:
        """Return the measures of every exact task, and whether the work names the "rare" way.

        Args and result are as in :meth:`Task.measures`.
        """
        is_rare = check(problem.detail, text).way == "R"
        return {**super().measures(problem, text, correct), "rare": is_rare}

    @classmethod
    def completions(cls, problem: Problem) -> list[tuple[str, str, str]]:
        puzzle: Puzzle = problem.detail
        return [
            (way, *solution(puzzle, way, operators))
            for way in WAYS
            for operators in solving(puzzle, way)
        ]


NO_EXPRESSION, OTHER_DIGITS = "not an expression", "other digits"
OTHER_ORDER, BARE = "other order", "bare target"


def read(puzzle: Puzzle, answer: str) -> tuple[str | None, int | None]:
    """Return why an answer is refused, None where it is not, and the value of an expression."""
    expression = parse(answer, puzzle.operators) if len(answer) <= LENGTH_LIMIT else None
    if expression is None:
        return NO_EXPRESSION, None
    numbers, value = expression
    if numbers == [puzzle.target] and len(puzzle.digits) > 1:
        return BARE, value
    if sorted(numbers) != sorted(puzzle.digits):
        return OTHER_DIGITS, value
    return (None if tuple(numbers) == puzzle.digits else OTHER_ORDER), value


def _targets_of_kind(
    digits: tuple[int, ...], kind: str, limit: int, operators: tuple[str, ...]
) -> frozenset[int]:
    left, right = (targets(digits, way, limit, operators) for way in WAYS)
    if kind == "both":
        return left & right
    reached, other_way = (left, "R") if kind == "forward" else (right, "L")
    alone = reached - targets(digits, other_way, None, operators)
    return alone - other_targets(digits, operators=operators) if alone else alone
