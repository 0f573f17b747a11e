"""What can be read off the text of a sample: reasoning patterns, token categories, defects.

All detectors are keyword heuristics, as those of the papers are; their keywords stand here, and
notebook 10 shows samples that each one hit, so that its precision can be judged.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sage_lib.tasks.filters import REDUNDANCY_LIMIT, ngram_redundancy
from sage_lib.tasks.prompts import MARKERS, SOLUTION_END, SOLUTION_START, WORK_END, WORK_START

#: Appendix G names the patterns and some phrases of each; the rest is chosen in their spirit.
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

#: Table 1 of the exploration report; a word that matches nothing above "semantic" is semantic. A
#: letter alone is a variable, but "a" and "I" only beside a sign.
CATEGORIES = {
    "metacognitive": (
        r"let('s| us) (check|verify|see|recheck)",
        r"(double[- ])?check(ing)?\b",
        r"verif(y|ies|ying)",
        r"wait\b",
        r"correction\b",
        r"actually\b",
        r"mistake\b",
        r"in summary",
        r"to summari[sz]e",
        r"overall\b",
        r"first, (i|we) will",
        r"(i|we) (need|want) to\b",
        r"(i|we) will\b",
        r"the plan\b",
        r"step by step",
    ),
    "logical": (
        r"therefore\b",
        r"because\b",
        r"since\b",
        r"thus\b",
        r"hence\b",
        r"so\b",
        r"however\b",
        r"but\b",
        r"although\b",
        r"while\b",
        r"first\b",
        r"second\b",
        r"next\b",
        r"then\b",
        r"finally\b",
        r"and\b",
        r"also\b",
        r"or\b",
        r"if\b",
        r"implies\b",
    ),
    "formal": (
        r"\\[a-zA-Z]+",
        r"\d+(\.\d+)?",
        r"[-+*/=^<>≤≥≠±×÷·√∑∏∫π∞%!|]",
        r"(?-i:[b-zB-HJ-Z])\b(?![a-z'’])",
        r"(?<=[$+*/=^<>(])[ai]\b",
        r"[ai](?=\s*[-+*/=^<>_$)])",
        r"[(){}\[\]$_]",
    ),
    "semantic": (r"[^\W\d_]+('[a-z]+)?",),
}


def _named_group(name: str, phrases: Sequence[str]) -> str:
    """A regular expression that matches any of ``phrases`` and says so under ``name``."""
    alternatives = "|".join(f"(?:{phrase})" for phrase in phrases)
    return f"(?P<{name}>{alternatives})"


_CATEGORIES = re.compile(
    "|".join(_named_group(name, phrases) for name, phrases in CATEGORIES.items()), re.IGNORECASE
)

_MARKERS = re.compile("|".join(map(re.escape, MARKERS)))


def patterns(text: str) -> set[str]:
    """Names of the reasoning patterns whose keywords occur in ``text``."""
    return {name for name, regex in _PATTERNS.items() if regex.search(text)}


@dataclass(frozen=True)
class PatternFrequency:
    """Eq. 13 for one pattern."""

    frequency: float  # mean over ``problems``, NaN where there is none
    problems: int  # with a correct sample
    dropped: int  # problems without one


def pattern_frequencies(correct_texts: Sequence[Sequence[str]]) -> dict[str, PatternFrequency]:
    """Eq. 13: the mean over problems of the share of their correct samples that show a pattern.

    ``correct_texts`` holds the correct samples of every problem. The equation divides by C_p, the
    number of them, which can be 0: such a problem is dropped from the mean and counted.
    """
    kept = [texts for texts in correct_texts if len(texts)]
    dropped = len(correct_texts) - len(kept)
    frequencies = {}
    for name, pattern in _PATTERNS.items():
        shares = [_share_that_shows(pattern, texts) for texts in kept]
        mean = sum(shares) / len(shares) if shares else float("nan")
        frequencies[name] = PatternFrequency(mean, len(kept), dropped)
    return frequencies


def _share_that_shows(pattern: re.Pattern[str], texts: Sequence[str]) -> float:
    return sum(bool(pattern.search(text)) for text in texts) / len(texts)


def categories(text: str) -> Counter[str]:
    """How many tokens of each category a text has.

    Phrases such as "let's check" count once, and what two categories match belongs to the one that
    stands first in :data:`CATEGORIES`.
    """
    names = (match.lastgroup for match in _CATEGORIES.finditer(text))
    return Counter(name for name in names if name)


def defects(text: str, finished: bool = True) -> set[str]:
    """What is wrong with a response, in the exploration report's three kinds and one of length.

    "format": not exactly one work end and one answer, in this order; "repetition": 3-gram
    redundancy above :data:`REDUNDANCY_LIMIT`; "language": letters of a script that the prompt does
    not use; "truncated": cut off by the length limit, which ``finished`` says.
    """
    found = set() if finished else {"truncated"}
    body = text.removeprefix(WORK_START)  # the prompt's own, where a sample is kept with it
    if _MARKERS.findall(body) != [WORK_END, SOLUTION_START, SOLUTION_END]:
        found.add("format")
    if ngram_redundancy(text.split()) > REDUNDANCY_LIMIT:
        found.add("repetition")
    if any(_foreign(character) for character in text):
        found.add("language")
    return found


def _foreign(character: str) -> bool:
    """Whether a character is a letter of a script other than Latin and Greek.

    Symbols made of letters, such as the aleph of set theory, are no script.
    """
    letterlike_symbol = 0x2100 <= ord(character) <= 0x214F
    if not character.isalpha() or character.isascii() or letterlike_symbol:
        return False
    plain = unicodedata.normalize("NFKC", character)[0]
    return not unicodedata.name(plain, "").startswith(("LATIN", "GREEK", "MATHEMATICAL"))
