"""Tokens that two policies read alike, in groups: by kind, by place, by uncertainty.

What changed between two policies (before and after one update, or base and trained) is told by two
numbers a token, its entropy and the probability of the drawn token; the groups say where.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

#: A probability that moves by more than this in an update counts as moved (exploration report,
#: 3.2.2: "over 99% of tokens" move by less).
MOVED = 0.06
#: The share of tokens that "the largest" means (exploration report, Figures 3c, 4b, 5a).
TOP = 0.2
#: Kinds of tokens by their text, the first that fits. Table 1 of the exploration report calls the
#: first three formal reasoning.
KINDS = {
    "number": r".*\d.*",
    "operator": r"[-+*/=^<>×÷%]+",
    "bracket or comma": r"[][(){},.;:|]+",
    "format": r"<.*>|\s*",
    "word": r".*[^\W\d_].*",
}
OTHER = "other"
FORMAL = ("number", "operator", "bracket or comma")
#: What a token must have: a frame of tokens has these columns.
TOKENS = (
    "completion",  # number of its completion
    "sign",  # "positive", "negative", or "even" where the completion is neither
    "kind",
    "place",  # within its completion, 0 to below 1
    "before",  # entropy (nats) under the first policy
    "after",  # under the second
    "p_before",  # probability of the drawn token under the first policy
    "p_after",
)
#: What a group has: means over its tokens where nothing else is said.
GROUPS = (
    "by",
    "group",
    "sign",
    "tokens",
    "before",
    "after",
    "shift",  # |p_after - p_before|
    "rise",  # p_after - p_before
    "moved",  # share with a shift above MOVED
    "fallen",  # share among the TOP of all tokens by fall of entropy
    "shifted",  # share among the TOP of all tokens by shift
    "gradient",  # G_t where it is given, else NaN
)
MEANS = GROUPS[4:]
EQUAL_PARTS = 10


def kind(text: str) -> str:
    """A name of :data:`KINDS`, or "other"."""
    found = (name for name, pattern in KINDS.items() if re.fullmatch(pattern, text.strip()))
    return next(found, OTHER)


def kinds(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The kind of each token; special ones, the end token among them, are format."""
    special = set(tokenizer.all_special_ids)
    return ["format" if i in special else kind(tokenizer.decode([i])) for i in ids]


def largest(values: Sequence[float] | np.ndarray, share: float = TOP) -> np.ndarray:
    """Which of some values are the largest ``share`` of them (rounded up; of equal ones the first).

    Bool of shape (values,).
    """
    numbers = np.asarray(values, dtype=np.float64)
    chosen = np.zeros(len(numbers), dtype=bool)
    order = np.argsort(-numbers, kind="stable")
    chosen[order[: int(np.ceil(share * len(numbers) - 1e-9))]] = True
    return chosen


def parts(values: Sequence[float] | np.ndarray, count: int = EQUAL_PARTS) -> np.ndarray:
    """The number, 1 (the smallest) to ``count``, of each value's part of equal size.

    Whole numbers of shape (values,).
    """
    numbers = np.asarray(values, dtype=np.float64)
    found = np.empty(len(numbers), dtype=np.int64)
    for number, part in enumerate(np.array_split(np.argsort(numbers, kind="stable"), count), 1):
        found[part] = number
    return found


def grouped(tokens: pd.DataFrame) -> pd.DataFrame:
    """Tokens by kind, tenth of the completion, tenth of the entropy before, and fifth of the
    completions by perplexity before; and all together. Columns :data:`GROUPS`.

    ``tokens`` has the columns :data:`TOKENS`, and "gradient" where there is one. Perplexity (eq. 39
    of SAGE) is that of the whole completion under the first policy.
    """
    shift = (tokens["p_after"] - tokens["p_before"]).abs()
    surprise = -np.log(tokens["p_before"].clip(lower=1e-300))
    by_completion = surprise.groupby(tokens["completion"]).mean()
    fifths = pd.Series(parts(by_completion, 5), index=by_completion.index)
    frame = tokens.assign(
        shift=shift,
        rise=tokens["p_after"] - tokens["p_before"],
        moved=(shift > MOVED).astype(float),
        fallen=largest(tokens["before"] - tokens["after"]).astype(float),
        shifted=largest(shift).astype(float),
        gradient=tokens.get("gradient", np.nan),
    )
    keys = {
        "all": pd.Series("all", index=tokens.index),
        "kind": tokens["kind"],
        "position": np.minimum((tokens["place"] * EQUAL_PARTS).astype(int), 9) + 1,
        "entropy": pd.Series(parts(tokens["before"]), index=tokens.index),
        "perplexity": tokens["completion"].map(fifths),
    }
    found = []
    for name, key in keys.items():
        groups = frame.assign(by=name, group=key.astype(str)).groupby(["by", "group", "sign"])
        means = groups[list(MEANS)].mean()
        found.append(means.assign(tokens=groups.size()).reset_index())
    return pd.concat(found, ignore_index=True)[list(GROUPS)]


def merged(groups: pd.DataFrame, keys: Sequence[str] = ("by", "group", "sign")) -> pd.DataFrame:
    """Several tables of :func:`grouped` as one: means weighed by tokens, a row for each ``keys``.

    A column without any value stays so.
    """
    weighed = groups[list(MEANS)].mul(groups["tokens"], axis=0)
    sums = weighed.assign(tokens=groups["tokens"], **{key: groups[key] for key in keys})
    totals = sums.groupby(list(keys), sort=False).sum(min_count=1).reset_index()
    means = {name: totals[name] / totals["tokens"] for name in MEANS}
    return totals.assign(**means)[[*keys, "tokens", *MEANS]]
