"""Countdown against its definition, and the step checker against every way to be wrong."""

import collections
import itertools
import random

import pytest

from sage_lib.errors import SageError
from sage_lib.experiment import problems
from sage_lib.experiment.profile import load_profile
from sage_lib.tasks import countdown, puzzles
from sage_lib.tasks.countdown import Countdown
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START, WORK_END


def text(work, answer):
    return f"{work}{WORK_END}{SOLUTION_START}{answer}{SOLUTION_END}"


#: How Python writes what an operator does.
PYTHON = {"max": "max({}, {})", "dist": "abs({} - {})"} | {o: f"({{}}{o}{{}})" for o in "+-*"}
FIVE = tuple(PYTHON)


def drawn(seed, digits, limit, kind, count, operators=puzzles.OPERATORS):
    shares = {kind: 1.0}
    task = Countdown(fewest=digits, most=digits, limit=limit, kinds=shares, operators=operators)
    return [problem.detail for problem in task.problems(count, seed)]


def bracketings(digits, operators="+-*"):
    """Every expression of the digits in their order: (text, shape, values of all its parts)."""
    if len(digits) == 1:
        yield str(digits[0]), "d", ()
        return
    for cut in range(1, len(digits)):
        for left, shape, inner in bracketings(digits[:cut], operators):
            for right, other, beside in bracketings(digits[cut:], operators):
                for operator in operators:
                    text = PYTHON[operator].format(left, right)
                    yield text, f"({shape}{other})", (*inner, *beside, eval(text))


def comb(length, way):
    """The shape of a way: brackets on the left, or on the right."""
    shape = "d"
    for _ in range(length - 1):
        shape = f"({shape}d)" if way == "L" else f"(d{shape})"
    return shape


@pytest.mark.parametrize("kind", countdown.KINDS)
@pytest.mark.parametrize(
    ("digits", "operators"), [*((n, puzzles.OPERATORS) for n in (2, 3, 4, 5)), (3, FIVE), (4, FIVE)]
)
def test_problems_are_of_the_kind_they_say_by_brute_force(kind, digits, operators):
    """One-way problems have no other solution by any bracketing, running values of any size; the
    audit found another one for 34 of 60 reverse and 33 of 60 forward problems."""
    if digits == 2 and kind != "both":
        return  # two digits have one bracketing
    for puzzle in drawn(3, digits, 30, kind, {5: 3, 4: 8}.get(digits, 25), operators):
        every = bracketings(puzzle.digits, operators)
        right = [one for one in every if eval(one[0]) == puzzle.target]
        solved = {shape for _, shape, _ in right}
        small = {shape for _, shape, parts in right if all(0 <= part <= 30 for part in parts)}
        ways = {way: comb(digits, way) for way in puzzles.WAYS}
        if kind == "both":
            assert set(ways.values()) <= small
        else:
            assert solved == small == {ways["L" if kind == "forward" else "R"]}


def test_the_other_bracketings_reach_what_brute_force_says():
    for digits in ((3, 5, 7, 2), (1, 1, 9, 4), (2, 9, 1, 3, 8)):
        ways = {comb(len(digits), way) for way in puzzles.WAYS}
        found = {eval(text) for text, shape, _ in bracketings(digits) if shape not in ways}
        assert puzzles.other_targets(digits) == found


@pytest.mark.parametrize("way", puzzles.WAYS)
def test_all_sequences_that_reach_a_target_are_counted_by_running_values(way):
    for puzzle in drawn(2, 8, 50, "both", 2, FIVE):
        first, *rest = puzzle.digits if way == "L" else puzzle.digits[::-1]
        ways_to = collections.Counter({first: 1})
        for digit in rest:
            before, ways_to = ways_to, collections.Counter()
            for (value, count), form in itertools.product(before.items(), PYTHON.values()):
                pair = (value, digit) if way == "L" else (digit, value)
                if 0 <= (grown := eval(form.format(*pair))) <= 50:
                    ways_to[grown] += count
        listed = puzzles.solving(puzzle, way)
        assert len(set(listed)) == len(listed) == ways_to[puzzle.target] > 0
        assert len(set(puzzles.allowed(puzzle, way))) == ways_to.total()
        assert puzzles.targets(puzzle.digits, way, 50, FIVE) == set(ways_to)


@pytest.mark.parametrize("aimless", [False, True])
def test_work_with_more_operators_holds(aimless):
    rng, used = random.Random(1), set()
    task = Countdown(fewest=6, most=6, operators=FIVE, rare_share=0.5)
    for problem in task.problems(100, 4):
        puzzle = problem.detail
        work, answer = task.demonstrate(problem, rng, aimless, early=False)
        numbers, value = puzzles.parse(answer, FIVE)
        steps = work[2:].split(" , ")
        used |= {step.split()[1] for step in steps}
        for a, operator, b, _, result in map(str.split, steps):
            assert eval(PYTHON[operator].format(a, b)) == int(result) <= 50
        assert tuple(numbers) == puzzle.digits and value == int(steps[-1].split()[-1])
        assert puzzles.check(puzzle, text(work, answer)).valid == (value == puzzle.target)
    assert used == set(FIVE)


