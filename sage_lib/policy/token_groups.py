"""Changes between two policies, token by token, in groups by kind, place and uncertainty."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

#: A probability that moves by more than this counts as moved (exploration report, 3.2.2).
MOVED = 0.06
#: The share of tokens that "the largest" means (exploration report, Figures 3c, 4b, 5a).
TOP = 0.2
#: Kinds of tokens by their text, the first that fits.
KINDS = {
    "number": r".*\d.*",
    "operator": r"[-+*/=^<>×÷%]+",
    "bracket or comma": r"[][(){},.;:|]+",
    "format": r"<.*>|\s*",
    "word": r".*[^\W\d_].*",
}
OTHER = "other"
#: The kinds that Table 1 of the exploration report calls formal reasoning.
FORMAL = ("number", "operator", "bracket or comma")
#: Means over a group's tokens: entropy (nats) under both policies; of the drawn token
#: |p_after - p_before| and p_after - p_before; shares that moved, or are of the TOP; G_t or NaN.
MEANS = ("before", "after", "shift", "rise", "moved", "fallen", "shifted", "gradient")
GROUPS = ("by", "group", "sign", "tokens", *MEANS)
EQUAL_PARTS = 10


def kind(text: str) -> str:
    """Return the kind of a token's text, a key of :data:`KINDS` or "other"."""
    return next((k for k, form in KINDS.items() if re.fullmatch(form, text.strip())), OTHER)


def kinds(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the kind of each token; special ones are format."""
    special = set(tokenizer.all_special_ids)
    return ["format" if i in special else kind(tokenizer.decode([i])) for i in ids]


def largest(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return whether each value is among the largest, a share of TOP; shape (values,).

    The share is rounded up. Of equal values the first counts as larger.
    """
    rank = pd.Series(values).rank(method="first", ascending=False)
    return (rank <= np.ceil(TOP * len(rank) - 1e-9)).to_numpy()


def parts(values: Sequence[float] | np.ndarray, count: int = EQUAL_PARTS) -> np.ndarray:
    """Deal values by size into ``count`` equal parts, and return each value's part, from 1 on."""
    part_of = np.empty(len(values), dtype=np.int64)
    order = np.argsort(np.asarray(values, dtype=np.float64), kind="stable")
    for number, part in enumerate(np.array_split(order, count), 1):
        part_of[part] = number
    return part_of


def grouped(tokens: pd.DataFrame) -> pd.DataFrame:
    """Average over tokens by kind, tenth of the completion, tenth of the entropy before, and fifth
    of the completions by perplexity (eq. 39) before; and over all together.

    ``tokens`` has the columns completion, sign, kind, place (0 to below 1 within the completion),
    before and after (entropies, nats), p_before and p_after (of the drawn token), and perhaps
    gradient. The result has a row for each group, with columns :data:`GROUPS`.
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
    tables = []
    for name, key in keys.items():
        groups = frame.assign(by=name, group=key.astype(str)).groupby(["by", "group", "sign"])
        tables.append(groups[list(MEANS)].mean().assign(tokens=groups.size()).reset_index())
    return pd.concat(tables, ignore_index=True)[list(GROUPS)]


def merged(groups: pd.DataFrame, keys: Sequence[str] = ("by", "group", "sign")) -> pd.DataFrame:
    """Merge tables of :func:`grouped` into one: means weighed by tokens, for each of ``keys``."""
    weighed = groups[list(MEANS)].mul(groups["tokens"], axis=0)
    sums = weighed.assign(tokens=groups["tokens"], **{key: groups[key] for key in keys})
    totals = sums.groupby(list(keys), sort=False).sum(min_count=1).reset_index()
    means = {name: totals[name] / totals["tokens"] for name in MEANS}
    return totals.assign(**means)[[*keys, "tokens", *MEANS]]
