"""Puzzles against brute force over all assignments; the scorer on right, wrong and cheating
answers."""

import itertools

import pytest
import reasoning_gym

from sage_lib.errors import SageError
from sage_lib.tasks import knights_knaves


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


@pytest.mark.parametrize("people", [2, 3, 5, 8])
def test_every_puzzle_has_the_gold_answer_as_its_only_solution(people):
    made = knights_knaves.problems(knights_knaves.Settings(people=people), 12, seed=7)
    assert len({p.question for p in made}) == len({p.id for p in made}) == 12
    generator = reasoning_gym.create_dataset(
        "knights_knaves",
        n_people=people,
        depth_constraint=2,
        width_constraint=2,
        size=2**31 - 1,
        seed=7,
    )
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
        assert knights_knaves.correct(puzzle.gold, puzzle.gold)


def test_puzzles_are_a_function_of_their_seed():
    three = knights_knaves.Settings(people=3)
    first = knights_knaves.problems(three, 5, 1)
    assert first == knights_knaves.problems(three, 5, 1) != knights_knaves.problems(three, 5, 2)
    with pytest.raises(SageError, match="2 to 8 people, not 9"):
        knights_knaves.Settings(people=9)


def test_there_is_nothing_to_learn_from():
    with pytest.raises(SageError, match="no worked answers"):
        knights_knaves.demonstrations(
            knights_knaves.Settings(people=3), 5, 1, count_tokens=len, max_seq_length=9
        )


GOLD = "Emma is a knight, Liam is a knave, and Mia is a knight."


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Emma is a knight, Liam is a knave, and Mia is a knight.", True),
        ("Mia is a knight, Liam is a knave, Emma is a knight", True),
        ("(emma is a knight) (liam is a knave) (mia is a knight)", True),
        ("Emma is a knight,\nLiam is a knave, and\nMia is a knight", True),
        ("Emma is a knave, Liam is a knave, and Mia is a knight.", False),
        ("It is false that Emma is a knight, Liam is a knave, and Mia is a knight.", False),
        (
            "I do not know. Perhaps not Emma is a knight, Liam is a knave, and Mia is a knight. "
            "Or the other way round.",
            False,
        ),
        ("is " * 130, False),
        ("Emma is a knight, Liam is a knave", False),
        (
            "Emma is a knight, Emma is a knave, Liam is a knight, Liam is a knave, "
            "Mia is a knight, Mia is a knave",
            False,
        ),
        ("Emma is not a knave, Liam is not a knight, Mia is not a knave", False),
        ("Emma is a knight/knave, Liam is a knight/knave, and Mia is a knight/knave", False),
        ("", False),
        (None, False),
        ("knight " * 200, False),
        ("\x00" * 50, False),
    ],
)
def test_scores(answer, expected):
    assert knights_knaves.correct(GOLD, answer) is expected
