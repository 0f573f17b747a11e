"""One engine for every comparison: paired differences, their intervals, and what they say.

A difference is paired by seed and by problem. Its interval covers other seeds *and* other problems
(`metrics.paired_difference`); beside it stands the one over seeds alone. A claim names comparisons
and what it expects of each. Its outcome follows from the intervals by one rule, `outcome`.
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
#: Of a claim that these tasks and models cannot judge, whatever was measured.
NOT_TESTABLE = "not testable here"
DIFFERENCES = [
    *("method", "against", "metric", "difference", "low", "high", "low_seeds", "high_seeds"),
    *("detectable", "seeds", "problems", "ours", "theirs"),
]


@dataclass(frozen=True)
class Values:
    """What was measured of one method, by seed and problem.

    values: (seeds, problems, columns). sets: the data set of each problem. seeds: numbers; the
    base has one, None, and of several bases the mean. own_bases: of the base, the values of the one
    that the run of each seed starts from, where there are several.
    """

    method: str
    values: np.ndarray = field(repr=False)
    columns: Sequence[str]
    sets: Sequence[str] = field(repr=False)
    seeds: Sequence[Any]
    own_bases: Mapping[int, np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def by_method(cls, frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, "Values"]:
        """Of each method of a frame with the columns method, seed, dataset, problem and `columns`.

        Problems stand in the order of the first method. SageError where two methods were measured
        on different problems.
        """
        keys = frame.groupby(["dataset", "problem"], sort=False)
        problem = keys.ngroup().to_numpy()
        sets = list(frame[["dataset", "problem"]].drop_duplicates()["dataset"])
        own = frame.groupby(["method", "seed"], sort=False, dropna=False)
        run = own.ngroup().to_numpy()
        numbers = frame[list(columns)].to_numpy(dtype=float)
        total = np.zeros((own.ngroups, len(sets), len(columns)))
        rows = np.zeros_like(total)
        there = np.zeros((own.ngroups, len(sets)), dtype=bool)
        np.add.at(total, (run, problem), np.nan_to_num(numbers))
        np.add.at(rows, (run, problem), ~np.isnan(numbers))
        there[run, problem] = True
        runs = frame[["method", "seed"]].drop_duplicates().reset_index(drop=True)
        found = {}
        for method, of_method in runs.groupby("method", sort=False):
            places = of_method["seed"].sort_values().index
            lacking = int((~there[places]).any(axis=0).sum())
            if lacking:
                raise SageError(
                    f"{method} was evaluated on {len(sets) - lacking} problems and others on "
                    f"{len(sets)}: delete the evaluation that lacks some, and make it again"
                )
            seeds = [None if pd.isna(seed) else int(seed) for seed in of_method["seed"][places]]
            with np.errstate(invalid="ignore"):  # a problem without a number is NaN
                values = total[places] / rows[places]
            found[str(method)] = cls(str(method), values, list(columns), sets, seeds)
        if BASE in found and "run" in frame:
            own = _own_bases(frame.assign(place=problem), list(columns), len(sets))
            found[BASE] = replace(found[BASE], own_bases=own)
        return found

    def at_seeds(self, seeds: Iterable[int]) -> "Values":
        """The values at some of the seeds; those of the base, which has no seed, as they are."""
        if None in self.seeds:
            return self
        wanted = set(seeds)
        places = [place for place, seed in enumerate(self.seeds) if seed in wanted]
        left = [self.seeds[place] for place in places]
        return replace(self, values=self.values[places], seeds=left)


def _own_bases(frame: pd.DataFrame, columns: list[str], problems: int) -> dict[int, np.ndarray]:
    """Of each seed the values (problems, columns) of the base that its run starts from."""
    frame = frame.assign(profile=frame["run"].str.rpartition("/")[0])  # as results names them
    bases, trained = frame[frame["method"] == BASE], frame[frame["method"] != BASE]
    found: dict[int, np.ndarray] = {}
    for profile, rows in bases.groupby("profile"):
        by_problem = rows.groupby("place")[columns].mean().reindex(range(problems))
        of_profile = trained.loc[trained["profile"] == profile, "seed"].unique()
        found |= dict.fromkeys(map(int, of_profile), by_problem.to_numpy(dtype=float))
    return found


def at_common_seeds(*chosen: Values) -> tuple[list[np.ndarray], list[Any]]:
    """The values of several methods at the seeds that all of them have, and these seeds. The base,
    which has none, goes with each, as the one that the seed's run starts from. SageError where
    there is no common seed."""
    trained = [one for one in chosen if None not in one.seeds] or list(chosen)
    seeds = [seed for seed in trained[0].seeds if all(seed in one.seeds for one in trained)]
    if not seeds:
        names = " and ".join(one.method for one in chosen)
        raise SageError(f"{names} share no seed: train them with the same ones")
    found = []
    for one in chosen:
        if None in one.seeds:
            found.append(np.stack([one.own_bases.get(seed, one.values[0]) for seed in seeds]))
        else:
            found.append(one.values[[list(one.seeds).index(seed) for seed in seeds]])
    return found, seeds


def difference(ours: Values, theirs: Values, level: float = 0.95) -> pd.DataFrame:
    """`ours` minus `theirs`, a row for each column of values: DIFFERENCES.

    low, high: an interval of that `level` over seeds and problems; low_seeds, high_seeds: over
    seeds alone. detectable: the true difference that as many seeds and problems find in 80 % of
    cases. ours, theirs: the two means.
    """
    (a, b), _ = at_common_seeds(ours, theirs)
    apart = a - b
    mean, low, high = metrics.paired_difference(a, b, ours.sets, level)
    if len(apart) == 1 or min(Counter(ours.sets).values()) < 2:
        effect = np.full(len(mean), np.nan)  # how far seeds, or problems, lie apart is not known
    else:
        effect = metrics.minimum_detectable_effect(apart, ours.sets)
    levels = [metrics.mean_over_sets(one.mean(axis=0), ours.sets) for one in (a, b)]
    rows = []
    for place, column in enumerate(ours.columns):
        of_seeds = [metrics.mean_over_sets(one, ours.sets)[place] for one in apart]
        bounds = (mean[place], low[place], high[place], *over_seeds(of_seeds, level), effect[place])
        size = (len(apart), a.shape[1], *(level[place] for level in levels))
        rows.append((ours.method, theirs.method, column, *bounds, *size))
    return pd.DataFrame(rows, columns=DIFFERENCES)


def differences(
    values: dict[str, Values], against: str, methods: Iterable[str] | None = None
) -> pd.DataFrame:
    """:func:`difference` of several methods (all, unless given) to one; those that were not
    evaluated are left out."""
    if against not in values:
        raise SageError(f"{against} was not evaluated: choose one of {', '.join(values)}")
    chosen = values if methods is None else [m for m in methods if m in values]
    theirs = values[against]
    found = [difference(values[m], theirs) for m in chosen if m not in (against, BASE)]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=DIFFERENCES)


def over_seeds(means: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The t interval of a mean from each seed's value; NaN for fewer than two."""
    if len(means) < 2:
        return np.nan, np.nan
    mean, error = np.mean(means), np.std(means, ddof=1) / np.sqrt(len(means))
    half = t.ppf(0.5 + level / 2, len(means) - 1) * error
    return float(mean - half), float(mean + half)


