"""Exact tables of the task countdown, whose ways of solving can be told apart and listed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile
from sage_lib.report import result_tables
from sage_lib.report.measured import by_seed, evaluations, of_sets, table_of
from sage_lib.tasks.countdown import COUNTED

MODES = [
    "method",
    *("rare_share", "rare_low", "rare_high"),
    *("both_ways", "both_ways_low", "both_ways_high"),
    *("unsound", "samples"),
]
#: The shares that have intervals, and how the columns of these begin.
SHARES = {"rare_share": "rare", "both_ways": "both_ways"}
PROBLEM = ["dataset", "problem"]


def modes(profile: Profile) -> pd.DataFrame:
    """How each method solves, with 95 % intervals over problems: columns :data:`MODES`.

    rare_share: share of samples that take the rare way. both_ways: share of problems of kind "both"
    for which a valid sample of each way was drawn (coverage; NaN without such problems). unsound:
    share of rewarded samples whose work is not valid. Means over seeds.
    """
    frame = _counted(profile)
    rows = []
    for method in dict.fromkeys(frame["method"]):
        rows.append({"method": method, **_modes_of(profile, frame, method)})
    return pd.DataFrame(rows, columns=MODES)


def mode_differences(profile: Profile, against: str = "base") -> pd.DataFrame:
    """rare_share and both_ways of each method minus those of ``against``.

    Columns :data:`result_tables.DIFFERENCES`: paired over problems, seeds by number, with 95 %
    intervals over seeds and problems. both_ways is left out without problems of kind "both".
    """
    frame = _counted(profile)
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys(frame["method"]):
        if method in (against, "base"):
            continue
        for name in SHARES:
            if frame[name].notna().any():
                theirs, _, their_seeds = _shares(frame, against, name)
                ours, _, seeds = _shares(frame, method, name)
                arms = [(ours, seeds), (theirs, their_seeds)]
                (one, other), _ = result_tables.common_seeds(arms)
                found = result_tables.difference_rows(one, other, [name])
                rows += [{"method": method, "against": against, **row} for row in found]
    return pd.DataFrame(rows, columns=result_tables.DIFFERENCES)


def _counted(profile: Profile) -> pd.DataFrame:
    """Counts of countdown's problems alone, with the columns :data:`SHARES`."""
    require_countdown(profile)
    frame = evaluations(profile).dropna(subset=list(COUNTED))  # other tasks leave these cells empty
    in_each_way = (frame["valid_common"] > 0) & (frame["valid_rare"] > 0)
    both_ways = in_each_way.astype(float).where(frame["dataset"] == "both")
    return frame.assign(rare_share=frame["rare"] / frame["n"], both_ways=both_ways)


def _shares(frame: pd.DataFrame, method: str, name: str) -> tuple[np.ndarray, list[str], list[Any]]:
    """One of :data:`SHARES` by seed and problem, where it is defined; as by_seed."""
    return by_seed(frame[frame[name].notna()], method, [name])


def require_countdown(profile: Profile) -> None:
    if "countdown" not in profile.tasks:
        raise SageError(
            f"profile {profile.name} evaluates no data of the task countdown, "
            "and only that task's ways of solving can be counted: add such a set to evaluation.data"
        )


def _modes_of(profile: Profile, frame: pd.DataFrame, method: str) -> dict[str, Any]:
    """One method's row of :func:`modes`."""
    settings = profile.evaluation
    row: dict[str, Any] = {}
    for name, column in SHARES.items():
        row |= dict.fromkeys((name, f"{column}_low", f"{column}_high"), np.nan)
        if frame[name].notna().any():
            values, _, _ = _shares(frame, method, name)
            averaged = values.mean(axis=0)
            low, high = metrics.bootstrap_interval(averaged, settings.resamples, settings.seed)
            row |= {name: float(averaged.mean())}
            row |= {f"{column}_low": float(low[0]), f"{column}_high": float(high[0])}
    total = frame[frame["method"] == method][["n", "c", *COUNTED]].sum()
    valid = total["valid_common"] + total["valid_rare"]
    unsound = 1 - valid / total["c"] if total["c"] else np.nan
    return {**row, "unsound": float(unsound), "samples": int(total["n"])}


