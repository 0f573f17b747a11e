"""Paired differences of all comparisons, their intervals and their outcomes.

A difference is paired by seed and by problem. Its interval covers other seeds *and* other problems
(`metrics.paired_difference`); a second interval is over seeds alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import BASE

#: Fewer seeds than this decide nothing.
FEWEST_SEEDS = 3
AGREES, DISAGREES, CANNOT_TELL, NOT_RUN = "agrees", "disagrees", "cannot tell", "not run"
#: The difference has the expected sign, by more than chance, and does not reach the margin.
SMALLER = "real, but smaller than the margin"
#: The word for "disagrees" where the claim is a paper's: our runs do not show what it saw.
NOT_SEEN = "not seen here"
#: Of a claim that these tasks and models cannot test, whatever was measured.
NOT_TESTABLE = "not testable here"
DIFFERENCES = [
    *("method", "against", "metric", "difference", "low", "high", "low_seeds", "high_seeds"),
    *("detectable", "seeds", "problems", "ours", "theirs"),
]


@dataclass(frozen=True)
class Values:
    """The measurements of a method, by seed and problem.

    values: shape (seeds, problems, columns). sets: the data set of each problem.
    seeds: numbers. The base has the seed None; with several bases its values are their mean.
    base_by_seed: of the base, seed -> the values (problems, columns) of the base from which that
    seed's runs start, where there are several bases.
    """

    method: str
    values: np.ndarray = field(repr=False)
    columns: Sequence[str]
    sets: Sequence[str] = field(repr=False)
    seeds: Sequence[Any]
    base_by_seed: Mapping[int, np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def by_method(cls, frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, "Values"]:
        """Return the values of each method of a frame that has method, seed, dataset, problem and
        `columns`.

        Problems are in the order of the first method. SageError where two methods were measured on
        different problems.
        """
        keys = frame.groupby(["dataset", "problem"], sort=False)
        problem = keys.ngroup().to_numpy()
        sets = list(frame[["dataset", "problem"]].drop_duplicates()["dataset"])
        by_run = frame.groupby(["method", "seed"], sort=False, dropna=False)
        run = by_run.ngroup().to_numpy()
        cells = frame[list(columns)].to_numpy(dtype=float)
        total = np.zeros((by_run.ngroups, len(sets), len(columns)))
        rows = np.zeros_like(total)
        is_measured = np.zeros((by_run.ngroups, len(sets)), dtype=bool)
        np.add.at(total, (run, problem), np.nan_to_num(cells))
        np.add.at(rows, (run, problem), ~np.isnan(cells))
        is_measured[run, problem] = True
        runs = frame[["method", "seed"]].drop_duplicates().reset_index(drop=True)
        by_method = {}
        for method, of_method in runs.groupby("method", sort=False):
            numbers = of_method["seed"].sort_values().index  # of the method's runs
            lacking = int((~is_measured[numbers]).any(axis=0).sum())
            if lacking:
                raise SageError(
                    f"{method} was evaluated on {len(sets) - lacking} problems and others on "
                    f"{len(sets)}: delete the evaluation that lacks some, and make it again"
                )
            seeds = [None if pd.isna(seed) else int(seed) for seed in of_method["seed"][numbers]]
            with np.errstate(invalid="ignore"):  # a problem without a number is NaN
                values = total[numbers] / rows[numbers]
            by_method[str(method)] = cls(str(method), values, list(columns), sets, seeds)
        if BASE in by_method and "run" in frame:
            bases = _base_by_seed(frame.assign(place=problem), list(columns), len(sets))
            by_method[BASE] = replace(by_method[BASE], base_by_seed=bases)
        return by_method

    def of_set(self, dataset: str) -> "Values":
        """Return the values on the problems of one data set."""
        of_set = np.asarray(self.sets) == dataset
        bases = {seed: values[of_set] for seed, values in self.base_by_seed.items()}
        sets = [dataset] * int(of_set.sum())
        return replace(self, values=self.values[:, of_set], sets=sets, base_by_seed=bases)

    def at_seeds(self, seeds: Iterable[int]) -> "Values":
        """Return the values at some of the seeds; the base, which has no seed, does not change."""
        if None in self.seeds:
            return self
        rows = np.isin(np.asarray(self.seeds), list(seeds))
        remaining = [seed for seed, stays in zip(self.seeds, rows, strict=True) if stays]
        return replace(self, values=self.values[rows], seeds=remaining)


def _base_by_seed(frame: pd.DataFrame, columns: list[str], problems: int) -> dict[int, np.ndarray]:
    """Return for each seed the values (problems, columns) of the base of its runs."""
    frame = frame.assign(profile=frame["run"].str.rpartition("/")[0])  # as results name runs
    bases, trained = frame[frame["method"] == BASE], frame[frame["method"] != BASE]
    by_seed: dict[int, np.ndarray] = {}
    for profile, rows in bases.groupby("profile"):
        by_problem = rows.groupby("place")[columns].mean().reindex(range(problems))
        of_profile = trained.loc[trained["profile"] == profile, "seed"].unique()
        by_seed |= dict.fromkeys(map(int, of_profile), by_problem.to_numpy(dtype=float))
    return by_seed


def at_common_seeds(*methods: Values) -> tuple[list[np.ndarray], list[Any]]:
    """Return the values of several methods at the seeds that all of them have, and these seeds.

    For the base, which has no seed, the base of the seed's run counts. SageError for none.
    """
    trained = [m for m in methods if None not in m.seeds] or list(methods)
    seeds = [seed for seed in trained[0].seeds if all(seed in m.seeds for m in trained)]
    if not seeds:
        names = " and ".join(m.method for m in methods)
        raise SageError(f"{names} share no seed: train them with the same ones")
    arrays = []
    for m in methods:
        if None in m.seeds:
            arrays.append(np.stack([m.base_by_seed.get(seed, m.values[0]) for seed in seeds]))
        else:
            arrays.append(m.values[[list(m.seeds).index(seed) for seed in seeds]])
    return arrays, seeds


def difference(ours: Values, theirs: Values, level: float = 0.95) -> pd.DataFrame:
    """Compare two methods: a row for each column of their values, with the columns DIFFERENCES.

    - ours, theirs, difference: the two means, and the first less the second.
    - low, high: bound it over seeds and problems; NaN where all differences are the same or a data
      set has one problem.
    - low_seeds, high_seeds: bound it over seeds alone; NaN for one seed.
    - detectable: the true difference that as many seeds and problems find in 80 % of cases; NaN in
      any of these cases.

    SageError without a common seed.
    """
    (a, b), _ = at_common_seeds(ours, theirs)
    gaps = a - b
    mean, low, high = metrics.paired_difference(a, b, ours.sets, level)
    if len(gaps) == 1 or min(Counter(ours.sets).values()) < 2:
        effect = np.full(len(mean), np.nan)  # the variance over seeds, or problems, is not known
    else:
        effect = metrics.minimum_detectable_effect(gaps, ours.sets)
    levels = [metrics.mean_over_sets(array.mean(axis=0), ours.sets) for array in (a, b)]
    rows = []
    for i, column in enumerate(ours.columns):
        of_seeds = [metrics.mean_over_sets(row, ours.sets)[i] for row in gaps]
        bounds = (mean[i], low[i], high[i], *over_seeds(of_seeds, level), effect[i])
        size = (len(gaps), a.shape[1], *(means[i] for means in levels))
        rows.append((ours.method, theirs.method, column, *bounds, *size))
    return pd.DataFrame(rows, columns=DIFFERENCES)


def differences(
    values: dict[str, Values], against: str, methods: Iterable[str] | None = None
) -> pd.DataFrame:
    """Compare methods (None: all) with another, ``against``, by :func:`difference`.

    Methods that were not evaluated are left out.
    """
    if against not in values:
        raise SageError(f"{against} was not evaluated: choose one of {', '.join(values)}")
    evaluated = values if methods is None else [m for m in methods if m in values]
    theirs = values[against]
    rows = [difference(values[m], theirs) for m in evaluated if m not in (against, BASE)]
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=DIFFERENCES)


def require_base(methods: Iterable[str]) -> None:
    """Raise SageError unless the base, with which all are compared, is among evaluated methods."""
    if BASE not in set(methods):
        raise SageError(
            "the base was not evaluated: call sage-companion stage evaluation, which begins with it"
        )


def over_seeds(means: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the t interval of a mean from each seed's value; NaN for fewer than two."""
    if len(means) < 2:
        return np.nan, np.nan
    mean, error = np.mean(means), np.std(means, ddof=1) / np.sqrt(len(means))
    half = t.ppf(0.5 + level / 2, len(means) - 1) * error
    return float(mean - half), float(mean + half)


