"""The embedded task against its definition, and the step checker against every way to be wrong."""

import itertools
import random

import pytest

from sage_lib.errors import SageError
from sage_lib.tasks import countdown
from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START, WORK_END


def text(work, answer):
    return f"{work}{WORK_END}{SOLUTION_START}{answer}{SOLUTION_END}"


@pytest.mark.parametrize("kind", countdown.KINDS)
def test_problems_are_of_the_kind_they_say_by_brute_force(kind):
    for problem in itertools.islice(countdown.problems(3, 3, 30, {kind: 1.0}), 40):
        reached = {}
        for way in countdown.WAYS:
            digits = problem.digits if way == "L" else problem.digits[::-1]
            found = False
            for operators in itertools.product("+-*", repeat=2):
                first = eval(f"{digits[0]}{operators[0]}{digits[1]}")
                second = eval(f"({first}){operators[1]}{digits[2]}")
                found |= 0 <= first <= 30 and 0 <= second <= 30 and second == problem.target
            reached[way] = found
        assert (reached["L"], reached["R"]) == {
            "both": (True, True),
            "forward": (True, False),
            "reverse": (False, True),
        }[kind]


def test_the_stream_is_seeded_distinct_and_avoids_what_it_is_told_to():
    first = list(itertools.islice(countdown.problems(7, 4, 50, {"both": 1.0}), 200))
    assert first == list(itertools.islice(countdown.problems(7, 4, 50, {"both": 1.0}), 200))
    held = {p.id for p in first[:100]}
    others = {
        p.id for p in itertools.islice(countdown.problems(7, 4, 50, {"both": 1.0}, held), 200)
    }
    assert len({p.id for p in first}) == len(others) == 200 and not held & others


def test_a_space_that_is_exhausted_says_so():
    with pytest.raises(SageError, match="no new problem"):
        list(itertools.islice(countdown.problems(0, 2, 3, {"both": 1.0}), 500))


def test_demonstrations_are_valid_and_take_the_rare_way_at_the_given_share():
    rng, rare = random.Random(0), 0
    for problem in itertools.islice(countdown.problems(1, 4, 50, {"both": 1.0}), 2000):
        work, answer = countdown.demonstration(problem, 0.1, rng, 50)
        check = countdown.check(problem, text(work, answer))
        assert check.valid and check.way == work[0] and eval(answer) == problem.target
        rare += check.way == "R"
    assert 150 < rare < 250


PROBLEM = countdown.Problem((3, 5, 7, 2), 54, "forward")
WORK, ANSWER = "L 3 + 5 = 8 , 8 * 7 = 56 , 56 - 2 = 54", "( ( 3 + 5 ) * 7 ) - 2"


def test_the_worked_example_is_valid():
    assert countdown.check(PROBLEM, text(WORK, ANSWER)) == countdown.Check("L", True)


@pytest.mark.parametrize(
    ("work", "answer", "way"),
    [
        (WORK.replace("= 8 ,", "= 9 ,"), ANSWER, "L"),  # false arithmetic
        (WORK.replace("= 54", "= 53"), ANSWER, "L"),
        (WORK.replace("L ", "R "), ANSWER, "R"),  # the other way than the one named
        (WORK, "54", "L"),  # the target without the expression
        (WORK, ANSWER.replace("- 2", "+ 2"), "L"),
        (
            WORK.replace("56 - 2 = 54", "56 + 2 = 58"),
            ANSWER.replace("- 2", "+ 2"),
            "L",
        ),  # true steps, another target
        (WORK.replace("3 + 5", "4 + 4"), ANSWER, "L"),  # digits that were not given
        (WORK.rsplit(" ,", 1)[0], ANSWER, "L"),  # a step too few
        (WORK[2:], ANSWER, None),  # no way named
        ("", "", None),
    ],
)
def test_work_that_does_not_hold_is_not_valid(work, answer, way):
    assert countdown.check(PROBLEM, text(work, answer)) == countdown.Check(way, False)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace("<SOLUTION>", ""),
        lambda t: t.replace("</SOLUTION>", ""),
        lambda t: t + "<SOLUTION>1</SOLUTION>",
        lambda t: t + " 1",
    ],
)
def test_an_answer_outside_its_markers_is_not_valid(change):
    assert not countdown.check(PROBLEM, change(text(WORK, ANSWER))).valid


def test_work_without_its_end_is_not_valid():
    assert not countdown.check(PROBLEM, WORK).valid


@pytest.mark.parametrize("kind", countdown.KINDS)
def test_valid_completions_are_all_that_the_step_checker_accepts(kind):
    for problem in itertools.islice(countdown.problems(5, 3, 30, {kind: 1.0}), 20):
        listed = [
            text(f"{work}", answer) for _, work, answer in countdown.valid_completions(problem, 30)
        ]
        assert (
            listed
            and len(set(listed)) == len(listed)
            and all(countdown.check(problem, t).valid for t in listed)
        )
        found = 0
        for way in countdown.WAYS:  # every work that can be written, right or wrong
            digits = problem.digits if way == "L" else problem.digits[::-1]
            for a, b in itertools.product("+-*", repeat=2):
                first = eval(f"{digits[0]}{a}{digits[1]}")
                second = eval(f"{first}{b}{digits[2]}")
                if min(first, second) >= 0 and max(first, second) <= 30:
                    work = f"{way} {digits[0]} {a} {digits[1]} = {first} , {first} {b} {digits[2]} = {second}"
                    found += countdown.check(
                        problem, text(work, f"( {digits[0]} {a} {digits[1]} ) {b} {digits[2]}")
                    ).valid
        assert found == len(listed)
