"""Tables of pass@k, made from counts alone, in the paper's layout: Table 1, differences, crossings.

Every table names methods by their key in the column method (and against).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import Profile
from sage_lib.report import reported
from sage_lib.report.measured import evaluations, reference

TABLE1 = ["method", "dataset", "metric", "mean", "std", "low", "high", "seeds", "problems"]
DIFFERENCES = ["method", "against", "metric", "difference", "low", "high", "problems", "seeds"]
MEANS = ["method", "metric", "mean", "low", "high", "problems"]


def curves(frame: pd.DataFrame, method: str, ks: Sequence[int]) -> tuple[np.ndarray, list[str]]:
    """pass@k of each problem of a method, and the data set of each problem.

    ``frame`` is (a part of) what :func:`measured.evaluations` gives. The curves are means over
    seeds, shape (problems, len(ks)); problems come in the same order for every method.
    """
    of_method = frame[frame["method"] == method]
    if of_method.empty:
        known = ", ".join(dict.fromkeys(frame["method"]))
        raise SageError(f"there are no counts of {method!r}: choose one of {known}")
    of_runs = [run for _, run in of_method.groupby("run", sort=False)]
    by_run = [metrics.pass_at_k_curve(run["n"], run["c"], tuple(ks)) for run in of_runs]
    return np.mean(by_run, axis=0), list(of_runs[0]["dataset"])


def table1(profile: Profile) -> pd.DataFrame:
    """Table 1, measured and tidy: columns :data:`TABLE1`.

    ``mean`` and ``std`` are over seeds (std is NaN for one seed). ``low`` and ``high`` bound the
    95 % bootstrap interval over problems of the seed-averaged pass@k: what another draw of as many
    problems could give. The data set "Avg" is the mean over data sets, as the paper has it; its
    interval resamples problems within each data set.
    """
    frame = evaluations(profile)
    rows: list[dict[str, Any]] = []
    for method, of_method in frame.groupby("method", sort=False):
        rows += [{"method": method, **row} for row in _rows_of_table1(profile, of_method)]
    return pd.DataFrame(rows, columns=TABLE1)


def _rows_of_table1(profile: Profile, of_method: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The rows of one method: by data set, the average last, and by k."""
    settings = profile.evaluation
    ks = (1, max(settings.ks))
    seed_means: dict[str, np.ndarray] = {}  # data set -> (seeds, ks)
    draws: dict[str, np.ndarray] = {}  # data set -> (resamples, ks)
    problems: dict[str, int] = {}
    for number, (dataset, group) in enumerate(of_method.groupby("dataset", sort=False)):
        of_runs = [run for _, run in group.groupby("run", sort=False)]
        by_run = [metrics.pass_at_k_curve(run["n"], run["c"], ks) for run in of_runs]
        seed_means[dataset] = np.stack([curve.mean(0) for curve in by_run])
        averaged = np.mean(by_run, axis=0)
        seed = settings.seed + number
        draws[dataset] = metrics.bootstrap_means(averaged, settings.resamples, seed)
        problems[dataset] = int(group["problem"].nunique())
    seed_means["Avg"] = np.mean(list(seed_means.values()), axis=0)
    draws["Avg"] = np.mean(list(draws.values()), axis=0)
    problems["Avg"] = sum(problems.values())
    for dataset, values in seed_means.items():
        for column, k in enumerate(ks):
            mean, std = metrics.mean_std(values[:, column])
            low, high = np.quantile(draws[dataset][:, column], [0.025, 0.975])
            yield {
                "dataset": dataset,
                "metric": f"pass@{k}",
                "mean": mean,
                "std": std,
                "low": low,
                "high": high,
                "seeds": len(values),
                "problems": problems[dataset],
            }


def reported_table1(profile: Profile) -> pd.DataFrame:
    """The paper's own Table 1, the rows that this profile has: method, dataset, metric, mean, std.

    A row of the paper belongs to the first method with its label; other rows are left out.
    """
    keys = {profile.label("base"): "base"}
    for method in profile.methods:
        keys.setdefault(profile.label(method), method)
    frame = reported.load("sage_table1")
    known = frame[frame["row"].isin(list(keys))].reset_index(drop=True)
    known.insert(0, "method", [keys[row] for row in known["row"]])
    return known.drop(columns=["table", "row"])


def layout_of_table1(tidy: pd.DataFrame) -> pd.DataFrame:
    """A tidy table (reported or measured) as printed: "mean ± std" under data set and metric.

    One row per method; the index, named method, holds the keys.
    """
    cells = []
    for mean, std in zip(tidy["mean"], tidy["std"], strict=True):
        spread = "" if np.isnan(std) else f" ± {std:.3f}"
        cells.append(f"{mean:.3f}{spread}")
    shown = tidy.assign(cell=cells)
    wide = shown.pivot(index="method", columns=["dataset", "metric"], values="cell")
    methods = list(dict.fromkeys(tidy["method"]))
    columns = list(dict.fromkeys(zip(tidy["dataset"], tidy["metric"], strict=True)))
    return wide.loc[methods, columns]