def outcome(expects: str, low: float, high: float, margin: float) -> str:
    """Decide whether a difference is as expected: the rule of all claims.

    The estimate is the middle of the interval, which is symmetric.

    - above: agrees where the interval lies above 0 and the estimate reaches the margin; SMALLER
      where it lies above 0 and the estimate does not reach the margin; disagrees where it includes
      or lies below 0, and ends below the margin.
    - not above: agrees where the interval ends below the margin, since no gain that matters is
      left; disagrees where "above" agrees; otherwise SMALLER where the interval lies above 0.
    - equal: agrees where the interval lies between -margin and margin, whether or not it includes
      0; disagrees where all of it lies outside.

    All else is CANNOT_TELL. below and not below are the mirror images.

    Args:
        expects: above, below, equal, not above or not below.
        low: lower bound of the difference.
        high: upper bound.
        margin: the smallest difference that matters.
    """
    if expects in ("below", "not below"):
        return outcome({"below": "above", "not below": "not above"}[expects], -high, -low, margin)
    if expects not in ("above", "not above", "equal"):
        raise SageError(f"a comparison expects above, below or equal, not {expects!r}")
    too_small, reaches = high < margin, (low + high) / 2 >= margin
    if np.isnan([low, high, margin]).any():
        return CANNOT_TELL
    if expects == "equal":
        outside = low > margin or high < -margin
        return AGREES if too_small and low > -margin else DISAGREES if outside else CANNOT_TELL
    if too_small and (expects == "not above" or low <= 0):
        return AGREES if expects == "not above" else DISAGREES
    if low <= 0:
        return CANNOT_TELL
    if not reaches:
        return SMALLER
    return AGREES if expects == "above" else DISAGREES


