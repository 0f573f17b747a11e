"""pass@k of every policy of a study: exactly, from the probabilities of all valid completions, and
by samples.

Exact is valid work: the answer is right and every step of the work holds. Samples count what the
reward counts: a right answer.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.experiment.results import Results
from sage_lib.policy.exact import exact_pass_at_k
from sage_lib.report.inference import Values

#: What two methods are mostly compared in.
AXES = (1, 256)
PROBLEM = ["dataset", "problem"]
#: How the names of metrics begin that count right answers, valid work or not.
RIGHT = "right "
#: The ways of countdown: along its common and its rare way. See docs/countdown_task.md.
WAYS = {"L": "common", "R": "rare"}


def of_sets(frame: pd.DataFrame, profile: Profile, ood: bool | None) -> pd.DataFrame:
    """The rows of the data sets that :meth:`Profile.data_sets` gives for `ood`."""
    return frame[frame["dataset"].isin([data.label for data in profile.data_sets(ood)])]


def probabilities(results: Results, ood: bool | None = False) -> pd.DataFrame:
    """Probability that one sample is valid, of each problem under each evaluated policy.

    Columns run, method, seed, dataset, problem, valid, common, rare: the latter two are the masses
    of the two ways.
    """
    if not results.profile.exact:
        raise SageError(f"{results.name} has no countdown data or graphs, of which pass@k is exact")
    table = of_sets(results.support, results.profile, ood)
    keys = ["run", "method", "seed", *PROBLEM]
    mass = table.assign(mass=np.exp(table["logp"]), way=table["way"].map(WAYS))
    by_way = mass.groupby([*keys, "way"], sort=False, dropna=False)["mass"].sum().unstack("way")
    found = by_way.reindex(columns=["common", "rare"]).fillna(0.0).reset_index()
    found = table[keys].drop_duplicates().merge(found, on=keys)
    return found.assign(valid=(found["common"] + found["rare"]).clip(upper=1.0))


def exact(
    results: Results, ks: Sequence[int] = AXES, ood: bool | None = False
) -> dict[str, Values]:
    """Exact pass@k of each method, and the mass of the rare way ("rare mass")."""
    frame = probabilities(results, ood)
    columns = [*(f"pass@{k}" for k in ks), "rare mass"]
    curves = np.column_stack([exact_pass_at_k(frame["valid"], ks), frame["rare"]])
    return Values.by_method(frame.join(pd.DataFrame(curves, columns=columns)), columns)


def sampled(results: Results, ks: Sequence[int], ood: bool | None = False) -> dict[str, Values]:
    """Unbiased pass@k of each method from its samples: right answers, valid work or not."""
    frame = of_sets(results.counts, results.profile, ood).reset_index(drop=True)
    columns = [f"pass@{k}" for k in ks]
    curves = metrics.pass_at_k_curve(frame["n"], frame["c"], tuple(ks))
    return Values.by_method(frame.join(pd.DataFrame(curves, columns=columns)), columns)


def right_at(p: ArrayLike, wrong: ArrayLike, lucky: ArrayLike, ks: Sequence[int]) -> np.ndarray:
    """pass@k of right answers by problem (rows) and k (columns), exact for valid work.

    A sample is valid with probability ``p``, exactly. Of the ``wrong`` samples whose work is not
    valid, ``lucky`` have a right answer all the same: C(wrong - lucky, k) / C(wrong, k) estimates
    without bias that k such samples hold none. For k above ``wrong`` that of ``wrong`` samples
    stands in.
    """
    m, u = np.asarray(wrong), np.asarray(lucky)
    failed = 1 - exact_pass_at_k(p, ks)
    none = [np.where(m < k, u == 0, 1 - metrics.pass_at_k(np.maximum(m, k), u, k)) for k in ks]
    found: np.ndarray = 1 - failed * np.stack(none, axis=1)
    return found


def right(results: Results, ks: Sequence[int], ood: bool | None = False) -> dict[str, Values]:
    """pass@k of right answers ("right pass@k"), as the reward counts them, of the problems that are
    sampled: :func:`right_at`, whose variance is that of right answers without valid work alone."""
    exact = probabilities(results, ood)[["run", *PROBLEM, "valid"]]
    frame = of_sets(results.counts, results.profile, ood).merge(exact, on=["run", *PROBLEM])
    valid = frame["valid_common"] + frame["valid_rare"]
    columns = [f"{RIGHT}pass@{k}" for k in ks]
    curves = right_at(frame["valid"], frame["n"] - valid, frame["c"] - valid, ks)
    return Values.by_method(frame.join(pd.DataFrame(curves, columns=columns)), columns)


def axes(profile: Profile) -> tuple[int, int]:
    """The two k of the comparisons: 1, and 256 where pass@k is exact, else the largest of the
    profile's."""
    return AXES if profile.exact else (1, max(profile.evaluation.ks))


def exact_or_sampled(
    results: Results, ks: Sequence[int] | None = None, ood: bool | None = False
) -> dict[str, Values]:
    """pass@k of each method, for ``ks`` or :func:`axes`: exact where the valid completions can be
    listed, else from the samples."""
    ks = axes(results.profile) if ks is None else ks
    return exact(results, ks, ood) if results.profile.exact else sampled(results, ks, ood)


def levels(values: dict[str, Values]) -> pd.DataFrame:
    """Mean and 95 % interval over seeds and problems of each method and column.

    Columns method, metric, mean, low, high, seeds, problems. Means are over data sets; bounds end
    at 0 and 1. Two seeds have no interval: theirs is wider than what a pass@k can be.
    """
    rows = []
    for method, one in values.items():
        mean, low, high = metrics.paired_difference(one.values, 0 * one.values, one.sets)
        if len(one.seeds) == 2:
            low, high = np.full_like(low, np.nan), np.full_like(high, np.nan)
        size = (len(one.seeds), one.values.shape[1])
        for place, column in enumerate(one.columns):
            bounds = np.clip([low[place], high[place]], 0.0, 1.0)
            rows.append((method, column, mean[place], *bounds, *size))
    names = ["method", "metric", "mean", "low", "high", "seeds", "problems"]
    return pd.DataFrame(rows, columns=names)


def along_training(results: Results) -> pd.DataFrame:
    """Exact pass@k of each policy in training: method, seed, step, pass@k, common, rare; means
    over data sets."""
    frame = results.exact.drop(columns=["run", "dataset", "problems"])
    return frame.groupby(["method", "seed", "step"], sort=False).mean().reset_index()


def from_filtered(results: Results) -> pd.DataFrame:
    """KL(p* || pi) of each run in nats, p* the filtered model of its own base (theory.optimum).

    Columns run, method, seed, KL: the mean over data sets of that over problems.
    """
    support = of_sets(results.support, results.profile, ood=False)
    keys = ["base", *PROBLEM, "completion"]
    support = support.assign(base=support["run"].str.rpartition("/")[0])  # the profile, of others
    base = support[support["method"] == BASE].set_index(keys)["logp"]
    total = np.log(np.exp(base).groupby(keys[:-1]).transform("sum"))
    star = (base - total).rename("star").reset_index()
    both = support.merge(star, on=keys)
    both["KL"] = np.exp(both["star"]) * (both["star"] - both["logp"])
    names = ["run", "method", "seed"]
    by_problem = both.groupby([*names, *PROBLEM], sort=False, dropna=False)["KL"].sum()
    by_set = by_problem.groupby(level=[*names, "dataset"], sort=False, dropna=False).mean()
    found = by_set.groupby(level=names, sort=False, dropna=False).mean()
    return found.reset_index()
