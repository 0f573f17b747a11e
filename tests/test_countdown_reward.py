"""What countdown's reward pays for: every wrong answer has its reason, and values are Python's."""

import random
import re

import pytest
from hostile import listed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_countdown import bracketings

from sage_lib.tasks import countdown, puzzles
from sage_lib.tasks.countdown import Countdown
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.verifier import Verifier

PUZZLE = puzzles.Puzzle((2, 5, 2, 8), 52, "both", 60)
PROBLEM = Problem("1", "both", "", "52", "countdown", PUZZLE)
RIGHT = [
    "2 + 5 * ( 2 + 8 )",
    "( 2 + ( 5 * ( 2 + 8 ) ) )",
    "2+5*(2+8)",
    "((2))+5*(2+8)",
    "2 + (5*(2+8))",
]
OTHER_VALUE = ["( ( 2 + 5 ) * 2 ) + 8", "2 + 5 + 2 + 8", "2 - 5 - 2 - 8", "2 * 5 * 2 * 8"]


REFUSED = {
    countdown.BARE: listed("52 ~ ( 52 ) ~ ((52)) ~ 052 ~  52 "),
    countdown.OTHER_DIGITS: [
        *listed(
            "50 + 2 ~ 26 * 2 ~ 2 + 50 ~ 25 + 28 ~ 2 + 5 * 2 + 8 + 0 ~ 2 + 5 * 10 ~ 2 * 26 ~ "
            "2 + 5 * ( 2 + 8 ) + 0 ~ 2 + 5 * ( 2 + 8 ) * 1 ~ 1 * ( 2 + 5 * ( 2 + 8 ) ) ~ "
            "2 + 5 * 2 ~ 52 + 2 - 2 ~ 52 * 1 ~ 104 - 52 ~ 2 + 5 ~ 0 ~ 2 ~ ( 2 + 5 ) * 28 ~ "
            "25 * 2 + 8 - 6 ~ 2 + 5 * ( 2 + 8 ) - 0 ~ 2 + 2 + 5 * ( 2 + 8 ) - 2 ~ 13 * 4 ~ "
            "2 + 5 * ( 2 + 8 ) + 2 - 2 ~ 60 - 8 ~ 51 + 1 ~ 2 * 2 * 13 ~ 2 + 5 * ( 2 + 9 ) ~ "
            "3 + 5 * ( 2 + 8 )"
        ),
    ],
    countdown.OTHER_ORDER: [
        *listed(
            "5 * ( 2 + 8 ) + 2 ~ ( 2 + 8 ) * 5 + 2 ~ ( 8 + 2 ) * 5 + 2 ~ 2 + ( 2 + 8 ) * 5 ~ "
            "2 + 5 * ( 8 + 2 ) ~ 8 + 2 + 5 + 2 ~ 2 + 2 + 5 + 8 ~ 2 + 2 * 5 * 8 ~ 5 + 2 + 2 + 8 ~ "
            "2 + 8 * 5 + 2 ~ ( 5 * 8 ) + ( 2 + 2 ) ~ 8 * 5 + 2 * 2"
        ),
    ],
    countdown.NO_EXPRESSION: [
        *listed(
            "x = 52 ~ 52 = 52 ~ = 52 ~ 2 + 5 * ( 2 + 8 ) = 52 ~ 12 12 ~ 2 22 ~ 26 26 ~ 2 5 2 8 ~ "
            "4! ~ 2 ! + 50 ~ 2 + 5 * ( 2 + 8 ~ 2 + 5 * 2 + 8 ) ~ ( ) ~ () ~ + ~ * ~ 2 + ~ "
            "+ 2 + 5 * ( 2 + 8 ) ~ - 2 + 5 * 2 + 8 ~ 2 + - 5 * 2 + 8 ~ 2 ** 5 + 2 + 8 ~ "
            "2 ^ 5 + 2 + 8 ~ 2 / 5 * 2 + 8 ~ 2 : 5 * 2 + 8 ~ 2 // 5 * 2 + 8 ~ 2 % 5 * 2 + 8 ~ "
            "2 x 5 x 2 x 8 ~ $2 + 5 * (2 + 8)$ ~ 2 + 5 * [ 2 + 8 ] ~ 2 + 5 * { 2 + 8 } ~ "
            "2 + 5 ( 2 + 8 ) ~ ( 2 ) ( 5 ) ( 2 ) ( 8 ) ~ 2 + 5 * ( 2 + 8 ) . ~ "
            "2 + 5 * ( 2 + 8 ) , 52 ~ 52 ; 2 + 5 * ( 2 + 8 ) ~ 2 + 5 * ( 2 + 8 ) or 52 ~ "
            "the answer is 52 ~ fifty-two ~ 5.2e1 ~ 52.0 ~ 52 % ~ 0x34 ~ 0b110100 ~ 1e9 ~ "
            "2 + 5 * ( 2 + 8 ) # 52 ~ sqrt(2704) ~ {2, 52} ~ (2, 52) ~ 52, 52 ~ [52] ~ |52| ~ "
            "--52 ~ 52! ~ 52' ~ 52 mod 100 ~ import os ~ 2 + 5 * ( 2 + 8 ) if True else 52 ~ "
            "lambda: 52 ~ None ~ True ~ nan ~ inf"
        ),
        *listed(" ~   ~ 2 \xd7 5 + 2 + 8 ~ \u0665\u0662 ~ \uff15\uff12 ~ \u2460"),
        *listed(r"2 \times 5 + 2 + 8 ~ 2 \cdot 5 + 2 + 8 ~ \frac{2}{5} + 2 + 8 ~ \boxed{52}"),
        *listed("2 + 5 * ( 2 + 8 ) \\\\ 52 ~ 2 + 5 * ( 2 + 8 ) \n + x"),
        *("(" * 300 + "52", "1" * 500, "2 + " * 200 + "2"),
    ],
}
HOSTILE = [answer for answers in REFUSED.values() for answer in answers]


