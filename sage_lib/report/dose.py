"""The dose of a guide: how much it changes in training."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.results import Results
from sage_lib.report import tradeoff

#: The share of a run's steps after which "last" begins: in `study` after step 150 of 200.
LAST = 0.75
#: Guided method -> the method whose beta is the guided one's times its mean q, weighted by the KL.
MATCHED = {"branch_strong": "matched", "grpo_branch": "matched_branch"}
DOSE = [
    *("method", "runs", "threshold", "acting first", "acting last", "mean q first"),
    *("mean q last", "weighted q"),
]


def dose(results: Results, methods: Iterable[str] | None = None) -> pd.DataFrame:
    """Return the dose of guided methods (None: all), from their step logs: means over runs.

    Columns DOSE:

    - threshold: the entropy (nats) above which Branch acts. Where it is a quantile of the base's
      entropies, a mean over bases. NaN for a guide without threshold.
    - acting: the share of tokens with q other than 1; mean q: over all tokens. "first" is the first
      step, "last" the last quarter of the steps.
    - weighted q: the matched method's beta over the guided method's (MATCHED), NaN without one. It
      was set to the mean q of a pilot run, tokens weighted by their KL.
    - weighted q last: that mean in these runs. Over runs whose logs have it; else no such column.
    """
    guides = {key: m.guide for key, m in results.profile.methods.items() if m.guide}
    selected = [key for key in guides if methods is None or key in set(methods)]
    columns = ["run", "method", "step", "guide/acting", "guide/mean", "guide/kl", "kl_ref"]
    steps = results.steps.reindex(columns=columns).dropna(subset="guide/mean")
    share = steps["step"] / steps.groupby("run")["step"].transform("max")
    ends = {"first": steps["step"] == 1, "last": share > LAST}
    rows = []
    for method in (key for key in selected if key in set(steps["method"])):
        is_method = steps["method"] == method
        row: dict[str, Any] = {"method": method, "runs": steps.loc[is_method, "run"].nunique()}
        profiles = steps.loc[is_method, "run"].str.rpartition("/")[0].unique()
        row["threshold"] = _threshold(results, guides[method], profiles)
        for end, at in ends.items():
            by_run = steps[is_method & at].groupby("run")[["guide/acting", "guide/mean"]].mean()
            row[f"acting {end}"], row[f"mean q {end}"] = by_run.mean()
        matched = MATCHED.get(method)
        row["weighted q"] = np.nan
        if matched in results.profile.methods:
            betas = [tradeoff.beta_of(results.profile, key) for key in (matched, method)]
            row["weighted q"] = betas[0] / betas[1]
        late = steps[is_method & ends["last"]].dropna(subset="guide/kl")
        if not late.empty:
            row["weighted q last"] = late["guide/kl"].sum() / late["kl_ref"].sum()
        rows.append(row)
    has_last = any("weighted q last" in row for row in rows)
    return pd.DataFrame(rows, columns=[*DOSE, "weighted q last"] if has_last else DOSE)


def _threshold(results: Results, guide: dict[str, Any], profiles: Iterable[str]) -> float:
    """Return the entropy in nats above which a guide acts; NaN for a guide without threshold.

    profiles: of the bases that its runs start from; "" for the profile of `results`.
    """
    guide = guide.get("inner", guide)
    if "threshold_quantile" not in guide:
        return float(guide.get("threshold", np.nan))
    share = str(guide["threshold_quantile"])
    bases = [Results(load_profile(name), results.own) if name else results for name in profiles]
    return float(np.mean([base.entropy["quantiles"][share] for base in bases]))