def deciding_interval(row: Any) -> tuple[float, float]:
    """Return the wider of a row's two intervals, over seeds and problems or over seeds alone; NaN
    where a bound is NaN. Both have the same middle."""
    low = np.minimum(row["low"], row.get("low_seeds", row["low"]))
    high = np.maximum(row["high"], row.get("high_seeds", row["high"]))
    return float(low), float(high)


def row_outcome(expects: str, row: Any, margin: float) -> str:
    """Return the :func:`outcome` of a row of differences, by its :func:`deciding_interval`.

    It needs FEWEST_SEEDS seeds. Two shares that both lie within the margin of 0, or of 1, decide
    nothing: no difference that matters could be seen. ``row`` is a mapping or a Series.
    """
    means = row.get("ours", 0.5), row.get("theirs", 0.5)
    at_floor = max(means) < margin or 1 - margin < min(means) <= max(means) <= 1
    if row["seeds"] < FEWEST_SEEDS or at_floor:
        return CANNOT_TELL
    return outcome(expects, *deciding_interval(row), margin)


def error_rate(expects: str, at: Callable[[float], Any], margin: float) -> float:
    """Return the smallest error rate, 1 - level, at which a comparison keeps its outcome at 95 %.

    It is a p-value of that outcome, and 1 for CANNOT_TELL. An outcome that is lost as intervals
    widen does not come back: SMALLER may become DISAGREES on the way to CANNOT_TELL. ``at`` returns
    the row of differences at a level.
    """
    at_95 = row_outcome(expects, at(0.95), margin)
    if at_95 == CANNOT_TELL:
        return 1.0
    low, high = -12.0, np.log10(0.05)  # powers of ten
    for _ in range(30):
        middle = (low + high) / 2
        same = row_outcome(expects, at(1 - 10**middle), margin) == at_95
        low, high = (low, middle) if same else (middle, high)
    return float(f"{10**high:.4g}")  # fewer digits than the search leaves open


def holm(rates: Sequence[float]) -> list[float]:
    """Return the error rate that is allowed for each of several outcomes.

    All outcomes whose rates are not above it are right with probability 0.95. Holm 1979, Scand. J.
    Statist. 6, 65-70: in rising order of their rates, each is allowed 0.05 over the number of those
    left. From the first that fails on, all are allowed the rate at which it failed.
    """
    allowed, remaining = [0.05] * len(rates), len(rates)
    for number in np.argsort(rates, kind="stable"):
        allowed[number] = 0.05 / remaining
        remaining -= rates[number] <= 0.05 / remaining
    return allowed


def stable_seeds(
    at: Callable[[Values, Values], Any], ours: Values, theirs: Values, expects: str, margin: float
) -> int:
    """Count the seeds without which a comparison has the same outcome, leaving out one at a time.

    ``at`` returns the row of differences of two methods' values at some seeds.
    """
    _, seeds = at_common_seeds(ours, theirs)

    def outcome_at(seeds: Iterable[int]) -> str:
        return row_outcome(expects, at(ours.at_seeds(seeds), theirs.at_seeds(seeds)), margin)

    at_all = outcome_at(seeds)
    return sum(outcome_at(set(seeds) - {seed}) == at_all for seed in seeds)


def worst_outcome(outcomes: Iterable[str]) -> str:
    """Return the outcome of a claim: the worst of its comparisons' outcomes.

    Nothing corrects for their number: this is a choice.
    """
    order = (NOT_SEEN, DISAGREES, NOT_RUN, CANNOT_TELL, SMALLER, AGREES)
    return min(outcomes, key=order.index, default=CANNOT_TELL)
