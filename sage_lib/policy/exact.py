"""Exact pass@k of valid work, from the probabilities of all valid completions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike


def exact_pass_at_k(p: ArrayLike, ks: Sequence[int]) -> np.ndarray:
    """Return 1 - (1 - p)^k for each probability p of a valid sample (rows) and each k (columns)."""
    with np.errstate(divide="ignore"):
        all_fail = np.outer(np.log1p(-np.asarray(p, float)), np.asarray(ks, float))
    return -np.expm1(all_fail)


def valid_mass(table: pd.DataFrame, column: str = "logp") -> pd.Series:
    """Return the probability of a valid sample by data set and problem, in the order of the
    problems: the sum over their valid completions in a table of ``scoring.valid_probabilities``.

    ``column`` is "logp", or "logp_T" of a temperature T. A sum that rounding puts above 1 is 1.
    """
    p = np.exp(table[column]).groupby([table["dataset"], table["problem"]], sort=False).sum()
    return p.clip(upper=1.0)


def exact_summary(probabilities: pd.DataFrame, ks: Sequence[int]) -> list[dict[str, Any]]:
    """Summarize ``scoring.valid_probabilities`` by data set: a row each.

    "pass@k" is the mean of :func:`exact_pass_at_k` over problems, and "pass@k_T" the same at the
    temperature T. "common" and "rare" are the mean probabilities of the two ways.
    """
    table = probabilities.assign(p=np.exp(probabilities["logp"]))
    rows = []
    for dataset, group in table.groupby("dataset", sort=False):
        row: dict[str, Any] = {"dataset": dataset, "problems": group["problem"].nunique()}
        by_way = group.groupby("way")["p"].sum() / row["problems"]
        for name in [column for column in table if column.startswith("logp")]:
            valid, suffix = valid_mass(group, name), name.removeprefix("logp")
            row |= {f"pass@{k}{suffix}": float(exact_pass_at_k(valid, [k]).mean()) for k in ks}
        row |= {"common": float(by_way.get("L", 0.0)), "rare": float(by_way.get("R", 0.0))}
        rows.append(row)
    return rows
