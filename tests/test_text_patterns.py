"""The keyword detectors on texts labelled by hand, and eq. 13 on counts worked out by hand."""

import math

import pandas as pd
import pytest

from sage_lib import paths
from sage_lib.evaluation import text_patterns
from sage_lib.tasks.prompts import answer_turn


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Let $x$ be the number of apples.", {"constraint setup"}),
        ("We denote the sum by S.", {"constraint setup"}),
        ("Let me think about it.", set()),
        ("Every such number is of the form 6k + 1.", {"structural reasoning"}),
        (
            "Assume for contradiction that n is even. This leads to a contradiction.",
            {"contradiction"},
        ),
        (
            "let a = 3; the number can be written as a product, which contradicts n < 2",
            {"constraint setup", "structural reasoning", "contradiction"},
        ),
        ("2 + 2 = 4", set()),
        ("The outlet is lettered.", set()),
    ],
)
def test_patterns(text, expected):
    assert text_patterns.patterns(text) == expected


def test_eq_13_by_hand():
    found = text_patterns.pattern_frequencies(
        [
            ["Let $x$ be 1", "nothing"],
            ["a contradiction, let y = 2"],
            [],
            ["plain", "plain", "denote z"],
        ]
    )
    assert found["constraint setup"].frequency == pytest.approx((1 / 2 + 1 + 1 / 3) / 3)
    assert found["contradiction"].frequency == pytest.approx(1 / 3)
    assert (found["contradiction"].problems, found["contradiction"].dropped) == (3, 1)
    assert math.isnan(text_patterns.pattern_frequencies([[]])["contradiction"].frequency)


def test_categories_by_hand():
    counts = text_patterns.categories("Therefore x = 3 + \\pi , let's check the apples")
    assert counts == {"logical": 1, "formal": 5, "metacognitive": 1, "semantic": 2}
    assert text_patterns.categories("") == {}
    assert text_patterns.categories("A dog is a friend and I like it") == {
        "semantic": 8,
        "logical": 1,
    }
    assert text_patterns.categories("a + 2 = $I$ , n") == {"formal": 8}


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


def test_every_judged_phrase_is_one_that_its_detector_still_finds():
    judged = pd.read_csv(paths.DETECTORS)
    assert (
        set(judged["pattern"]) == set(text_patterns.PATTERNS)
        and judged["genuine"].isin([0, 1]).all()
        and not judged.duplicated(["pattern", "solution"]).any()
    )
    for row in judged.itertuples():
        assert row.pattern in text_patterns.patterns(f"{row.phrase} x $ is"), row.phrase
