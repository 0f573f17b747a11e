"""Puzzles against brute force over all assignments; the reader on right, wrong and cheating
answers, listed and made up by rules."""

import itertools
import random

import hostile
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_gym.logic.knights_knaves import KNIGHT_KNAVE_PAIRS

from sage_lib.tasks.knights_knaves import KnightsKnaves
from sage_lib.tasks.problem import Problem


def says(statement, roles):
    """Truth of one of reasoning-gym's statements when ``roles`` tells who is truthful."""
    head, *rest = statement
    if head in ("telling-truth", "lying"):
        return roles[rest[0]] == (head == "telling-truth")
    values = [says(s, roles) for s in rest]
    return {
        "not": lambda: not values[0],
        "and": lambda: all(values),
        "or": lambda: any(values),
        "->": lambda: not values[0] or values[1],
        "<=>": lambda: values[0] == values[1],
    }[head]()


def is_solution(gold, answer):
    return KnightsKnaves.is_correct(Problem("1", "three", "?", gold, "knights_knaves"), answer)


@pytest.mark.parametrize("people", [2, 3, 5, 8])
def test_every_puzzle_has_the_gold_answer_as_its_only_solution(people):
    made = KnightsKnaves(people=people).problems(12, seed=7)
    assert len({p.question for p in made}) == len({p.id for p in made}) == 12
    shape = {"n_people": people, "depth_constraint": 2, "width_constraint": 2}
    spread = random.Random(7).getrandbits(31)  # or the seeds 7 and 8 would share 11 puzzles
    generator = reasoning_gym.create_dataset("knights_knaves", **shape, size=12, seed=spread)
    for puzzle in made:
        entry = generator[int(puzzle.id.split("-")[2])]
        assert (entry["question"], entry["answer"]) == (puzzle.question, puzzle.gold)
        statements = entry["metadata"]["statements"]
        solutions = [
            roles
            for roles in itertools.product((True, False), repeat=people)
            if all(says(s, roles) == roles[i] for i, s in enumerate(statements))
        ]
        assert solutions == [tuple(entry["metadata"]["solution"])]
        assert is_solution(puzzle.gold, puzzle.gold)


GOLD = "Emma is a knight, Liam is a knave, and Mia is a knight."


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Emma is a knight, Liam is a knave, and Mia is a knight.", True),
        ("Mia is a knight, Liam is a knave, Emma is a knight", True),
        ("(emma is a knight) (liam is a knave) (mia is a knight)", True),
        ("Emma is a knight,\nLiam is a knave, and\nMia is a knight", True),
        ("Emma is a knave, Liam is a knave, and Mia is a knight.", False),
        ("Perhaps not Emma is a knight, Liam is a knave, and Mia is a knight. Or so.", False),
        ("is " * 130, False),
        ("Emma is not a knave, Liam is not a knight, Mia is not a knave", False),
        ("Emma is a knight/knave, Liam is a knight/knave, and Mia is a knight/knave", False),
        (None, False),
        ("knight " * 200, False),
        ("\x00" * 50, False),
        ("Emma is a knight, Liam is a knave, Mia is a knight?", False),
        ("and Emma is a knight, Liam is a knave, Mia is a knight", False),
        ("Emma is a knight, Liam is a knave, Mia is a knight and", False),
        ("Emma is a knight, Liam is a knave, Mia is a", False),
        ("Emma is a saint, Liam is a sinner, Mia is a saint", False),
        ("Emma is a knight, Liam is a knave, Mia is a \u212anight", False),  # the sign for kelvin
    ],
)
def test_scores(answer, expected):
    assert is_solution(GOLD, answer) is expected


ROLES = [tuple(word.split()[1] for word in pair) for pair in KNIGHT_KNAVE_PAIRS]
PEOPLE = ["Emma", "Liam", "Mia", "Noah", "Zoey", "Ava", "Owen", "Lily", "Luke", "Ella"]
#: What a statement may be instead of "NAME is a ROLE", with {name}, {role} and {other} filled in.
ASIDES = hostile.listed(
    "{name} is false ~ {name} is not ~ {name} is not a {other} ~ {name} is a {other} ~ "
    "{name} is a {role} ~ {name} is ~ {name} and ~ not {name} is a {role} ~ not ~ and ~ is ~ "
    "a {other} ~ it is false that ~ this is wrong ~ nobody is a {role} ~ everyone is a {other} ~ "
    "or {name} is a {other} ~ if {name} is a {role} ~ {name} is a {role}/{other} ~ "
    "{name} is a {role} {other} ~ {name} {name} is a {role} ~ who is {name}? ~ perhaps ~ maybe not"
)


