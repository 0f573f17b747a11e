"""Exact pass@k of countdown: from the probabilities of all valid completions, without sampling.

The unit is valid work: the answer is right and every step of the work holds. What a policy earns
by right answers with unsound work is not in it; samples say how much that is (``modes``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from sage_lib.evaluation import counts
from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import Profile
from sage_lib.files import read_lines
from sage_lib.report.countdown_tables import PROBLEM, require_countdown
from sage_lib.report.measured import by_seed, of_sets, problems_of, table_of

#: k of the exact pass@k in tables; any k costs the same.
KS = (1, 8, 64, 256, 1024)
EXACT = ["method", "run", "dataset", *(f"pass@{k}" for k in KS), "common", "rare", "problems"]


def probabilities(profile: Profile, ood: bool | None = False) -> pd.DataFrame:
    """Probability that one sample is valid, of every problem under every evaluated policy.

    Of the data of Table 1, with ``ood`` of those outside it, with None of both. Columns method,
    seed (None for the base), run, dataset, problem, valid, common and rare (the mass of either
    way).
    """
    return _probabilities(profile, ood).copy(deep=False)


class _Groups:
    """The completions of each problem and way: grouped once for all policies, whose tables list
    the same completions in the same order."""

    KEYS: ClassVar = [*PROBLEM, "way"]

    def __init__(self, table: pd.DataFrame):
        self.keys = table[self.KEYS]
        grouped = self.keys.groupby(self.KEYS, sort=False)
        self.number = grouped.ngroup().to_numpy()
        size = grouped.size()
        places = pd.Series(range(len(size)), index=size.index).unstack("way", fill_value=-1)
        self.places = places.reindex(columns=["L", "R"], fill_value=-1)

    def are_of(self, table: pd.DataFrame) -> bool:
        return self.keys.equals(table[self.KEYS])

    def sums(self, values: np.ndarray) -> pd.DataFrame:
        """A row per problem: the columns of :data:`PROBLEM`, and by way the sum over its
        completions, 0 where it has none."""
        of_group = np.append(np.bincount(self.number, weights=values), 0.0)  # -1: the 0
        by_way = {way: of_group[self.places[way]] for way in self.places}
        return pd.DataFrame(by_way, index=self.places.index).reset_index()


@runs.once
def _probabilities(profile: Profile, ood: bool | None) -> pd.DataFrame:
    require_countdown(profile)
    frames = []
    groups: _Groups | None = None
    for method, seed, run, policy in runs.evaluations(profile):
        table = table_of(profile, run, "support.csv")
        if ood is not None:
            table = of_sets(table, profile, ood)
        if groups is None or not groups.are_of(table):
            groups = _Groups(table)
        by_way = groups.sums(np.exp(table["logp"].to_numpy(dtype=float)))
        by_way = by_way.rename(columns={"L": "common", "R": "rare"})
        valid = (by_way["common"] + by_way["rare"]).clip(upper=1.0)
        frames.append(by_way.assign(method=method, seed=seed, run=policy.name, valid=valid))
    columns = ["method", "seed", "run", *PROBLEM, "valid", "common", "rare"]
    return pd.concat(frames, ignore_index=True)[columns]


def pass_at_k(valid: pd.Series, ks: Sequence[int] = KS) -> np.ndarray:
    """1 - (1-p)^k of every problem (rows) for every k (columns)."""
    p = valid.to_numpy(dtype=np.float64)
    with np.errstate(divide="ignore"):
        found: np.ndarray = -np.expm1(np.outer(np.log1p(-p), np.asarray(ks, dtype=np.float64)))
    return found


def exact(profile: Profile, ood: bool = False) -> pd.DataFrame:
    """Exact pass@k by policy and data set: columns :data:`EXACT`; "Avg" is the mean over sets."""
    rows: list[dict[str, Any]] = []
    for (method, run), of_run in probabilities(profile, ood).groupby(["method", "run"], sort=False):
        sets = []
        for dataset, group in of_run.groupby("dataset", sort=False):
            means = pass_at_k(group["valid"]).mean(axis=0)
            row = {"dataset": dataset, **dict(zip(EXACT[3:-3], means, strict=True))}
            masses = group[["common", "rare"]].mean().to_dict()
            sets.append({**row, **masses, "problems": len(group)})
        table = pd.DataFrame(sets)
        average = table.drop(columns=["dataset", "problems"]).mean().to_dict()
        sets.append({"dataset": "Avg", **average, "problems": int(table["problems"].sum())})
        rows += [{"method": method, "run": run, **row} for row in sets]
    return pd.DataFrame(rows, columns=EXACT)


def evaluated(profile: Profile) -> set[str]:
    """Keys of the methods with an exact evaluation, "base" among them."""
    found = runs.evaluations(profile)
    return {method for method, _, run, _ in found if run.record.is_file()}


@dataclass(frozen=True)
class Exact:
    """Exact pass@k of one method: ``values`` (seeds, problems, ks) and ``rare``, the mass of the
    rare way (seeds, problems). Problems stand in the same order for every method, ``sets`` names
    the data set of each. The base has one seed, None."""

    method: str
    values: np.ndarray
    rare: np.ndarray
    sets: list[str]
    seeds: list[Any]


def by_method(profile: Profile, ks: Sequence[int] = KS, ood: bool = False) -> dict[str, Exact]:
    """:class:`Exact` of every evaluated method, in the profile's order."""
    return dict(_by_method(profile, tuple(ks), ood))


