"""The figure of ``sage-companion pass-at-k``."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from sage_lib.report import style


def save(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write the figure of a result and return its files."""
    # Labels are names of files, and no formulas.
    with matplotlib.rc_context({**style.STYLE, "text.parse_math": False}):
        return style.save_figure(draw(result), "pass_at_k", folder)


def draw(result: dict[str, Any]) -> Figure:
    """Draw the curves with their intervals and, where there are any, the differences with their
    bands over all k, and where the curves cross."""
    ks, policies, differences = result["ks"], result["policies"], result["differences"]
    panels = 2 if differences else 1
    figure = Figure(figsize=(style.NARROW * panels, 2.6))
    axes = figure.subplots(1, panels, squeeze=False)[0]
    order = [side["policy"] for side in policies]
    dense = len(ks) > 12
    for place, side in enumerate(policies):
        look = style.line(style.series(place)) if dense else style.series(place)
        axes[0].plot(ks, _numbers(side["pass_at_k"]), label=side["policy"], **look)
        style.band(axes[0], ks, _numbers(side["low"]), _numbers(side["high"]), **look)
    axes[0].set_ylabel("pass@k")
    axes[0].legend()
    for pair in differences:
        look = style.series(order.index(pair["policy"]))
        look = style.line(look) if dense else look
        axes[1].plot(ks, _numbers(pair["difference"]), label=pair["policy"], **look)
        bounds = _numbers(pair["band_low"]), _numbers(pair["band_high"])
        style.band(axes[1], ks, *bounds, **look)
        crossing = pair["crossing"]
        if crossing["k"] is not None:  # on the line of no difference
            look = style.points({**style.series(order.index(crossing["up"])), "marker": "|"})
            low = ks[0] if crossing["low"] is None else crossing["low"]  # an open end
            high = ks[-1] if crossing["high"] is None else crossing["high"]
            style.error_bar(axes[1], 0, crossing["k"], low, high, horizontal=True, **look)
    if differences:
        axes[1].set_ylabel(f"pass@k less that of {differences[0]['against']}")
        axes[1].axhline(0, color="0.4", linewidth=0.8)
    ticks = [k for k in ks if k & (k - 1) == 0] if dense else ks
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(k) for k in ticks])
        axis.minorticks_off()
        axis.set_xlabel("k")
    bands = "Left: 95 % intervals at each k; right: 95 % bands over all k at once"
    bars = "bars at 0: where curves cross, and its interval, to the edge if open"
    caption = (bands, bars) if differences else ("Bands: 95 % intervals at each k",)
    style.describe(figure, f"pass@k of {', '.join(order)}", *caption)
    return figure


def _numbers(values: list[Any]) -> np.ndarray:
    return np.array(values, dtype=float)