def differences(profile: Profile, against: str, ood: bool = False) -> pd.DataFrame:
    """pass@1 and pass@max k of each method minus those of ``against`` (a method's key or "base").

    Columns :data:`DIFFERENCES`. Paired over problems; low and high bound the 95 % bootstrap
    interval over problems, within each data set, averaged over data sets. ``ood``: on the data
    outside Table 1.
    """
    rows = _differences(profile, evaluations(profile, ood), against)
    return pd.DataFrame(list(rows), columns=DIFFERENCES)


def compared(profile: Profile, ood: bool = False) -> pd.DataFrame:
    """The differences of every method to the reference and to the base."""
    frame = evaluations(profile, ood)
    rows: list[dict[str, Any]] = []
    for against in dict.fromkeys((reference(profile), "base")):
        rows += _differences(profile, frame, against)
    return pd.DataFrame(rows, columns=DIFFERENCES)


def _differences(profile: Profile, frame: pd.DataFrame, against: str) -> Iterator[dict[str, Any]]:
    settings = profile.evaluation
    ks = (1, max(settings.ks))
    theirs, sets = curves(frame, against, ks)
    for method in dict.fromkeys(frame["method"]):
        if method in (against, "base"):  # the base has no place on the left: it comes first
            continue
        ours, _ = curves(frame, method, ks)
        mean, low, high = metrics.paired_difference(
            ours, theirs, settings.resamples, settings.seed, sets
        )
        for column, k in enumerate(ks):
            yield {
                "method": method,
                "against": against,
                "metric": f"pass@{k}",
                "difference": float(mean[column]),
                "low": float(low[column]),
                "high": float(high[column]),
                "problems": len(sets),
                "seeds": frame[frame["method"] == method]["run"].nunique(),
            }


def verdict(
    low: float,
    high: float,
    above: str = "higher than",
    below: str = "lower than",
    neither: str = "not separated from",
) -> str:
    """In words, where the interval of a difference lies: above 0, below 0, or around it."""
    if low > 0:
        return above
    return below if high < 0 else neither


def crossings(profile: Profile) -> pd.DataFrame:
    """Where each pass@k curve passes the reference's, and the smallest effect that can be seen.

    pass@k is the mean over data sets, as in Table 1. Columns method, against, k, low, high,
    crosses (share of bootstrap resamples that cross), detectable at the smallest and at the largest
    k (80 % power), problems.
    """
    frame, settings = evaluations(profile), profile.evaluation
    ks, against = settings.ks, reference(profile)
    smallest, largest = f"detectable at {ks[0]}", f"detectable at {ks[-1]}"
    theirs, sets = curves(frame, against, ks)
    rows = []
    for method in dict.fromkeys(frame["method"]):
        if method == against:
            continue
        ours, _ = curves(frame, method, ks)
        crossing = metrics.crossing_interval(
            theirs, ours, ks, settings.resamples, settings.seed, sets
        )
        effect = metrics.minimum_detectable_effect(ours - theirs, sets)
        row = {"method": method, "against": against, **crossing}
        rows.append({**row, smallest: effect[0], largest: effect[-1], "problems": len(ours)})
    columns = ["method", "against", "k", "low", "high", "crosses", smallest, largest, "problems"]
    return pd.DataFrame(rows, columns=list(dict.fromkeys(columns)))


def means_with_intervals(profile: Profile, frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Mean of each column by method, with its 95 % bootstrap interval over problems.

    ``frame`` has the columns method, dataset, problem and ``columns``. Means over problems are
    taken within data sets first, then over data sets. Gives the columns :data:`MEANS`.
    """
    settings = profile.evaluation
    rows = []
    for method, group in frame.groupby("method", sort=False):
        by_problem = group.groupby(["dataset", "problem"], sort=False)[columns].mean()
        values, sets = by_problem.to_numpy(), by_problem.index.get_level_values("dataset")
        means = metrics.mean_over_sets(values, sets)
        low, high = metrics.bootstrap_interval(values, settings.resamples, settings.seed, sets)
        for name, *found in zip(columns, means, low, high, strict=True):
            rows.append((method, name, *found, len(values)))
    return pd.DataFrame(rows, columns=MEANS)


def unsolvable(profile: Profile, methods: Sequence[str]) -> dict[str, set[str]]:
    """The k-rollout unsolvable set of each method, k the samples of one run: key -> problems.

    Of several seeds the first one's run is taken, since the base has one run, and more rollouts
    would shrink the set of whatever has more.
    """
    frame = evaluations(profile)
    found = {}
    for method in methods:
        of_method = frame[frame["method"] == method]
        one = of_method[of_method["run"] == of_method["run"].iloc[0]]
        names = one["dataset"] + "/" + one["problem"]
        found[method] = metrics.unsolvable(list(names), one["c"])
    return found
