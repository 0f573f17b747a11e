"""How much a guide does: the dose that belongs beside every result of it."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.results import Study
from sage_lib.report import front

#: The share of a run's steps after which "last" begins: in `study` after step 150 of 200.
LAST = 0.75
#: The method whose beta was set to that of a guided one times its mean q, weighted by the KL.
MATCHED = {"branch_strong": "matched", "grpo_branch": "matched_branch"}
DOSE = [
    *("method", "runs", "threshold", "acting first", "acting last", "mean q first"),
    *("mean q last", "weighted q"),
]


def dose(study: Study, methods: Iterable[str] | None = None) -> pd.DataFrame:
    """The dose of each guided method that was trained (None: all), from its step logs: DOSE.

    threshold: in nats, the entropy above which Branch acts, where it is a quantile of the
    bases' entropies their mean; NaN for guides without one. acting: the share of tokens with q
    other than 1. mean q: over all tokens. first: at the first step; last: over the last quarter of
    the steps. All are means over runs.

    weighted q: the factor by which the profile's matched beta exceeds beta (MATCHED), NaN without
    one. It was set to the mean q with tokens weighted by their KL, which step logs do not have.
    """
    guides = {key: one.guide for key, one in study.settings.methods.items() if one.guide}
    chosen = [key for key in guides if methods is None or key in set(methods)]
    columns = ["run", "method", "step", "guide/acting", "guide/mean"]
    steps = study.steps.reindex(columns=columns).dropna(subset="guide/mean")
    share = steps["step"] / steps.groupby("run")["step"].transform("max")
    ends = {"first": steps["step"] == 1, "last": share > LAST}
    rows = []
    for method in (key for key in chosen if key in set(steps["method"])):
        own = steps["method"] == method
        row: dict[str, Any] = {"method": method, "runs": steps.loc[own, "run"].nunique()}
        profiles = steps.loc[own, "run"].str.rpartition("/")[0].unique()
        row["threshold"] = _threshold(study, guides[method], profiles)
        for end, at in ends.items():
            by_run = steps[own & at].groupby("run")[["guide/acting", "guide/mean"]].mean()
            row[f"acting {end}"], row[f"mean q {end}"] = by_run.mean()
        matched = MATCHED.get(method)
        row["weighted q"] = np.nan
        if matched in study.settings.methods:
            betas = [front.beta_of(study.settings, key) for key in (matched, method)]
            row["weighted q"] = betas[0] / betas[1]
        rows.append(row)
    return pd.DataFrame(rows, columns=DOSE)


def _threshold(study: Study, guide: dict[str, Any], profiles: Iterable[str]) -> float:
    """The entropy in nats above which a guide acts; NaN for one without a threshold.

    profiles: those of the bases that its runs start from, "" for the one of `study`.
    """
    guide = guide.get("inner", guide)
    if "threshold_quantile" not in guide:
        return float(guide.get("threshold", np.nan))
    share = str(guide["threshold_quantile"])
    bases = [Study(load_profile(name), study.own) if name else study for name in profiles]
    return float(np.mean([base.entropy["quantiles"][share] for base in bases]))
