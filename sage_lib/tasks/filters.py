"""The rule filters of rejection sampling (exploration report, 4.4.1): which completions may be
learned from. The solution markers stand for its "boxed"."""

from collections.abc import Hashable, Sequence

from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START

#: The report's limit for the share of 3-grams that repeat an earlier one.
REDUNDANCY_LIMIT = 0.31
#: Why a completion is not learned from, in the order in which it is asked.
REFUSALS = NO_ANSWER, NO_DIGIT, REDUNDANT = ("no answer", "no digit", "redundant")


def up_to_first_answer(text: str) -> str | None:
    """``text`` without what follows its first complete answer; None where it has none."""
    opening = text.find(SOLUTION_START)
    end = text.find(SOLUTION_END, opening) if opening >= 0 else -1
    return None if end < 0 else text[: end + len(SOLUTION_END)]


def refusal(text: str, limit: float = REDUNDANCY_LIMIT) -> str | None:
    """Why the rules refuse a completion, one of :data:`REFUSALS`; None where they keep it."""
    kept = up_to_first_answer(text)
    if kept is None:
        return NO_ANSWER
    if not any(character.isdigit() for character in kept):
        return NO_DIGIT
    return REDUNDANT if ngram_redundancy(kept.split()) > limit else None


def ngram_redundancy(tokens: Sequence[Hashable], n: int = 3) -> float:
    """Share of n-grams that repeat an earlier one, 1 - distinct / all; 0 without any n-gram."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
