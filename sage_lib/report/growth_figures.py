"""How time and memory grow with each size, from data/published/benchmarks/growth.csv."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from sage_lib.report import measured
from sage_lib.report.style import STYLE, WIDE, describe, series

#: What each column of panels shows: its title, and which curves are its.
PANELS = {
    "an RL step, GRPO + Branch": ("completion length", "vocabulary", "batch", "parameters"),
    "evaluation": ("problems, exact", "problems, metrics", "k, metrics"),
}
QUANTITIES = {"CPU seconds": "seconds of the processor", "peak MB": "peak above the start, MB"}
#: A larger power is more than linear.
LINEAR = 1.15


def last_powers(table: pd.DataFrame) -> pd.DataFrame:
    """Of each curve the powers of its last doubling, its "largest" size, and "linear": the size
    from which on the seconds grew faster than linearly, or the largest where they nowhere did."""
    rows = []
    for curve, group in table.groupby("curve", sort=False):
        steeper = group[group["power"] > LINEAR]
        last = group.iloc[-1]
        linear = group.loc[steeper.index[0] - 1] if len(steeper) else last
        rows.append(
            {
                "curve": curve,
                "power": last["power"],
                "memory power": last["memory power"],
                "linear": linear["size"],
                "largest": last["size"],
            }
        )
    return pd.DataFrame(rows).set_index("curve")


def growth() -> Figure:
    """Seconds above, peaks below; left an RL step, right evaluation; both axes logarithmic."""
    table = measured.benchmark("growth")
    powers = last_powers(table)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(WIDE, 4.6), sharex="col")
        for column, (title, curves) in enumerate(PANELS.items()):
            for row, (quantity, name) in enumerate(QUANTITIES.items()):
                axis = axes[row, column]
                for i, curve in enumerate(curves):
                    of_curve = table[table["curve"] == curve]
                    power = powers.loc[curve, "power" if row == 0 else "memory power"]
                    label = f"{curve}, from {of_curve['size'].iloc[0]:,}"
                    label += f": {power:.2f}" if pd.notna(power) else ""
                    times = of_curve["size"] / of_curve["size"].iloc[0]
                    shown = of_curve[quantity].clip(lower=1) if row else of_curve[quantity]
                    axis.plot(times, shown, label=label, **series(i))
                axis.set(xscale="log", yscale="log", ylabel=name if column == 0 else "")
                axis.legend(title="power of the last doubling")
            axes[0, column].set_title(title)
            axes[1, column].set_xlabel("times the smallest size")
        describe(
            figure,
            "How time and memory grow with each size",
            "one thread of a processor, the fastest of two after one; peaks below 1 MB at 1",
            "benchmarks/growth.csv",
        )
    return figure
