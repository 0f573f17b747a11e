"""Tables of pass@k, made from counts alone, in the paper's layout: Table 1, differences, crossings.

Every table names methods by their key in the column method (and against).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import Profile
from sage_lib.report import reported
from sage_lib.report.measured import by_seed, evaluations, reference

TABLE1 = ["method", "dataset", "metric", "mean", "std", "low", "high", "seeds", "problems"]
DIFFERENCES = [
    *("method", "against", "metric", "difference", "low", "high"),
    *("problems", "seeds", "holds_for"),
]
CROSSINGS = ["method", "against", "k", "low", "high", "crosses"]
MEANS = ["method", "metric", "mean", "low", "high", "problems"]


def curves(
    frame: pd.DataFrame, method: str, ks: Sequence[int]
) -> tuple[np.ndarray, list[str], list[Any]]:
    """pass@k of a method by seed and problem, the data set of each problem, and the seeds.

    ``frame`` is (a part of) what :func:`measured.evaluations` gives. The curves have the shape
    (seeds, problems, len(ks)); seeds and problems come in the same order for every method.
    """
    counted, sets, seeds = by_seed(frame, method, ["n", "c"])
    of_seeds = [metrics.pass_at_k_curve(one[:, 0], one[:, 1], tuple(ks)) for one in counted]
    return np.stack(of_seeds), sets, seeds


def table1(profile: Profile) -> pd.DataFrame:
    """Table 1, measured and tidy: columns :data:`TABLE1`.

    ``mean`` and ``std`` are over seeds (std is NaN for one seed). ``low`` and ``high`` bound the
    95 % interval over problems of the seed-averaged pass@k: what another draw of as many problems
    could give (:func:`metrics.bootstrap_interval`, which has width where all problems agree). The
    data set "Avg" is the mean over data sets, as the paper has it.

    ``std`` (ddof = 1) is the spread of training seeds, each seed's pass@k being an unbiased
    estimate from all its samples. Sampling adds little to it, and less than it would, since all
    policies are sampled with the same random numbers. The paper's ± is another quantity: in all 90
    cells of its Tables 1, 3 and 4 it is the standard deviation (ddof = 1) of five whole counts of
    problems (tests/test_tables.py). So its pass@1 is one answer a problem, and the noise of
    sampling is in it; the base, a single model, has one as well. The text does not say whether the
    five differ in training, or in sampling alone.
    """
    frame = evaluations(profile)
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys(frame["method"]):
        rows += [{"method": method, **row} for row in _rows_of_table1(profile, frame, method)]
    return pd.DataFrame(rows, columns=TABLE1)


def _rows_of_table1(profile: Profile, frame: pd.DataFrame, method: str) -> Iterator[dict[str, Any]]:
    """The rows of one method: by data set, the average last, and by k."""
    settings = profile.evaluation
    ks = (1, max(settings.ks))
    values, sets, _ = curves(frame, method, ks)
    of_set = np.array(sets)
    places = {name: np.flatnonzero(of_set == name) for name in dict.fromkeys(sets)}
    for dataset, chosen in [*places.items(), ("Avg", np.arange(len(sets)))]:
        part, names = values[:, chosen], list(of_set[chosen])
        of_seeds = np.stack([metrics.mean_over_sets(one, names) for one in part])
        low, high = metrics.bootstrap_interval(
            part.mean(axis=0), settings.resamples, settings.seed, names
        )
        for column, k in enumerate(ks):
            mean, std = metrics.mean_std(of_seeds[:, column])
            yield {
                "dataset": dataset,
                "metric": f"pass@{k}",
                "mean": mean,
                "std": std,
                "low": low[column],
                "high": high[column],
                "seeds": len(values),
                "problems": len(chosen),
            }


def at_each_k(profile: Profile, methods: Sequence[str]) -> pd.DataFrame:
    """pass@k of some methods for every k: columns method, k, mean, low, high.

    Means over seeds and problems as in Figure 3, the mean over data sets; ``low`` and ``high``
    bound the 95 % interval over problems.
    """
    frame, settings = evaluations(profile), profile.evaluation
    rows = []
    for method in methods:
        values, sets, _ = curves(frame, method, settings.ks)
        over_seeds = values.mean(axis=0)
        means = metrics.mean_over_sets(over_seeds, sets)
        low, high = metrics.bootstrap_interval(over_seeds, settings.resamples, settings.seed, sets)
        rows += [(method, *row) for row in zip(settings.ks, means, low, high, strict=True)]
    return pd.DataFrame(rows, columns=["method", "k", "mean", "low", "high"])


def reported_table(profile: Profile, name: str = "sage_table1") -> pd.DataFrame:
    """A table of the paper's as Table 1, the rows that this profile has: method, dataset, metric,
    mean, std.

    A row of the paper belongs to the first method with its label; other rows are left out.
    """
    keys = {profile.label("base"): "base"}
    for method in profile.methods:
        keys.setdefault(profile.label(method), method)
    frame = reported.load(name)
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

    Columns :data:`DIFFERENCES`. Seeds are paired by number and problems with themselves; low and
    high bound the 95 % interval over seeds and problems (:func:`metrics.paired_difference`), of the
    mean over data sets. ``holds_for`` says of what: with one seed of these two checkpoints alone.
    ``ood``: on the data outside Table 1.
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
    ks = (1, max(profile.evaluation.ks))
    theirs, sets, their_seeds = curves(frame, against, ks)
    for method in dict.fromkeys(frame["method"]):
        if method in (against, "base"):  # the base has no place on the left: it comes first
            continue
        ours, _, our_seeds = curves(frame, method, ks)
        (one, other), _ = common_seeds([(ours, our_seeds), (theirs, their_seeds)])
        for row in difference_rows(one, other, [f"pass@{k}" for k in ks], sets):
            yield {"method": method, "against": against, **row}


def difference_rows(
    ours: np.ndarray,
    theirs: np.ndarray,
    names: Sequence[str],
    sets: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of :data:`DIFFERENCES`, without the methods: one for each name of a column.

    ``ours`` and ``theirs`` have the shape (seeds, problems, columns), the seeds paired; with
    ``sets``, the data set of each problem, means are those over data sets.
    """
    mean, low, high = metrics.paired_difference(ours, theirs, sets)
    seeds = max(len(ours), len(theirs))
    for column, name in enumerate(names):
        yield {
            "metric": name,
            "difference": float(mean[column]),
            "low": float(low[column]),
            "high": float(high[column]),
            "problems": ours.shape[1],
            "seeds": seeds,
            "holds_for": holds_for(seeds),
        }