def test_a_stream_that_runs_out_says_so():
    with pytest.raises(SageError, match="no new problem"):
        drawn(0, 2, 3, "both", 500)


def test_demonstrations_are_valid_and_take_the_rare_way_at_the_given_share():
    task = Countdown(rare_share=0.1)
    rare = 0
    made = task.problems(2000, 1)
    worked = task.demonstrations(2000, 1, count_tokens=len, max_seq_length=1)
    for problem, example in zip(made, worked, strict=True):
        assert problem.question == example.question
        check = puzzles.check(problem.detail, text(example.working, example.answer))
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
    task = Countdown(**given)
    with pytest.raises(SageError, match=words):
        task.demonstrations(20, 1, count_tokens=len, max_seq_length=1)


def test_one_way_problems_can_be_demonstrated_in_their_way():
    task = Countdown(kinds={"reverse": 1.0}, rare_share=1.0)
    worked = task.demonstrations(20, 1, count_tokens=len, max_seq_length=1)
    assert {example.working[0] for example in worked} == {"R"}


def test_the_first_half_of_the_demonstrations_has_its_own_share():
    task = Countdown(rare_share=0.0, early_rare_share=1.0)
    worked = task.demonstrations(9, 1, count_tokens=len, max_seq_length=1)
    assert [example.working[0] for example in worked] == ["R"] * 4 + ["L"] * 5


def test_what_could_be_drawn_is_a_question_with_as_many_digits():
    three = Countdown(fewest=2, most=3)
    for digits, expected in ((3, True), (4, False), (2, True)):
        [problem] = Countdown(fewest=digits, most=digits).problems(1, 0)
        assert three.could_draw(problem) is expected
    in_a_file = Problem("1", "mine", "reach 9 from 2 3 4", "9", "file", "math")
    assert three.could_draw(in_a_file)


def test_other_words_ask_the_same_puzzles_which_the_usual_words_hold_out():
    usual = Countdown().problems(20, 3)
    other = Countdown(verb="find").problems(20, 3)
    assert [p.detail for p in other] == [p.detail for p in usual]
    assert {p.question.split()[0] for p in other} == {"find"} and other[0].gold == usual[0].gold
    assert not any(Countdown().could_draw(p) for p in other)
    for name in ("smoke", "laptop", "study"):
        profile = load_profile(name)
        asked = problems.evaluation_problems(profile, ood=True)
        held_out = problems.held_out(profile, profile.rl_data)
        assert asked and {p.detail.question("reach") for p in asked} <= held_out


PROBLEM = puzzles.Puzzle((3, 5, 7, 2), 54, "forward", 56)
WORK, ANSWER = "L 3 + 5 = 8 , 8 * 7 = 56 , 56 - 2 = 54", "( ( 3 + 5 ) * 7 ) - 2"
RIGHT = text(WORK, ANSWER)


@pytest.mark.parametrize(
    ("completion", "way"),
    [
        (text(WORK.replace("= 8 ,", "= 9 ,"), ANSWER), "L"),  # false arithmetic
        (text(WORK.replace("= 54", "= 53"), ANSWER), "L"),
        (text(WORK.replace("= 54", "= " + "5" * 5000), ANSWER), "L"),
        (text(WORK.replace("L ", "R "), ANSWER), "R"),  # the other way than the one named
        (text(WORK, "54"), "L"),  # the target without the expression
        (text(WORK, ANSWER.replace("- 2", "+ 2")), "L"),
        (RIGHT.replace("- 2", "+ 2").replace("= 54", "= 58"), "L"),  # another target
        (text(WORK.replace("3 + 5", "4 + 4"), ANSWER), "L"),  # digits that were not given
        (text(WORK.rsplit(" ,", 1)[0], ANSWER), "L"),  # a step too few
        (text(WORK[2:], ANSWER), None),  # no way named
        (text("", ""), None),
        (WORK, "L"),  # an answer that is missing, or outside its markers
        (RIGHT.replace("<SOLUTION>", ""), "L"),
        (RIGHT.replace("</SOLUTION>", ""), "L"),
        (RIGHT + "<SOLUTION>1</SOLUTION>", "L"),
        (RIGHT + " 1", "L"),
        (RIGHT.replace("</SOLUTION>", "1</SOLUTION>"), "L"),
    ],
)
def test_work_or_an_answer_that_does_not_hold_is_not_valid(completion, way):
    assert puzzles.check(PROBLEM, RIGHT).valid
    assert puzzles.check(PROBLEM, completion) == puzzles.Check(way, False)


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
    found = Countdown.measures(problem, text(work, ANSWER), correct)
    assert {name for name, value in found.items() if value} == true
    assert set(found) >= {*Countdown.LOGGED, *Countdown.COUNTED}


