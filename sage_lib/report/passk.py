"""pass@k of policies: exact, from the probabilities of all valid completions, and from samples.

Exact pass@k counts valid work: the answer is right, and so are all steps. Samples count right
answers, as the reward does.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.results import Results
from sage_lib.policy.exact import exact_pass_at_k
from sage_lib.report.inference import Values

#: The k of most comparisons.
AXES = (1, 256)
PROBLEM = ["dataset", "problem"]
#: Prefix of metrics that count right answers, valid work or not.
RIGHT = "right "
#: The common and the rare way of countdown. See docs/countdown_task.md.
WAYS = {"L": "common", "R": "rare"}


def of_sets(frame: pd.DataFrame, profile: Profile, ood: bool | None) -> pd.DataFrame:
    """Return the rows of a profile's data sets; ``ood`` is as in :meth:`Profile.data_sets`."""
    return frame[frame["dataset"].isin([data.label for data in profile.data_sets(ood)])]


def probabilities(results: Results, ood: bool | None = False) -> pd.DataFrame:
    """Return the probability of a valid sample, for each problem and evaluated policy: a row each.

    Columns run, method, seed, dataset, problem, valid, common, rare. The last two are the
    probabilities of the two ways of countdown. SageError for a profile without an exact task.
    """
    if not results.profile.exact:
        raise SageError(f"{results.name} has no countdown data or graphs, of which pass@k is exact")
    table = of_sets(results.support, results.profile, ood)
    keys = ["run", "method", "seed", *PROBLEM]
    mass = table.assign(mass=np.exp(table["logp"]), way=table["way"].map(WAYS).fillna("other"))
    by_way = mass.groupby([*keys, "way"], sort=False, dropna=False)["mass"].sum().unstack("way")
    ways = by_way.reindex(columns=["common", "rare"]).fillna(0.0)
    ways = ways.assign(valid=by_way.sum(axis=1).clip(upper=1.0)).reset_index()
    return table[keys].drop_duplicates().merge(ways, on=keys)


def exact(
    results: Results, ks: Sequence[int] = AXES, ood: bool | None = False
) -> dict[str, Values]:
    """Return exact pass@k of each method, and the probability of the rare way ("rare mass").

    ``ood`` is as in :meth:`Profile.data_sets`.
    """
    frame = probabilities(results, ood)
    columns = [*(f"pass@{k}" for k in ks), "rare mass"]
    curves = np.column_stack([exact_pass_at_k(frame["valid"], ks), frame["rare"]])
    return Values.by_method(frame.join(pd.DataFrame(curves, columns=columns)), columns)


def sampled(results: Results, ks: Sequence[int], ood: bool | None = False) -> dict[str, Values]:
    """Estimate pass@k of each method from its samples: right answers, valid work or not. Arguments
    as in :func:`exact`."""
    frame = of_sets(results.counts, results.profile, ood).reset_index(drop=True)
    columns = [f"pass@{k}" for k in ks]
    curves = metrics.pass_at_k_curve(frame["n"], frame["c"], tuple(ks))
    return Values.by_method(frame.join(pd.DataFrame(curves, columns=columns)), columns)


def right_at(p: ArrayLike, wrong: ArrayLike, lucky: ArrayLike, ks: Sequence[int]) -> np.ndarray:
    """Estimate pass@k of right answers by problem (rows) and k (columns), exact for valid work.

    C(wrong - lucky, k) / C(wrong, k) estimates without bias the probability that k samples without
    valid work have no right answer. For k above ``wrong`` the estimate for ``wrong`` samples is
    used.

    Args:
        p: exact probability of a valid sample, shape (problems,).
        wrong: samples whose work is not valid, shape (problems,).
        lucky: how many of these have a right answer, shape (problems,).
        ks: the values of k.
    """
    m, u = np.asarray(wrong), np.asarray(lucky)
    all_fail = 1 - exact_pass_at_k(p, ks)
    none = [np.where(m < k, u == 0, 1 - metrics.pass_at_k(np.maximum(m, k), u, k)) for k in ks]
    curves: np.ndarray = 1 - all_fail * np.stack(none, axis=1)
    return curves


def right(results: Results, ks: Sequence[int], ood: bool | None = False) -> dict[str, Values]:
    """Estimate pass@k of right answers ("right pass@k") of sampled problems, by :func:`right_at`.

    Its only noise is from right answers without valid work. Arguments as in :func:`exact`.
    """
    exact = probabilities(results, ood)[["run", *PROBLEM, "valid"]]
    frame = of_sets(results.counts, results.profile, ood).merge(exact, on=["run", *PROBLEM])
    valid = frame["valid_common"] + frame["valid_rare"]
    columns = [f"{RIGHT}pass@{k}" for k in ks]
    curves = right_at(frame["valid"], frame["n"] - valid, frame["c"] - valid, ks)
    return Values.by_method(frame.join(pd.DataFrame(curves, columns=columns)), columns)


def axes(profile: Profile) -> tuple[int, int]:
    """Return the two k of comparisons: 1, and 256 or, where pass@k is not exact, the largest k."""
    return AXES if profile.exact else (1, max(profile.evaluation.ks))


def exact_or_sampled(
    results: Results, ks: Sequence[int] | None = None, ood: bool | None = False
) -> dict[str, Values]:
    """Return pass@k of each method: exact where valid completions can be listed, else sampled.

    Without ``ks`` it has the two of :func:`axes`. ``ood`` is as in :meth:`Profile.data_sets`.
    """
    ks = axes(results.profile) if ks is None else ks
    return exact(results, ks, ood) if results.profile.exact else sampled(results, ks, ood)


def levels(values: dict[str, Values]) -> pd.DataFrame:
    """Return mean and 95 % interval over seeds and problems of each method and metric: a row each.

    Means are over data sets, and bounds those of :func:`metrics.interval_of_shares`.
    """
    rows = []
    for method, of in values.items():
        numbers = np.stack(metrics.interval_of_shares(of.values, of.sets), axis=1)
        size = (len(of.seeds), of.values.shape[1])
        by_column = zip(of.columns, numbers, strict=True)
        rows += [(method, column, *of_column, *size) for column, of_column in by_column]
    names = ["method", "metric", "mean", "low", "high", "seeds", "problems"]
    return pd.DataFrame(rows, columns=names)


def along_training(results: Results) -> pd.DataFrame:
    """Return exact pass@k of each policy in training, means over data sets: a row for each method,
    seed and step."""
    frame = results.exact.drop(columns=["run", "dataset", "problems"])
    return frame.groupby(["method", "seed", "step"], sort=False).mean().reset_index()