def common_seeds(
    arms: Sequence[tuple[np.ndarray, list[Any]]],
) -> tuple[list[np.ndarray], list[Any]]:
    """The values of several methods for the seeds that all of them have, and these seeds.

    An arm is (values, seeds), with the seeds along the first axis. The base, whose only seed is
    None, goes with all seeds and stays as it is; a method that was trained with one seed is
    compared in that seed alone. Raises SageError where there is no common seed.
    """
    trained = [seeds for _, seeds in arms if seeds != [None]]
    if not trained:
        return [values for values, _ in arms], [None]
    common = [seed for seed in trained[0] if all(seed in seeds for seeds in trained)]
    if not common:
        raise SageError(
            f"there is no seed that all have, of {' and of '.join(map(str, trained))}: "
            "a comparison needs the same ones, so evaluate both for the same seeds"
        )
    kept = [
        values if seeds == [None] else values[[seeds.index(seed) for seed in common]]
        for values, seeds in arms
    ]
    return kept, common


def holds_for(seeds: int) -> str:
    """Of what a comparison over so many training seeds speaks, in words."""
    return "these two checkpoints" if seeds == 1 else f"the methods ({seeds} seeds)"


def verdict(
    low: float,
    high: float,
    above: str = "higher than",
    below: str = "lower than",
    neither: str = "not separated from",
) -> str:
    """In words, where the interval of a difference lies: above 0, below 0, or around it.

    Of what it holds, :func:`holds_for` says. An interval that is not known (NaN) separates nothing.
    """
    if low > 0:
        return above
    return below if high < 0 else neither