def support(profile: Profile, epsilons: Sequence[float] = (0.05, 0.01, 0.001)) -> pd.DataFrame:
    """Empirical support (Definition 4.1) of the valid completions, exactly, on Table 1's data.

    Columns method, epsilon, size (completions in supp_eps), of (all valid ones), entered and left
    (against the base's), both_ways (share of problems of kind "both" with a completion of each way
    in the support), and, whatever the epsilon, valid_common and valid_rare (mean probability over
    problems of valid work in each way). Means over seeds.
    """
    require_countdown(profile)
    by_method: dict[str, list[pd.DataFrame]] = {}
    for method, _, run, _ in runs.evaluations(profile):
        table = of_sets(table_of(profile, run, "support.csv"), profile, ood=False)
        completion = table["completion"].astype(str)
        name = table["dataset"] + "/" + table["problem"] + "/" + completion
        table = table.assign(p=np.exp(table["logp"]), name=name)
        by_method.setdefault(method, []).append(table)
    base = _probabilities(by_method["base"][0])
    rows = []
    for method, tables in by_method.items():
        mass = pd.concat([_mass_by_way(table) for table in tables])
        for epsilon in epsilons:
            before = metrics.empirical_support(base, epsilon)
            sets = [metrics.empirical_support(_probabilities(t), epsilon) for t in tables]
            rows.append(
                {
                    "method": method,
                    "epsilon": epsilon,
                    "size": np.mean([len(now) for now in sets]),
                    "of": len(base),
                    "entered": np.mean([len(now - before) for now in sets]),
                    "left": np.mean([len(before - now) for now in sets]),
                    "both_ways": float(np.mean([_both_ways(t, epsilon) for t in tables])),
                    "valid_common": mass["L"].mean(),
                    "valid_rare": mass["R"].mean(),
                }
            )
    return pd.DataFrame(rows)


def support_curves(
    profile: Profile, methods: Sequence[str], epsilons: Sequence[float]
) -> pd.DataFrame:
    """The columns method, epsilon, size, entered, left and of of :func:`support` for some methods
    and many epsilons: the same counts, from arrays."""
    require_countdown(profile)
    by_method: dict[str, list[pd.Series]] = {}
    for method, _, run, _ in runs.evaluations(profile):
        if method in ("base", *methods):
            table = of_sets(table_of(profile, run, "support.csv"), profile, ood=False)
            index = pd.MultiIndex.from_frame(table[[*PROBLEM, "completion"]])
            by_method.setdefault(method, []).append(pd.Series(np.exp(table["logp"].array), index))
    [base] = by_method["base"]
    limits = np.asarray(epsilons)
    before = base.to_numpy()[:, None] > limits
    parts = []
    for method, found in by_method.items():
        now = np.stack([one.reindex(base.index).to_numpy()[:, None] > limits for one in found])
        columns = {
            "size": now.sum(axis=1).mean(axis=0),
            "entered": (now & ~before).sum(axis=1).mean(axis=0),
            "left": (before & ~now).sum(axis=1).mean(axis=0),
        }
        parts.append(pd.DataFrame({"method": method, "epsilon": limits, **columns}))
    curves = pd.concat(parts, ignore_index=True).assign(of=len(base))
    return curves[curves["method"].isin(methods)].reset_index(drop=True)


def _probabilities(table: pd.DataFrame) -> dict[str, float]:
    """Completion -> its probability under one run's policy."""
    return table.set_index("name")["p"].to_dict()


def _mass_by_way(table: pd.DataFrame) -> pd.DataFrame:
    """Probability of valid work by problem (rows) and way (columns L, the common one, and R)."""
    mass = table.groupby([*PROBLEM, "way"])["p"].sum()
    return mass.unstack("way", fill_value=0).reindex(columns=["L", "R"], fill_value=0)


def _both_ways(table: pd.DataFrame, epsilon: float) -> float:
    """Share of the problems of kind "both" with a completion of each way above ``epsilon``."""
    both = table[table["dataset"] == "both"]
    inside = both.assign(inside=both["p"] > epsilon)
    by_way = inside.groupby(["problem", "way"])["inside"].any()
    return by_way.groupby("problem").all().mean()
