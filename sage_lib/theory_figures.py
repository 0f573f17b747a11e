"""Figures of the exact notebooks, in the companion's style: arrays in, a matplotlib Figure out."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sage_lib.estimators import LABELS
from sage_lib.figures import NARROW, STYLE, WIDE, series

#: One look per anchor in every figure.
ANCHORS = ("k3", "k3_corrected", "sequence")


def fixed_points(tables: dict[str, pd.DataFrame], completion: str) -> Figure:
    """Probability of one completion at the reference, in the closed forms and where each anchor leads, by guide.

    ``tables``: guide name -> findings.fixed_points.
    """
    policies = ["reference", "eq. 4", "eq. 27 (forward KL)", *ANCHORS]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(WIDE, 2.4))
        for i, policy in enumerate(policies):
            values = [float(t.loc[t["completion"] == completion, policy].iloc[0]) for t in tables.values()]
            axis.plot(np.arange(len(tables)) + (i - 2.5) * 0.09, values, **{**series(i), "linestyle": "none"}, label=LABELS.get(policy, policy))
        axis.set(xticks=range(len(tables)), xticklabels=[f"guide: {g}" for g in tables], ylabel=f"probability of “{completion}”", ylim=(0, None), title="exact, no sampling")
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def distances(frame: pd.DataFrame) -> Figure:
    """Total variation between where each anchor leads and eq. 4, by beta (one panel per depth) and by entropy.

    ``frame``: findings.distances. Points are means over instances, bars their standard deviation.
    """
    depths = sorted(frame["depth"].unique())
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(depths) + 1, figsize=(WIDE, 2.4), sharey=True)
        for axis, depth in zip(axes, depths, strict=False):
            for i, anchor in enumerate(ANCHORS):
                by = frame[(frame["depth"] == depth) & (frame["estimator"] == anchor)].groupby("beta")["distance"]
                axis.errorbar(by.mean().index, by.mean(), yerr=by.std(), capsize=2, label=LABELS[anchor], **series(i + 3))
            n = frame[frame["depth"] == depth].groupby(["sharpness", "seed"]).ngroups
            axis.set(xlabel="beta", xscale="log", title=f"depth {depth}, {n} trees")
        deepest = frame[frame["depth"] == depths[-1]]
        for i, anchor in enumerate(ANCHORS):
            points = deepest[deepest["estimator"] == anchor].groupby(["sharpness", "seed"])[["entropy", "distance"]].mean()
            axes[-1].plot(points["entropy"], points["distance"], **{**series(i + 3), "linestyle": "none"})
        axes[-1].set(xlabel="mean token entropy of $\\pi_{ref}$ (nats)", title=f"depth {depths[-1]}, mean over beta")
        axes[0].set_ylabel("distance to eq. 4 (total variation)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def ratios(frame: pd.DataFrame, completion: str) -> Figure:
    """Probability of one completion at each anchor's fixed point against the guide's ratio.

    ``frame``: columns ratio, "eq. 4" and one per anchor.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.4, 2.6))
        for i, column in enumerate(["eq. 4", *ANCHORS]):
            axis.plot(frame["ratio"], frame[column] / frame[column].iloc[0], label=LABELS.get(column, column), markevery=2, **series(i + (1 if i == 0 else 2)))
        axis.set(xlabel="ratio of the branch guide (eq. 11)", ylabel=f"“{completion}”, relative to ratio 0", title="exact, no sampling; q not clamped")
        figure.legend(loc="outside lower center", ncols=1)
    return figure