@st.composite
def puzzles(draw):
    """A solution: a list of (person, role), and the pair of roles."""
    pair = draw(st.sampled_from(ROLES))
    people = draw(st.lists(st.sampled_from(PEOPLE), min_size=2, max_size=8, unique=True))
    return [(person, draw(st.sampled_from(pair))) for person in people], pair


def written(solution):
    """As reasoning-gym writes it."""
    *first, last = [f"{person} is a {role}" for person, role in solution]
    return f"{', '.join(first)}, and {last}."


def by_reasoning_gym(gold, answer):
    scorer = reasoning_gym.create_dataset("knights_knaves", n_people=2, size=1, seed=0)
    return scorer.score_answer(answer, {"answer": gold}) == 1.0


@settings(max_examples=150, deadline=None)
@given(puzzles(), st.randoms(use_true_random=False))
def test_the_true_solution_in_any_order_and_dress_is_right(puzzle, rng):
    solution, _ = puzzle
    gold = written(solution)
    statements = [f"{person} is {rng.choice(['a ', 'an ', ''])}{role}" for person, role in solution]
    rng.shuffle(statements)
    answer = rng.choice([", ", " and ", ", and ", "; ", ".\n", ") ("]).join(statements)
    answer = rng.choice([str, str.lower, str.upper])(answer)
    assert is_solution(gold, answer) and is_solution(gold, gold)


@settings(max_examples=150, deadline=None)
@given(puzzles(), st.data())
def test_another_solution_is_wrong(puzzle, data):
    solution, pair = puzzle
    other = [(person, data.draw(st.sampled_from(pair))) for person, _ in solution]
    names = data.draw(st.permutations([person for person, _ in solution]))
    renamed = [(name, role) for name, (_, role) in zip(names, solution, strict=True)]
    for answer in (other, renamed, solution[1:] + other[:1], solution[:-1]):
        right = dict(answer) == dict(solution)
        text = ", ".join(f"{person} is a {role}" for person, role in answer)
        assert is_solution(written(solution), text) is right
        assert not right or by_reasoning_gym(written(solution), text), "a second opinion"


@settings(max_examples=300, deadline=None)
@given(puzzles(), st.data())
def test_the_true_solution_with_anything_beside_it_is_wrong(puzzle, data):
    """Contradictory, repeated, negated and extra statements, other people, other roles."""
    solution, pair = puzzle
    statements = [f"{person} is a {role}" for person, role in solution]
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(PEOPLE))
        role = data.draw(st.sampled_from(sum(ROLES, ())))
        other = pair[role == pair[0]]
        aside = data.draw(st.sampled_from(ASIDES)).format(name=name, role=role, other=other)
        statements.insert(data.draw(st.integers(0, len(statements))), aside)
    glue = data.draw(st.sampled_from([", ", " and ", " ", ". "]))
    answer = glue.join(statements)
    # "and" alone between two statements is no aside, but how lists are written.
    if sorted(answer.replace(",", " ").replace(".", " ").replace(" and ", " ").split()) != sorted(
        " ".join(f"{person} is a {role}" for person, role in solution).split()
    ):
        assert not is_solution(written(solution), answer)


@settings(max_examples=300, deadline=None)
@given(puzzles(), st.data())
def test_a_word_more_or_less_is_wrong(puzzle, data):
    """One word of the solution is dropped, doubled or replaced by another."""
    solution, pair = puzzle
    words = " ".join(f"{person} is a {role}" for person, role in solution).split()
    place = data.draw(st.integers(0, len(words) - 1))
    vocabulary = ["is", "and", "a", "not", "false", "Quinn", *pair]
    new = data.draw(st.sampled_from(["", words[place] * 2, f"{words[place]} " * 2, *vocabulary]))
    changed = words[:place] + new.split() + words[place + 1 :]
    harmless = changed == words or (new == "" and words[place] == "a")
    assert is_solution(written(solution), " ".join(changed)) is harmless