@runs.once
def _by_method(profile: Profile, ks: tuple[int, ...], ood: bool) -> dict[str, Exact]:
    frame = probabilities(profile, ood)
    found, problems = {}, problems_of(frame)
    for name, of_method in frame.groupby("method", sort=False):
        method = str(name)
        masses, sets, seeds = by_seed(of_method, method, ["valid", "rare"], problems)
        values = np.stack([pass_at_k(pd.Series(one[:, 0]), ks) for one in masses])
        found[method] = Exact(method, values, masses[:, :, 1], sets, seeds)
    return found


def along_training(profile: Profile) -> pd.DataFrame:
    """Exact pass@k of every policy in training, as RL's runs log it (``evaluation.every``).

    Columns method, seed, step, pass@k for some k, common, rare: means over data sets. Empty where
    the profile asks for none.
    """
    frames = []
    logged = runs.rl_runs(profile) if profile.evaluation.every else []
    for method, seed, run in logged:
        path = run.measured / "exact.jsonl"
        if path.is_file():
            records.require_whole(path)
        rows = read_lines(path)
        if rows:
            means = pd.DataFrame(rows).drop(columns=["dataset", "problems"]).groupby("step").mean()
            frames.append(means.reset_index().assign(method=method, seed=seed))
    if not frames:
        return pd.DataFrame(columns=["method", "seed", "step", "pass@1", "pass@256", "rare"])
    return pd.concat(frames, ignore_index=True)


def ends(
    along: pd.DataFrame, columns: Sequence[str] = ("pass@1", "pass@256", "rare")
) -> pd.DataFrame:
    """Where each run of :func:`along_training` starts and ends: columns method, seed, steps, and of
    each of ``columns`` its value before training and after the run's own last step ("pass@1
    before", "pass@1", ...)."""
    by_run = along.sort_values("step").groupby(["method", "seed"], sort=False)
    first, last = by_run[list(columns)].first(), by_run[["step", *columns]].last()
    found = last.rename(columns={"step": "steps"}).join(first.add_suffix(" before"))
    pairs = [name for column in columns for name in (f"{column} before", column)]
    runs_in_order = along[["method", "seed"]].drop_duplicates()
    return runs_in_order.merge(found[["steps", *pairs]].reset_index(), on=["method", "seed"])


def summary_of_checks(checked: pd.DataFrame) -> pd.DataFrame:
    """:func:`checked_by_samples` by data set: how many policies, the shares with a |z| above 2
    and 3, and the largest."""
    sizes = checked.assign(size=checked["z"].abs()).groupby("dataset", sort=False)["size"]
    table = sizes.agg(
        policies="count",
        above_2=lambda z: (z > 2).mean(),
        above_3=lambda z: (z > 3).mean(),
        largest="max",
    )
    return table.reset_index()


def checked_by_samples(profile: Profile) -> pd.DataFrame:
    """Valid work among a policy's samples against its exact probability, by data set.

    On the problems that are sampled, a part of those that are exact; data outside Table 1 last.
    Columns method, run, dataset, problems, samples, exact, sampled, z (their difference in standard
    errors, given the problems). Samples come from the very distribution where the temperature is 1
    and nothing is cut off: then |z| stays below about 3.
    """
    found = probabilities(profile, ood=None).set_index(["run", *PROBLEM])["valid"]
    rows = []
    for method, _, run, policy in runs.evaluations(profile):
        sampled = counts.read(run.measured / "counts.csv").set_index(PROBLEM)
        joined = sampled.join(found.loc[policy.name].rename("p"), how="inner")
        for dataset, group in joined.groupby("dataset", sort=False):
            n, p = group["n"], group["p"]
            valid = (group["valid_common"] + group["valid_rare"]).sum()
            error = np.sqrt((n * p * (1 - p)).sum())
            z = (valid - (n * p).sum()) / error if error > 0 else np.nan
            share, expected = valid / n.sum(), (n * p).sum() / n.sum()
            rows.append((method, policy.name, dataset, len(group), n.sum(), expected, share, z))
    columns = ["method", "run", "dataset", "problems", "samples", "exact", "sampled", "z"]
    return pd.DataFrame(rows, columns=columns)
