"""Errors of pydantic as one sentence: the place first, an unknown key before all else."""

import pytest
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from sage_lib.errors import SageError
from sage_lib.validation import make, pick


@dataclass(config=ConfigDict(extra="forbid", strict=True))
class Section:
    steps: int
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        if self.steps > 9:
            raise ValueError("Steps are too many")
        if self.steps > 8:
            raise SageError("take fewer")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"stesp": 1}, "mine: rl.stesp is unknown; did you mean rl.steps?"),
        ({"beta": 1}, "mine: rl.beta is unknown; choose one of steps, sizes"),
        ({}, "mine: rl.steps: field required"),
        ({"steps": "1"}, "mine: rl.steps: input should be a valid integer, not '1'"),
        (
            {"steps": 1, "sizes": (1, None)},
            "mine: rl.sizes.1: input should be a valid integer, not None",
        ),
        ({"steps": 10}, "mine: rl: steps are too many"),
        ({"steps": 9}, "mine: rl: take fewer"),
        ([1], "mine: rl must be a section of named settings, not [1]"),
    ],
)
def test_a_wrong_section_is_one_sentence(raw, words):
    with pytest.raises(SageError) as caught:
        make(Section, raw, "mine: rl")
    assert str(caught.value) == words


def test_a_name_is_looked_up_or_the_nearest_is_proposed():
    table = {"branch": 1, "token": 2}
    assert pick("token", table, "mine", "guide") == 2
    for name, words in (
        ("tokn", "'tokn'; did you mean token?"),
        (3, "3; choose one of branch, token"),
    ):
        with pytest.raises(SageError) as caught:
            pick(name, table, "mine", "guide")
        assert str(caught.value) == f"mine: there is no guide {words}"


def test_what_others_wrote_is_no_command_to_a_terminal():
    said = str(SageError("a\x1b[2J\x9b\u202e\ud800 \u00e9 \u4e2d"))
    assert said == r"a\x1b[2J\x9b\u202e\ud800 " + "\u00e9 \u4e2d"