def test_the_reward_is_paid_for_the_digits_in_their_order_with_the_targets_value(verifier):
    assert all(Countdown.are_correct([PROBLEM] * len(RIGHT), RIGHT, verifier))
    assert not any(Countdown.are_correct([PROBLEM] * len(OTHER_VALUE), OTHER_VALUE, verifier))
    assert Countdown.are_correct([PROBLEM], [None], verifier) == [False]


def test_nothing_else_is_paid_and_the_reason_is_counted(verifier):
    assert len(HOSTILE) >= 100
    before = dict(verifier.counts)
    assert not any(Countdown.are_correct([PROBLEM] * len(HOSTILE), HOSTILE, verifier))
    for reason, refused in REFUSED.items():
        assert {countdown.read(PROBLEM.detail, answer)[0] for answer in refused} == {reason}
        assert verifier.counts[reason] - before.get(reason, 0) == len(refused)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_every_bracketing_of_the_digits_is_an_expression_and_no_other_order_is(digits, rng):
    puzzle = puzzles.Puzzle(tuple(digits), -1, "both", 50)
    text, _, _ = rng.choice(list(bracketings(tuple(digits))))
    assert countdown.read(puzzle, text)[0] is None
    other = sorted(digits) if digits != sorted(digits) else sorted(digits)[::-1]
    if other != digits:
        moved, _, _ = rng.choice(list(bracketings(tuple(other))))
        assert countdown.read(puzzle, moved)[0] == countdown.OTHER_ORDER


def written(digits, rng):
    """An expression of the digits in their order as somebody writes one: brackets where they are
    needed or not, spaces, leading zeros."""
    if len(digits) == 1:
        return "0" * rng.choice([0, 0, 0, 1, 2]) + str(digits[0])
    cut = rng.randint(1, len(digits) - 1)
    space = rng.choice(["", " "])
    text = space.join([written(digits[:cut], rng), rng.choice("+-*"), written(digits[cut:], rng)])
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        text = f"({space}{text}{space})"
    return text


def by_python(text):
    return eval(re.sub(r"\b0+(?=[0-9])", "", text))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_value_is_that_of_python(digits, rng):
    text = written(tuple(digits), rng)
    assert puzzles.parse(text) == (digits, by_python(text))


class Number(int):
    """With max as @ and |a - b| as //, which Python binds as it does *."""

    def __matmul__(self, other):
        return Number(max(self, other))

    def __floordiv__(self, other):
        return Number(abs(self - other))

    def __mul__(self, other):
        return Number(int(self) * int(other))

    def __add__(self, other):
        return Number(int(self) + int(other))

    def __sub__(self, other):
        return Number(int(self) - int(other))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_max_and_dist_bind_as_times_does_in_python(digits, rng):
    text = re.sub(r"[-+*]", lambda _: rng.choice("+-*@/"), written(tuple(digits), rng))
    by_python = eval(re.sub(r"0*([0-9]+)", r"Number(\1)", text.replace("/", "//")))
    shown = text.replace("@", " max ").replace("/", " dist ")
    five = (*puzzles.OPERATORS, "max", "dist")
    assert puzzles.parse(shown, five) == (digits, by_python)
    assert (puzzles.parse(shown) is None) == (shown != text)


def test_the_reward_is_the_one_of_math_verify_on_what_is_not_refused(verifier):
    """Of every expression, with its value as the target and with one beside it."""
    rng = random.Random(5)
    asked, answers = [], []
    for number in range(150):
        digits = tuple(rng.randint(1, 9) for _ in range(rng.randint(2, 6)))
        text = written(digits, rng)
        for target in (by_python(text), by_python(text) + rng.choice([-1, 1])):
            puzzle = puzzles.Puzzle(digits, target, "both", 60)
            asked.append(Problem(str(number), "both", "", str(target), "countdown", puzzle))
            answers.append(text)
    found = Countdown.are_correct(asked, answers, verifier)
    theirs = verifier.verify_answers([problem.gold for problem in asked], answers)
    assert found == [verdict.correct for verdict in theirs]
    assert sum(found) == 150


def test_the_reward_starts_no_process():
    alone = Verifier()
    answers = [*RIGHT, *OTHER_VALUE, *HOSTILE, None]
    Countdown.are_correct([PROBLEM] * len(answers), answers, alone)
    assert alone._pool is None
    assert alone.counts["verified"] == len(RIGHT) + len(OTHER_VALUE)


@pytest.mark.parametrize("depth", [1, 20, 60, 190])
def test_brackets_are_read_however_deep(depth):
    text = "2+" + "(" * depth + "5*(2+8)" + ")" * depth
    assert puzzles.parse(text) == ([2, 5, 2, 8], 52)
    assert puzzles.parse(text[:-1]) is None and puzzles.parse(text + ")") is None
