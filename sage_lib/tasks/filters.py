"""The rules of rejection sampling (exploration report, 4.4.1): which completions are learned from.
The solution markers stand for the report's "boxed"."""

from collections.abc import Hashable, Sequence

from sage_lib.tasks.prompts import SOLUTION_END, SOLUTION_START

#: The report's limit for the share of 3-grams that repeat an earlier one.
REDUNDANCY_LIMIT = 0.31
#: Why a completion is not learned from, in the order of the rules.
REFUSALS = NO_ANSWER, NO_DIGIT, REDUNDANT = ("no answer", "no digit", "redundant")


def up_to_first_answer(text: str) -> str | None:
    """Return the text up to its first complete answer; None where it has none."""
    opening = text.find(SOLUTION_START)
    end = text.find(SOLUTION_END, opening) if opening >= 0 else -1
    return None if end < 0 else text[: end + len(SOLUTION_END)]


def refusal(text: str, limit: float = REDUNDANCY_LIMIT) -> str | None:
    """Return why the rules refuse a completion, one of :data:`REFUSALS`; None if they do not."""
    answered = up_to_first_answer(text)
    if answered is None:
        return NO_ANSWER
    if not any(character.isdigit() for character in answered):
        return NO_DIGIT
    return REDUNDANT if ngram_redundancy(answered.split()) > limit else None


def ngram_redundancy(tokens: Sequence[Hashable]) -> float:
    """Return the share of 3-grams that repeat an earlier one: 1 - distinct / all, 0 for none."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
