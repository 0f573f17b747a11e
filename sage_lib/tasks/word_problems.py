"""Word problems in the style of GSM8K, generated and seeded: GSM-Symbolic's templates as the package reasoning-gym has them."""

from collections.abc import Iterator
from dataclasses import dataclass

from sage_lib.errors import SageError

#: Problems that one seed makes; reasoning-gym plans all of them at once.
SIZE = 20_000


@dataclass(frozen=True)
class WordProblem:
    id: str
    question: str
    working: str
    answer: str


def problems(
    seed: int, longest: int | None, exclude: frozenset[str] = frozenset()
) -> Iterator[WordProblem]:
    """A seeded stream of distinct problems whose working has at most ``longest`` characters (None: any), none with a question in
    ``exclude``: a function of its arguments alone. Raises SageError when it runs dry, after :data:`SIZE` tries."""
    import reasoning_gym

    made, seen = reasoning_gym.create_dataset("gsm_symbolic", size=SIZE, seed=seed), set(exclude)
    for index in range(SIZE):
        entry = made[index]
        question = " ".join(entry["question"].split())
        working = entry["metadata"]["answer_cot"].partition("####")[0].strip()
        if question not in seen and (longest is None or len(working) <= longest):
            seen.add(question)
            yield WordProblem(f"{seed}-{index}", question, working, str(entry["answer"]))
    raise SageError(f"the word problems ran out after {len(seen) - len(exclude)}: ask for fewer")