def outcome(expects: str, low: float, high: float, margin: float) -> str:
    """What an interval says of an expected difference. The one rule of all claims.

    The estimate is the middle of the interval, which is symmetric. `margin` is the smallest
    difference that matters.

    above: agrees where the interval lies above 0 and the estimate reaches `margin`; SMALLER where
    it lies above 0 and the estimate does not, so also where all of it is below `margin`; disagrees
    where it includes or lies below 0, and ends below `margin`.
    not above: agrees where the interval ends below `margin`, for no gain that matters is left;
    disagrees where "above" agrees; otherwise SMALLER where the interval lies above 0.
    equal: agrees where the interval lies between -margin and margin, a real difference included;
    disagrees where all of it lies outside.
    All else is CANNOT_TELL. below and not below are the mirror images.
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
    """The wider of a row's two intervals, which has the same middle as the other one: the one over
    seeds and problems, or the one over seeds alone. NaN where one of them is."""
    low = np.minimum(row["low"], row.get("low_seeds", row["low"]))
    high = np.maximum(row["high"], row.get("high_seeds", row["high"]))
    return float(low), float(high)


def row_outcome(expects: str, row: Any, margin: float) -> str:
    """Return the outcome of a row of differences (a mapping or a Series).

    It needs FEWEST_SEEDS seeds. Two shares that both lie within `margin` of 0, or of 1, tell
    nothing: no difference that matters could be seen.
    """
    means = row.get("ours", 0.5), row.get("theirs", 0.5)
    at_floor = max(means) < margin or 1 - margin < min(means) <= max(means) <= 1
    if row["seeds"] < FEWEST_SEEDS or at_floor:
        return CANNOT_TELL
    return outcome(expects, *deciding_interval(row), margin)


def error_rate(expects: str, at: Callable[[float], Any], margin: float) -> float:
    """The smallest error rate (one less the level) at which a comparison still has the outcome
    that it has at 95 %: a p-value of that outcome. 1 where it has none.

    `at` gives the row of differences at a level. An outcome that is lost as intervals widen does
    not come back: SMALLER may become DISAGREES on the way to CANNOT_TELL.
    """
    found = row_outcome(expects, at(0.95), margin)
    if found == CANNOT_TELL:
        return 1.0
    low, high = -12.0, np.log10(0.05)  # powers of ten
    for _ in range(30):
        middle = (low + high) / 2
        told = row_outcome(expects, at(1 - 10**middle), margin) == found
        low, high = (low, middle) if told else (middle, high)
    return float(f"{10**high:.4g}")  # fewer digits than the search leaves open


def holm(rates: Sequence[float], total: float = 0.05) -> list[float]:
    """The error rate at which each of several outcomes is judged, so that all that stand hold with
    probability 1 - `total`. An outcome stands where its own error rate is not above that.

    Holm 1979, Scand. J. Statist. 6, 65-70: the surest first, each at `total` over how many are
    left; from the first that fails on, all at the rate at which it failed.
    """
    allowed, left = [total] * len(rates), len(rates)
    for place in np.argsort(rates, kind="stable"):
        allowed[place] = total / left
        left -= rates[place] <= total / left
    return allowed


def stable_seeds(ours: Values, theirs: Values, column: str, expects: str, margin: float) -> int:
    """With how many of the seeds left out, one at a time, the comparison keeps its outcome."""
    _, seeds = at_common_seeds(ours, theirs)

    def outcome_at(some: Iterable[int]) -> str:
        rows = difference(ours.at_seeds(some), theirs.at_seeds(some)).set_index("metric")
        return row_outcome(expects, rows.loc[column], margin)

    whole = outcome_at(seeds)
    return sum(outcome_at(set(seeds) - {left}) == whole for left in seeds)


def worst_outcome(outcomes: Iterable[str]) -> str:
    """The outcome of a claim: the worst of its comparisons' outcomes. So it agrees where all agree,
    and disagrees where one does. Nothing corrects for their number, which is a choice."""
    there = set(outcomes)
    order = (NOT_SEEN, DISAGREES, NOT_RUN, CANNOT_TELL, SMALLER, AGREES)
    return next((outcome for outcome in order if outcome in there), CANNOT_TELL)
