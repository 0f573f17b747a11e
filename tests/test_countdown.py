"""Countdown against its definition, and the step checker against every way to be wrong."""

import itertools

import pytest

from sage_lib.errors import SageError
from sage_lib.tasks import countdown
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START, WORK_END


def text(work, answer):
    return f"{work}{WORK_END}{SOLUTION_START}{answer}{SOLUTION_END}"


def puzzles(seed, digits, limit, kind, count):
    settings = countdown.Settings(digits=digits, limit=limit, kinds={kind: 1.0})
    return [problem.detail for problem in countdown.problems(settings, count, seed)]


@pytest.mark.parametrize("kind", countdown.KINDS)
def test_problems_are_of_the_kind_they_say_by_brute_force(kind):
    for problem in puzzles(3, 3, 30, kind, 40):
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
    settings = countdown.Settings()
    first = countdown.problems(settings, 200, 7)
    assert first == countdown.problems(settings, 200, 7)
    held = frozenset(p.question for p in first[:100])
    others = {p.question for p in countdown.problems(settings, 200, 7, held)}
    assert len({p.id for p in first}) == len({p.question for p in first}) == len(others) == 200
    assert not held & others


def test_a_space_that_is_exhausted_says_so():
    with pytest.raises(SageError, match="no new problem"):
        puzzles(0, 2, 3, "both", 500)


def test_demonstrations_are_valid_and_take_the_rare_way_at_the_given_share():
    settings = countdown.Settings(rare_share=0.1)
    rare = 0
    made = countdown.problems(settings, 2000, 1)
    worked = countdown.demonstrations(settings, 2000, 1, count_tokens=len, max_seq_length=1)
    for problem, example in zip(made, worked, strict=True):
        assert problem.question == example.question
        check = countdown.check(problem.detail, text(example.working, example.answer))
        assert check.valid and check.way == example.working[0]
        assert eval(example.answer) == problem.detail.target == int(problem.gold)
        rare += check.way == "R"
    assert 150 < rare < 250


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "need the setting rare_share"),
        ({"kinds": {"forward": 1.0}, "rare_share": 0.5}, "has no solution in the way R"),
        ({"kinds": {"reverse": 1.0}, "rare_share": 0.0}, "has no solution in the way L"),
    ],
)
def test_demonstrations_that_cannot_be_made_say_why(given, words):
    settings = countdown.Settings(**given)
    with pytest.raises(SageError, match=words):
        countdown.demonstrations(settings, 20, 1, count_tokens=len, max_seq_length=1)


def test_one_way_problems_can_be_demonstrated_in_their_way():
    settings = countdown.Settings(kinds={"reverse": 1.0}, rare_share=1.0)
    worked = countdown.demonstrations(settings, 20, 1, count_tokens=len, max_seq_length=1)
    assert {example.working[0] for example in worked} == {"R"}


def test_what_could_be_drawn_is_a_question_with_as_many_digits():
    three = countdown.Settings(digits=3)
    for digits, expected in ((3, True), (4, False)):
        problem = countdown.problems(countdown.Settings(digits=digits), 1, 0)[0]
        assert countdown.could_draw(three, problem) is expected
    in_a_file = Problem("1", "mine", "reach 9 from 2 3 4", "9", "file", "math")
    assert countdown.could_draw(three, in_a_file)


PROBLEM = countdown.Puzzle((3, 5, 7, 2), 54, "forward", 56)
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
        lambda t: t.replace("</SOLUTION>", "1</SOLUTION>"),
    ],
)
def test_an_answer_outside_its_markers_is_not_valid(change):
    assert not countdown.check(PROBLEM, change(text(WORK, ANSWER))).valid


def test_work_without_its_end_is_not_valid():
    assert not countdown.check(PROBLEM, WORK).valid


def test_a_number_too_long_to_be_read_is_not_valid():
    work = WORK.replace("= 54", "= " + "5" * 5000)
    assert countdown.check(PROBLEM, text(work, ANSWER)) == countdown.Check("L", False)


@pytest.mark.parametrize(
    ("work", "correct", "true"),
    [
        (WORK, True, {"valid", "valid_common"}),
        (WORK.replace("56 - 2 = 54", "54 = 54"), True, {"unsound"}),
        (WORK.replace("L ", "R "), True, {"unsound", "rare"}),
        (WORK.replace("L ", "R "), False, {"rare"}),
        ("", False, set()),
    ],
)
def test_measures(work, correct, true):
    problem = Problem("1", "both", PROBLEM.question, "54", "countdown", PROBLEM)
    found = countdown.measures(problem, text(work, ANSWER), correct)
    assert {name for name, value in found.items() if value} == true
    assert set(found) >= {*countdown.LOGGED, *countdown.COUNTED}


def test_the_rare_way_is_measured_apart():
    [problem] = countdown.problems(countdown.Settings(), 1, 0)
    measured = [
        countdown.measures(problem, text(working, answer), True)
        for way, working, answer in countdown.completions(problem)
        if way == "R"
    ]
    assert measured and all(found["valid_rare"] and found["rare"] for found in measured)
    assert not any(found["valid_common"] or found["unsound"] for found in measured)


@pytest.mark.parametrize("kind", countdown.KINDS)
def test_valid_completions_are_all_that_the_step_checker_accepts(kind):
    settings = countdown.Settings(digits=3, limit=30, kinds={kind: 1.0})
    for problem in countdown.problems(settings, 20, 5):
        puzzle = problem.detail
        listed = [text(working, answer) for _, working, answer in countdown.completions(problem)]
        assert listed and len(set(listed)) == len(listed)
        assert all(countdown.check(puzzle, completion).valid for completion in listed)
        found = 0
        for way in countdown.WAYS:  # every work that can be written, right or wrong
            x, y, z = puzzle.digits if way == "L" else puzzle.digits[::-1]
            for a, b in itertools.product("+-*", repeat=2):
                first = eval(f"{x}{a}{y}")
                second = eval(f"{first}{b}{z}")
                if min(first, second) >= 0 and max(first, second) <= 30:
                    work = f"{way} {x} {a} {y} = {first} , {first} {b} {z} = {second}"
                    answer = f"( {x} {a} {y} ) {b} {z}"
                    found += countdown.check(puzzle, text(work, answer)).valid
        assert found == len(listed)
