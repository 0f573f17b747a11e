"""Reasoning patterns and defects of a sample's text, by keywords."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from sage_lib.tasks.filters import REDUNDANCY_LIMIT, ngram_redundancy
from sage_lib.tasks.prompts import MARKERS, SOLUTION_END, SOLUTION_START, WORK_END, WORK_START

#: Appendix G names the patterns and some phrases of each; we chose the rest in their spirit.
PATTERNS = {
    "constraint setup": (
        r"\blet\s+(us\s+)?(\$|\\\(|[a-z]\b)",
        r"\bdenote\b",
        r"\bdefine\b",
        r"\bsuppose\s+(\$|\\\(|[a-z]\b)",
        r"\bsubject to\b",
        r"\bwhere\s+(\$|\\\(|[a-z]\b)[^.]{0,40}\b(is|are|denotes?)\b",
    ),
    "structural reasoning": (
        r"\bof the form\b",
        r"\bdecompos\w*",
        r"\bcan be (re)?written as\b",
        r"\bin terms of\b",
        r"\bcase\s+(1|i|one|a)\b",
        r"\bby symmetry\b",
        r"\bwithout loss of generality\b",
        r"\bfactor(s|ed|ing)?\s+(as|into|out)\b",
    ),
    "contradiction": (
        r"\bfor (the sake of )?contradiction\b",
        r"\b(leads?|leading) to a contradiction\b",
        r"\ba contradiction\b",
        r"\bcontradicts?\b",
        r"\bwhich is impossible\b",
        r"\bcannot be (true|possible)\b",
    ),
}
_PATTERNS = {
    name: re.compile("|".join(phrases), re.IGNORECASE) for name, phrases in PATTERNS.items()
}


@dataclass(frozen=True)
class PatternFrequency:
    frequency: float  # mean over ``problems``, NaN where there is none
    problems: int  # with a correct sample
    dropped: int  # problems without one


def pattern_frequencies(correct_texts: Sequence[Sequence[str]]) -> dict[str, PatternFrequency]:
    """Return the mean over problems of the share of correct samples with a pattern (eq. 13).

    ``correct_texts`` has the correct samples of each problem; the mean drops a problem without any.
    """
    solved = [texts for texts in correct_texts if len(texts)]
    frequencies = {}
    for name, pattern in _PATTERNS.items():
        shares = [
            sum(bool(pattern.search(text)) for text in texts) / len(texts) for texts in solved
        ]
        mean = sum(shares) / len(shares) if shares else float("nan")
        frequencies[name] = PatternFrequency(mean, len(solved), len(correct_texts) - len(solved))
    return frequencies


def defects(text: str, finished: bool = True) -> set[str]:
    """Return the defects of a response (exploration report): "format", not exactly one work end
    and one answer; "repetition", too many redundant 3-grams; "language", letters of another script.
    And "truncated": cut off, which ``finished`` says."""
    kinds = set() if finished else {"truncated"}
    markers = re.findall("|".join(map(re.escape, MARKERS)), text.removeprefix(WORK_START))
    if markers != [WORK_END, SOLUTION_START, SOLUTION_END]:
        kinds.add("format")
    if ngram_redundancy(text.split()) > REDUNDANCY_LIMIT:
        kinds.add("repetition")
    if any(_foreign(character) for character in text):
        kinds.add("language")
    return kinds


def _foreign(character: str) -> bool:
    """Return whether a character is a letter of a script other than Latin and Greek."""
    letterlike_symbol = 0x2100 <= ord(character) <= 0x214F  # such as the aleph of set theory
    if not character.isalpha() or character.isascii() or letterlike_symbol:
        return False
    plain = unicodedata.normalize("NFKC", character)[0]
    return not unicodedata.name(plain, "").startswith(("LATIN", "GREEK", "MATHEMATICAL"))