def test_the_rare_way_is_measured_apart():
    [problem] = Countdown().problems(1, 0)
    measured = [
        Countdown.measures(problem, text(working, answer), True)
        for way, working, answer in Countdown.completions(problem)
        if way == "R"
    ]
    assert measured and all(found["valid_rare"] and found["rare"] for found in measured)
    assert not any(found["valid_common"] or found["unsound"] for found in measured)


@pytest.mark.parametrize("operators", [puzzles.OPERATORS, FIVE])
@pytest.mark.parametrize("kind", countdown.KINDS)
def test_valid_completions_are_all_that_the_step_checker_accepts(kind, operators):
    given = {"limit": 30, "kinds": {kind: 1.0}, "operators": operators}
    for problem in Countdown(fewest=3, most=3, **given).problems(20, 5):
        puzzle = problem.detail
        listed = [text(*worked) for _, *worked in Countdown.completions(problem)]
        assert listed and len(set(listed)) == len(listed)
        assert all(puzzles.check(puzzle, completion).valid for completion in listed)
        x, y, z = puzzle.digits
        found = 0
        for a, b in itertools.product(FIVE, repeat=2):  # every work that can be written
            left = eval(PYTHON[a].format(x, y))
            if 0 <= left <= 30 and 0 <= (value := eval(PYTHON[b].format(left, z))) <= 30:
                work = f"L {x} {a} {y} = {left} , {left} {b} {z} = {value}"
                answer = f"( {x} {a} {y} ) {b} {z}"
                found += puzzles.check(puzzle, text(work, answer)).valid
            right = eval(PYTHON[b].format(y, z))
            if 0 <= right <= 30 and 0 <= (value := eval(PYTHON[a].format(x, right))) <= 30:
                work = f"R {y} {b} {z} = {right} , {x} {a} {right} = {value}"
                answer = f"{x} {a} ( {y} {b} {z} )"
                found += puzzles.check(puzzle, text(work, answer)).valid
        assert found == len(listed)


def test_a_running_value_beyond_the_limit_is_not_valid():
    """True work, a right answer, and a number that the vocabulary does not have."""
    work = "L 9 * 8 = 72 , 72 - 9 = 63 , 63 - 9 = 54 , 54 - 9 = 45"
    answer = "( ( ( 9 * 8 ) - 9 ) - 9 ) - 9"
    for limit, valid in ((50, False), (71, False), (72, True)):
        puzzle = puzzles.Puzzle((9, 8, 9, 9, 9), 45, "forward", limit)
        assert puzzles.check(puzzle, text(work, answer)) == puzzles.Check("L", valid)
    problem = Countdown(kinds={"forward": 1.0}).problems(50, 1)
    works = [work for p in problem for _, work, _ in Countdown.completions(p)]
    words = {word for work in works for word in work.split()}
    assert {int(word) for word in words if word.isdigit()} <= set(range(51))


def test_the_rare_way_alone_is_spelled_and_spelling_moves_no_value():
    six = ("+", "max", "dist", "plus", "top", "gap")
    puzzle = puzzles.Puzzle((3, 8, 5), 10, "both", 40, six)
    problem = Problem("1", "both", "", "10", "countdown", puzzle)
    task = Countdown(rare_share=0.5, spelled=0.2)
    rng, words, signs = random.Random(0), {"L": 0, "R": 0}, {"L": 0, "R": 0}
    for _ in range(2000):
        work, answer = task.demonstrate(problem, rng, aimless=True, early=False)
        way, *rest = work.split()
        words[way] += sum(word in puzzles.SPELLINGS.values() for word in rest)
        signs[way] += sum(word in puzzles.SPELLINGS for word in rest)
        assert puzzles.parse(answer, six)[1] == int(rest[-1])  # all brackets are written
    assert words["L"] == 0 and abs(words["R"] / (words["R"] + signs["R"]) - 0.2) < 0.03
    for word in puzzles.SPELLINGS.values():
        sign = next(s for s, w in puzzles.SPELLINGS.items() if w == word)
        assert puzzles.parse(f"3 {word} 8", six) == puzzles.parse(f"3 {sign} 8", six)


def test_training_in_other_words_leaves_out_what_is_held_out_in_these_words():
    task = Countdown(fewest=3, most=3, verb="make")
    held_out = task.problems(50, 7)
    assert all(task.could_draw(problem) for problem in held_out)
    questions = {problem.question for problem in held_out}
    assert questions & {p.question for p in task.problems(400, 8)}, "by chance, without the list"
    drawn = task.problems(400, 8, exclude=frozenset(questions))
    assert not questions & {problem.question for problem in drawn}
