"""The keyword detectors on texts labelled by hand, and eq. 13 on counts worked out by hand."""

import math

import pytest

from sage_lib.evaluation import text_patterns
from sage_lib.tasks.prompts import answer_turn


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Let $x$ be the number of apples.", {"constraint setup"}),
        ("We denote the sum by S.", {"constraint setup"}),
        ("Let me think about it.", set()),
        ("Every such number is of the form 6k + 1.", {"structural reasoning"}),
        ("Assume for contradiction that n is even. Which is impossible.", {"contradiction"}),
        ("let a = 3; it can be written as ab, which contradicts n < 2", {*text_patterns.PATTERNS}),
        ("The outlet is lettered.", set()),
    ],
)
def test_patterns(text, expected):
    found = text_patterns.pattern_frequencies([[text]])
    assert {name for name, one in found.items() if one.frequency} == expected


def test_eq_13_by_hand():
    texts = [["Let $x$ be 1", "nothing"], ["a contradiction, let y = 2"], []]
    found = text_patterns.pattern_frequencies([*texts, ["plain", "plain", "denote z"]])
    assert found["constraint setup"].frequency == pytest.approx((1 / 2 + 1 + 1 / 3) / 3)
    assert found["contradiction"].frequency == pytest.approx(1 / 3)
    assert (found["contradiction"].problems, found["contradiction"].dropped) == (3, 1)
    assert math.isnan(text_patterns.pattern_frequencies([[]])["contradiction"].frequency)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (answer_turn("L 1 + 2 = 3", "1 + 2"), set()),
        ("no marks at all", {"format"}),
        (answer_turn("work", "1") + answer_turn("work", "2"), {"format"}),
        (answer_turn("so it is so it is so it is so it is so it is", "1"), {"repetition"}),
        (answer_turn("the answer is 七 apples", "7"), {"language"}),
        (answer_turn("π and é and ∑ and ℎ and ℵ at 90º are fine", "7"), set()),
        (answer_turn("the answer is א apples", "7"), {"language"}),
    ],
)
def test_defects(text, expected):
    assert text_patterns.defects(text) == expected
    assert text_patterns.defects(text, finished=False) == expected | {"truncated"}
