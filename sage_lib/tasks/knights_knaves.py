"""Knights and Knaves (Figure 4, out of distribution): seeded puzzles of the package reasoning-gym, scored by its own scorer."""

import re
from dataclasses import dataclass
from functools import lru_cache

from sage_lib.errors import SageError

#: A longer answer is refused unread (characters); eight people need about 200.
LENGTH_LIMIT = 400
PEOPLE = range(2, 9)
_ASSIGNMENTS = re.compile(r"(?:(?:^| )(?:and )?[^\W\d_]+ is (?:an? )?[^\W\d_]+)+", re.IGNORECASE)


@dataclass(frozen=True)
class Puzzle:
    """``answer`` says who is what; ``statements`` is what each person says, as reasoning-gym's nested tuples, and
    ``solution`` whether each tells the truth."""

    id: str
    question: str
    answer: str
    statements: tuple
    solution: tuple[bool, ...]


def puzzles(people: int, count: int, seed: int) -> list[Puzzle]:
    """``count`` distinct puzzles with ``people`` inhabitants, a function of the arguments alone.

    Raises SageError for a number of people outside 2..8.
    """
    if people not in PEOPLE:
        raise SageError(
            f"Knights and Knaves puzzles have {PEOPLE.start} to {PEOPLE.stop - 1} people, not {people}"
        )
    found: dict[str, Puzzle] = {}
    made = _dataset(people, seed)
    for index in range(20 * count):
        if len(found) == count:
            break
        entry = made[index]
        if entry["question"] not in found:
            found[entry["question"]] = Puzzle(
                f"{people}-{seed}-{index}",
                entry["question"],
                entry["answer"],
                entry["metadata"]["statements"],
                tuple(entry["metadata"]["solution"]),
            )
    if len(found) < count:
        raise SageError(
            f"only {len(found)} different puzzles with {people} people were found: ask for fewer"
        )
    return list(found.values())


def correct(gold: str, answer: str | None) -> bool:
    """Whether ``answer`` assigns every person the gold's role and says nothing else; partial credit counts as wrong.

    reasoning-gym's scorer passes over words that it does not know, "it is false that" among them: so a list of assignments,
    such as "Zoey is a knight, and Noah is a knave.", is asked for first.
    """
    return (
        answer is not None
        and len(answer) <= LENGTH_LIMIT
        and _ASSIGNMENTS.fullmatch(" ".join(re.sub(r"[(),;.]", " ", answer).split())) is not None
        and _dataset(2, 0).score_answer(answer, {"answer": gold}) == 1.0
    )


@lru_cache(maxsize=16)
def _dataset(people: int, seed: int):
    import reasoning_gym

    return reasoning_gym.create_dataset(
        "knights_knaves",
        n_people=people,
        depth_constraint=2,
        width_constraint=2,
        size=2**31 - 1,
        seed=seed,
    )