def interval_text(difference: float, low: float, high: float, form: str = "+.3f") -> str:
    """A difference and its 95 % interval as text, each number in the format ``form``."""
    if np.isnan(low):
        return f"{difference:{form}}; no interval, since all differences agree"
    return f"{difference:{form}}, 95 % [{low:{form}}, {high:{form}}]"


def crossings(profile: Profile) -> pd.DataFrame:
    """Where each pass@k curve passes the reference's, and the smallest effect that can be seen.

    pass@k is the mean over data sets, as in Table 1. Columns :data:`CROSSINGS` (of
    :func:`metrics.crossing_interval`), detectable at the smallest and at the largest k (80 %
    power), problems, seeds, holds_for. Intervals and effects are over seeds and problems.
    """
    frame, settings = evaluations(profile), profile.evaluation
    ks, against = settings.ks, reference(profile)
    smallest, largest = f"detectable at {ks[0]}", f"detectable at {ks[-1]}"
    theirs, sets, their_seeds = curves(frame, against, ks)
    rows = []
    for method in dict.fromkeys(frame["method"]):
        if method == against:
            continue
        ours, _, our_seeds = curves(frame, method, ks)
        (one, other), _ = common_seeds([(ours, our_seeds), (theirs, their_seeds)])
        crossing = metrics.crossing_interval(other, one, ks, sets)
        effect = metrics.minimum_detectable_effect(one - other, sets)
        row = {"method": method, "against": against, **crossing}
        row |= {smallest: effect[0], largest: effect[-1], "problems": len(sets)}
        seeds = max(len(one), len(other))
        rows.append({**row, "seeds": seeds, "holds_for": holds_for(seeds)})
    columns = [*CROSSINGS, smallest, largest, "problems", "seeds", "holds_for"]
    return pd.DataFrame(rows, columns=list(dict.fromkeys(columns)))


def means_with_intervals(
    profile: Profile, frame: pd.DataFrame, columns: Mapping[str, tuple[float, float]]
) -> pd.DataFrame:
    """Mean of each column by method, with its 95 % interval over problems.

    ``frame`` has the columns method, dataset, problem and those of ``columns``, which gives for
    each the smallest and the largest value that a problem can have: the interval needs them
    (:func:`metrics.bootstrap_interval`). Means over problems are taken within data sets first, then
    over data sets. Gives the columns :data:`MEANS`.
    """
    settings = profile.evaluation
    rows = []
    for method, group in frame.groupby("method", sort=False):
        by_problem = group.groupby(["dataset", "problem"], sort=False)[list(columns)].mean()
        sets = list(by_problem.index.get_level_values("dataset"))
        for name, bounds in columns.items():
            values = by_problem[name].to_numpy()
            mean = metrics.mean_over_sets(values, sets)
            low, high = metrics.bootstrap_interval(
                values, settings.resamples, settings.seed, sets, bounds=bounds
            )
            rows.append((method, name, mean[0], low[0], high[0], len(values)))
    return pd.DataFrame(rows, columns=MEANS)


def layout_of_means(tidy: pd.DataFrame) -> pd.DataFrame:
    """:func:`means_with_intervals` as it is read: a row for each method (the index), a column for
    each metric, "mean [low, high]"."""
    cells = [f"{row.mean:.3f} [{row.low:.3f}, {row.high:.3f}]" for row in tidy.itertuples()]
    wide = tidy.assign(cell=cells).pivot(index="method", columns="metric", values="cell")
    return wide.loc[list(dict.fromkeys(tidy["method"])), list(dict.fromkeys(tidy["metric"]))]


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
