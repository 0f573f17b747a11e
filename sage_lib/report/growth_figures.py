"""How time and memory grow with each size, from data/published/benchmarks/growth.csv."""

import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from sage_lib.report import measured
from sage_lib.report.style import STYLE, WIDE, describe, series

#: What each column of panels shows: its title, and which curves are its.
PANELS = {
    "an RL step, GRPO + Branch": ("completion length", "vocabulary", "batch", "parameters"),
    "evaluation": ("problems, exact", "problems, metrics", "k, metrics"),
    "runs and processes": ("runs in a grid", "processes, verifier"),
}
QUANTITIES = {"CPU seconds": "seconds of the processor", "peak MB": "peak above the start, MB"}
#: Over so many sizes of a curve, its last, its power is taken.
SIZES = 3
#: A larger power is more than linear.
LINEAR = 1.15


def _slope(ends: pd.DataFrame, quantity: str) -> float:
    """The power of the size that a quantity grows with from the first row to the last."""
    first, last = ends.iloc[0], ends.iloc[-1]
    return math.log(last[quantity] / first[quantity]) / math.log(last["size"] / first["size"])


def last_powers(table: pd.DataFrame) -> pd.DataFrame:
    """Of each curve the powers over its last :data:`SIZES`, its "largest" size, and "linear": the
    size after which every step of the seconds was more than linear, or the largest where the last
    was not. No power of a memory that did not grow with each of these sizes."""
    rows = []
    for curve, group in table.groupby("curve", sort=False):
        last, ends = group.iloc[-1], group[["size", "CPU seconds", "peak MB"]].iloc[-SIZES:]
        memory = group["memory power"].iloc[1 - SIZES :]
        others = group[~(group["power"] > LINEAR)]  # the first size has no step before it
        linear = others.iloc[-1]
        rows.append(
            {
                "curve": curve,
                "power": _slope(ends, "CPU seconds"),
                "memory power": _slope(ends, "peak MB") if (memory > 0).all() else math.nan,
                "linear": linear["size"],
                "largest": last["size"],
            }
        )
    return pd.DataFrame(rows).set_index("curve")


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The same in a page's words, a row for each curve."""
    rows = []
    for curve, of_curve in table.groupby("curve", sort=False):
        powers, last = last_powers(of_curve).loc[curve], of_curve.iloc[-1]
        whole = powers["linear"] == powers["largest"]
        memory = powers["memory power"]
        rows.append(
            {
                "what grows": curve,
                "sizes": f"{of_curve['size'].iloc[0]:,} to {last['size']:,}",
                "seconds at the last": f"{last['CPU seconds']:.3g}",
                "power of time": f"{powers['power']:.2f}",
                "power of memory": f"{memory:.2f}" if pd.notna(memory) else "",
                "linear up to": "all of it" if whole else f"{powers['linear']:,.0f}",
            }
        )
    return pd.DataFrame(rows)


def growth() -> Figure:
    """Seconds above, peaks below, a column for each of :data:`PANELS`; both axes logarithmic."""
    table = measured.benchmark("growth")
    powers = last_powers(table)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, len(PANELS), figsize=(WIDE, 5.2), sharex="col")
        for column, (title, curves) in enumerate(PANELS.items()):
            for row, (quantity, name) in enumerate(QUANTITIES.items()):
                axis, times = axes[row, column], 1.0
                for i, curve in enumerate(curves):
                    of_curve = table[table["curve"] == curve]
                    first = of_curve["size"].iloc[0]
                    shown = of_curve[quantity].clip(lower=1) if row else of_curve[quantity]
                    label = f"{curve}, from {first:,}: {_said(powers.loc[curve])}"
                    axis.plot(of_curve["size"] / first, shown, label=label, **series(i))
                    times = max(times, powers.loc[curve, "largest"] / first)
                axis.set(yscale="log", ylabel=name if column == 0 else "")
                axis.set_xscale("log", base=2)
                ticks = [4**i for i in range(int(math.log(times, 4)) + 1)]
                axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axes[0, column].set_title(title)
            axes[1, column].set_xlabel("times the smallest size")
            axes[1, column].legend(loc="upper center", bbox_to_anchor=(0.5, -0.25))
        describe(
            figure,
            "How time and memory grow with each size",
            f"behind each curve its power over the last {SIZES} sizes, of time and of memory",
            "one thread of a processor, the fastest of several; peaks below 1 MB are drawn at 1",
            "benchmarks/growth.csv",
        )
    return figure


def _said(powers: pd.Series) -> str:
    """The powers of a curve in its label."""
    memory = powers["memory power"]
    return f"{powers['power']:.2f}" + (f", {memory:.2f}" if pd.notna(memory) else "")
