"""Figures of a family's arms: against their twins, and beside GRPO's front over beta."""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from sage_lib.experiment.profile import Profile
from sage_lib.report.arm_tables import BASES
from sage_lib.report.front_tables import FEWEST_SEEDS
from sage_lib.report.panels import at_the_edge, intervals, keep_near
from sage_lib.report.style import NARROW, STYLE, WIDE, count, describe, sentence

#: Panels of :func:`differences`.
PANELS = {
    "pass@1": "exact pass@1",
    "pass@256": "exact pass@256",
    "entropy": "entropy at the end\n(nats)",
}
#: The mark of what the second base alone says.
OTHER_BASE: dict[str, Any] = {
    **{"linestyle": "", "marker": "D", "markersize": 3, "zorder": 4},
    **{"markerfacecolor": "white", "markeredgecolor": "black", "markeredgewidth": 0.7},
}
#: Words of a line of a sentence in a figure.
LINE = 14


def nothing(text: str) -> Figure:
    """A figure that says why there is nothing to draw."""
    words = text.split()
    lines = [" ".join(words[start : start + LINE]) for start in range(0, len(words), LINE)]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 2.5, 0.7 + 0.2 * len(lines)))
        sentence(axis, "\n".join(lines))
    return figure


def differences(profile: Profile, table: pd.DataFrame) -> Figure:
    """Each arm minus its twin: exact pass@1, pass@256, and the entropy at the end of training.

    ``table`` as :func:`arm_tables.differences` gives it. Where nothing tells how far seeds lie
    apart, the interval is over problems alone, and its row says so. With differences by base, what
    the second base alone says stands beside it, without an interval.
    """
    methods = list(dict.fromkeys(table["method"]))
    if not methods:
        return nothing(f"{profile.name}: none of these arms was run beside its twin.")
    labels, off, second = [_label(profile, table, key) for key in methods], 0, BASES[1]
    with plt.rc_context(STYLE):
        height = max(1.9, 0.9 + 0.24 * len(methods))
        figure, axes = plt.subplots(1, len(PANELS), figsize=(WIDE, height), sharey=True)
        for axis, (metric, name) in zip(axes, PANELS.items(), strict=True):
            rows = table[table["metric"] == metric].set_index("method").reindex(methods)
            rows = rows.reset_index()
            unknown = rows["low"].isna()  # of a step log: too few seeds
            rows.loc[unknown, ["low", "high"]] = rows.loc[unknown, "difference"]
            intervals(axis, profile, rows, ("difference", "low", "high"))
            off += keep_near(axis, rows, ("difference", "low", "high"))
            if second in rows:
                inside = rows[second].between(*axis.get_xlim())
                axis.plot(rows[second][inside], rows.index[inside] + 0.3, **OTHER_BASE)
                off += at_the_edge(axis, rows[second], 0.3, "\N{WHITE DIAMOND} {}")
            axis.axvline(0, color="black", linewidth=0.6)
            axis.set_xlabel(name)
            axis.locator_params(axis="x", nbins=3)
        axes[0].set_yticks(range(len(methods)), labels)
        told = table[table["seeds"] >= FEWEST_SEEDS]
        clear = told[(told["low"] > 0) | (told["high"] < 0)].groupby("metric").size()
        of_all = told.groupby("metric").size()
        parts = [f"{name} {clear.get(name, 0)} of {of_all.get(name, 0)}" for name in PANELS]
        needed = count(FEWEST_SEEDS, "seed")
        alone = ", of one seed over problems alone" if (table["seeds"] == 1).any() else ""
        describe(
            figure,
            f"Minus GRPO with its beta and updates, {needed} or more, intervals clear of 0: "
            + ", ".join(parts)
            if len(told)
            else f"Minus GRPO with its beta and updates: fewer than {needed} decide nothing",
            f"{profile.name}. Paired, bars: 95 % over seeds and problems{alone}",
            "of entropy over seeds",
            "numbers: differences beyond the panel; arrows: bars that leave it" if off else "",
            "diamonds, a little lower: the second base alone" if second in table else "",
        )
    return figure


def _label(profile: Profile, table: pd.DataFrame, method: str) -> str:
    seeds = int(table.loc[table["method"] == method, "seeds"].max())
    return f"{profile.label(method)} ({count(seeds, 'seed')})"
