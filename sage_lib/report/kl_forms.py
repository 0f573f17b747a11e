"""The seven forms of a KL penalty on one small tree: docs/which_kl.md."""

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from sage_lib.report import style
from sage_lib.theory import estimators, objectives, two_path

#: Weight of the KL, and where the guide begins to act (nats): it is 1.4 at the fork of six, else 1.
BETA, THRESHOLD = 0.5, 0.4
#: Each form, and the estimator whose expected gradient it has where completions are drawn from the
#: policy and tokens weigh the same.
FORMS = {
    "k1 in the reward": "sequence",
    "k1 as a loss": "k1_loss",
    "k2 as a loss": "k2",
    "k3 as a loss": "k3",
    "k3, bias-corrected": "k3_corrected",
    "exact forward KL": "k3",
    "k1 in the return (eq. 8)": "sequence",
}


def fixed_points() -> pd.DataFrame:
    """Return where each form comes to rest on the tree of Appendix C, with a guide of the state and
    without.

    Columns: form, success and rare (probability of any right completion, and of the rare one),
    success with the guide, rare with the guide (NaN where no guide is taken).
    """
    tree, log_reference, reward = two_path.branch_tree()
    guide = objectives.log_guide(tree, "state", log_reference, THRESHOLD)
    rows = []
    for form, estimator in FORMS.items():
        row: list[str | float] = [form]
        for log_q in (None, guide):
            if form == "exact forward KL" and log_q is not None:
                row += [np.nan, np.nan]
                continue
            if estimator == "k1_loss":  # its expected gradient is 0: nothing holds the policy
                row += [1.0, np.nan]
                continue
            at_rest = estimators.fixed_point(tree, estimator, reward, log_reference, BETA, log_q)
            probabilities = tree.completion_probabilities(at_rest)
            row += [float(probabilities @ reward), float(probabilities[1])]
        rows.append(row)
    columns = ["form", "success", "rare", "success with the guide", "rare with the guide"]
    return pd.DataFrame(rows, columns=columns)


def reference() -> tuple[float, float]:
    """Return success and the rare completion's probability under the reference of that tree."""
    tree, log_reference, reward = two_path.branch_tree()
    probabilities: torch.Tensor = tree.completion_probabilities(log_reference)
    return float(probabilities @ reward), float(probabilities[1])


def draw(table: pd.DataFrame) -> Figure:
    """Draw the fixed points: success against the rare right completion, and where a guide moves
    each."""
    figure = Figure(figsize=(style.WIDE, 2.8))
    axis = figure.subplots()
    success, rare = reference()
    axis.plot(success, rare, label="reference", **style.points(style.series(0)))
    together = {
        "k1 in the reward, or in the return (eq. 8)": "k1 in the return (eq. 8)",
        "k2 as a loss; k3, bias-corrected": "k2 as a loss",
        "k3 as a loss; exact forward KL": "k3 as a loss",
    }
    rows = table.set_index("form")
    for place, (label, form) in zip((3, 2, 1), together.items(), strict=True):  # as in notebook 03
        row, look = rows.loc[form], style.series(place)
        axis.plot(row["success"], row["rare"], label=label, **style.points(look))
        start = row["success"], row["rare"]
        end = row["success with the guide"], row["rare with the guide"]
        if abs(end[0] - start[0]) + abs(end[1] - start[1]) > 1e-6:
            arrow = {"arrowstyle": "->", "color": look["color"]}
            axis.annotate("", xy=end, xytext=start, arrowprops=arrow)
    held = "k1 as a loss: nothing holds the policy"
    axis.axvline(1.0, label=held, color="0.4", linestyle=":", linewidth=0.8)
    axis.set_xlabel("probability of a right completion")
    axis.set_ylabel("probability of the rare right one")
    axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    title = "Branch lowers success under k1 and k3; the rare right one gains under k1 alone"
    caption = f"Tree of Appendix C, beta {BETA}", "arrows: to q = 1.4 where the policy is unsure"
    style.describe(figure, title, *caption)
    return figure
