"""The verdict's two differences wherever something else is changed, beside each other."""

import re
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_lib.report import generality_tables
from sage_lib.report.arm_figures import nothing
from sage_lib.report.front_tables import FEWEST_SEEDS
from sage_lib.report.generality_tables import GUIDE, NO_KL
from sage_lib.report.style import STYLE, WIDE, count, counts, describe, error_bar, series

#: Panels: metric and the name of its axis.
PANELS = {"pass@1": "exact pass@1", "pass@256": "exact pass@256"}
#: The two arms of a setting, each in panels of its own: the guide's differences are a tenth of the
#: others, and on one axis nothing would be seen of them.
WORDS = {GUIDE: "with the guide", NO_KL: "without KL"}


def differences(table: pd.DataFrame) -> Figure:
    """Each setting's guided arm, and below its arm without KL, minus the same setting's GRPO.

    ``table`` as :func:`generality_tables.table` gives it.
    """
    if table.empty:
        return nothing("None of the settings has a finished pair of runs.")
    asked = [one for one in WORDS if (table["asked"] == one).any()]
    settings = {one: table.loc[table["asked"] == one, "setting"].unique() for one in asked}
    heights = [len(settings[one]) + 1 for one in asked]
    with plt.rc_context(STYLE):
        size = (WIDE, 0.9 + 0.24 * sum(heights))
        grid: dict[str, Any] = {"squeeze": False, "sharey": "row", "height_ratios": heights}
        figure, axes = plt.subplots(len(asked), len(PANELS), figsize=size, **grid)
        for number, (of_arm, arm) in enumerate(zip(axes, asked, strict=True)):
            for axis, (metric, name) in zip(of_arm, PANELS.items(), strict=True):
                rows = table[(table["asked"] == arm) & (table["metric"] == metric)]
                _draw(axis, rows, series(number + 1))
                axis.set_xlabel(f"{name}, minus GRPO's")
            of_arm[0].set_title(WORDS[arm], loc="left")
        told = (table["metric"] == "pass@256") & (table["seeds"] >= FEWEST_SEEDS)
        last = table[told].set_index(["asked", "setting"])
        parts = []
        for arm, words in WORDS.items():
            if arm in last.index.get_level_values("asked"):
                rows = last.loc[arm]
                up, down = int((rows["low"] > 0).sum()), int((rows["high"] < 0).sum())
                parts.append(f"{words} above 0 in {up}, below in {down} of {len(rows)}")
        describe(
            figure,
            f"pass@256 minus GRPO's, settings of {count(FEWEST_SEEDS, 'seed')} or more: "
            + ("; ".join(parts) or "none yet"),
            f"Exact, {counts(table['problems'], 'problem')}. Paired, bars: 95 % over seeds and "
            "problems" + _alone(table),
            *generality_tables.shared(table[table["asked"] == NO_KL]),
            "upper and lower panels differ in scale" if len(asked) > 1 else "",
        )
    return figure


def _draw(axis: Axes, rows: pd.DataFrame, chosen: dict[str, Any]) -> None:
    labels = []
    for place, row in enumerate(rows.to_dict("records")):
        mean = row["difference"]
        two = row["seeds"] == 2  # whose interval is wider than what a pass@k can differ by
        ends = (mean, mean, mean) if two else (mean, row["low"], row["high"])
        hollow = {"markerfacecolor": "white"} if row["seeds"] < FEWEST_SEEDS else {}
        error_bar(axis, place, *ends, horizontal=True, **{**chosen, **hollow})
        name = row["setting"] if row["asked"] == GUIDE else _without_guide(row["setting"])
        labels.append(f"{name}, {count(row['seeds'], 'seed')}")
    axis.axvline(0, color="black", linewidth=0.6)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.5, -0.5)


def _alone(table: pd.DataFrame) -> str:
    """What an interval of one seed lacks and that two have none, where there are such."""
    few = (table["seeds"] < FEWEST_SEEDS).any()
    parts = [", hollow: too few seeds to decide anything"] if few else []
    parts += [" (one: over problems alone)"] if (table["seeds"] == 1).any() else []
    return "".join([*parts, *([" (two: no interval)"] if (table["seeds"] == 2).any() else [])])


def _without_guide(setting: str) -> str:
    """A setting's name for an arm that has no guide: without the remark which one it is."""
    return re.sub(r" \([^)]*Branch\)$", "", setting)
