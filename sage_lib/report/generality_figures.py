"""The verdict's two differences wherever something else is changed, beside each other."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_lib.report.arm_figures import nothing
from sage_lib.report.front_tables import FEWEST_SEEDS
from sage_lib.report.generality_tables import GUIDE, NO_KL
from sage_lib.report.style import STYLE, WIDE, count, counts, describe, error_bar, series

#: Panels: metric and the name of its axis.
PANELS = {"pass@1": "exact pass@1", "pass@256": "exact pass@256"}
#: How far the two differences of a row stand above and below its middle.
APART = {GUIDE: -0.17, NO_KL: 0.17}
WORDS = {GUIDE: "with the guide", NO_KL: "without KL"}


def differences(table: pd.DataFrame) -> Figure:
    """Each setting's guided arm, and its arm without KL, minus the same setting's GRPO.

    ``table`` as :func:`generality_tables.table` gives it.
    """
    if table.empty:
        return nothing("None of the settings has a finished pair of runs.")
    settings = list(dict.fromkeys(table["setting"]))
    seeds = table.groupby("setting")["seeds"]
    with plt.rc_context(STYLE):
        height = 1.3 + 0.32 * len(settings)
        figure, axes = plt.subplots(1, len(PANELS), figsize=(WIDE, height), sharey=True)
        for axis, (metric, name) in zip(axes, PANELS.items(), strict=True):
            _draw(axis, table[table["metric"] == metric], settings)
            axis.set_xlabel(f"{name}, minus GRPO's")
        labels = [f"{one} ({counts(seeds.get_group(one), 'seed')})" for one in settings]
        axes[0].set_yticks(range(len(settings)), labels)
        axes[0].set_ylim(len(settings) - 0.5, -0.5)
        axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
        told = (table["metric"] == "pass@256") & (table["seeds"] >= FEWEST_SEEDS)
        last = table[told].set_index(["asked", "setting"])
        parts = []
        for asked, words in WORDS.items():
            if asked in last.index.get_level_values("asked"):
                rows = last.loc[asked]
                up, down = int((rows["low"] > 0).sum()), int((rows["high"] < 0).sum())
                parts.append(f"{words} above 0 in {up}, below in {down} of {len(rows)}")
        describe(
            figure,
            f"pass@256 minus GRPO's, settings of {count(FEWEST_SEEDS, 'seed')} or more: "
            + ("; ".join(parts) or "none yet"),
            "Exact, 600 problems. Paired, bars: 95 % over seeds and problems, of one seed over "
            "problems alone, which decides nothing",
        )
    return figure


def _draw(axis: Axes, rows: pd.DataFrame, settings: list[str]) -> None:
    for number, (asked, words) in enumerate(WORDS.items()):
        of_arm = rows[rows["asked"] == asked]
        for place, row in enumerate(of_arm.to_dict("records")):
            at = settings.index(row["setting"]) + APART[asked]
            label = words if place == 0 else None
            ends = (row["difference"], row["low"], row["high"])
            error_bar(axis, at, *ends, horizontal=True, label=label, **series(number + 1))
    axis.axvline(0, color="black", linewidth=0.6)
