"""Panels that compare methods: their lines, their intervals, their legend."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from sage_lib.experiment.profile import BASE, Profile
from sage_lib.report.style import GLYPHS, NARROW, WIDE, count, counts, error_bar, look

#: Of more methods than this in a panel, the reference alone has a band: more would hide the lines.
FEW = 3


def lines_of(methods: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """(key, look) of the methods of a panel, to be drawn in this order.

    The first line is the widest, the last one the thinnest: where methods hardly differ, and their
    lines lie on each other, all of them can be seen.
    """
    below = np.linspace(1, 0, len(methods)) if len(methods) > 1 else [0.0]
    return [
        (method, {**look(method), "linewidth": 0.9 + 1.3 * share, "markersize": 2.5 + 3.5 * share})
        for method, share in zip(methods, below, strict=True)
    ]


def banded(profile: Profile, methods: Sequence[str]) -> tuple[str, ...]:
    """Which methods of a panel have a band: all of a few, of many the one to compare with.

    The colour of a band tells whose it is.
    """
    if len(methods) <= FEW:
        return tuple(methods)
    return (profile.reference,) if profile.reference in methods else (methods[0],)


#: Up to so many methods of one seed are named in a caption.
FEW_ALONE = 4


def seeds(profile: Profile, methods: Sequence[str] | None = None) -> str:
    """How many training seeds a figure of these methods (None: all) stands on; one shows
    checkpoints alone."""
    chosen = [m for m in profile.methods if methods is None or m in methods]
    sizes = sorted({len(profile.seeds_of(method)) for method in chosen})
    sizes = sizes or [len(profile.seeds)]
    if sizes == [1]:
        return "1 seed (these checkpoints)"
    alone = [profile.label(method) for method in chosen if len(profile.seeds_of(method)) == 1]
    single = f" (1: {'; '.join(alone)})" if 0 < len(alone) <= FEW_ALONE else ""
    return counts(sizes, "seed") + single


def panels(
    profile: Profile,
    methods: Sequence[str],
    width_ratios: Sequence[float],
    lines: int = 1,
    legend: bool = True,
    **options: Any,
) -> tuple[Figure, np.ndarray]:
    """An empty figure for some methods and its axes, shape (lines, columns).

    ``legend``: name the methods below the panels; without, there is room for their names along an
    axis. ``options`` go to ``subplots``.
    """
    columns = 4 if len(width_ratios) > 1 else 2
    if legend:
        height = 0.35 + 1.85 * lines + 0.17 * -(-len(methods) // columns)
    else:
        height = max(2.1, 0.95 + 0.19 * len(methods))
    width = WIDE if len(width_ratios) > 1 else NARROW + 1.2
    figure, axes = plt.subplots(
        lines,
        len(width_ratios),
        squeeze=False,
        figsize=(width, height),
        width_ratios=width_ratios,
        **options,
    )
    if legend:
        method_legend(figure, profile, methods, columns)
    return figure, axes


def spread(profile: Profile, values: Mapping[str, float], name: str) -> str:
    """From which method to which a value goes, and where the base is: a figure's message."""
    known = {method: value for method, value in values.items() if value == value}
    trained = {method: value for method, value in known.items() if method != BASE}
    if not trained:
        return f"{name}: {', '.join(f'{profile.label(m)} {v:.3f}' for m, v in known.items())}"
    low, high = min(trained, key=trained.__getitem__), max(trained, key=trained.__getitem__)
    parts = [f"{trained[low]:.3f} ({profile.label(low)})"]
    if high != low:
        parts.append(f"{trained[high]:.3f} ({profile.label(high)})")
    base = f"; the base {known[BASE]:.3f}" if BASE in known else ""
    return f"{name}: {' to '.join(parts)}{base}"


#: Inches of a legend's entry: its line, and each letter of its label.
ENTRY, LETTER = 0.55, 0.055


def legend_columns(profile: Profile, methods: Sequence[str], width: float, most: int = 4) -> int:
    """How many columns of a legend fit into the width of a figure, inches: a wider legend would
    make the saved figure wider, and so its panels smaller on a page."""
    longest = max((len(profile.label(method)) for method in methods), default=0)
    return max(1, min(most, len(methods), int(width / (ENTRY + LETTER * longest))))


def method_legend(
    figure: FigureBase, profile: Profile, methods: Sequence[str], columns: int = 4
) -> None:
    """Every method's look and label below a figure, drawn or not."""
    handles = [Line2D([], [], label=profile.label(method), **look(method)) for method in methods]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)))


def choices(profile: Profile, methods: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Each method's label, colour and mark, for the boxes of a slider (:func:`sliders.slider`)."""
    looks = {method: look(method) for method in methods}
    return {
        method: (profile.label(method), str(one["color"]), GLYPHS[one["marker"]])
        for method, one in looks.items()
    }


def intervals(
    axis: Axes,
    profile: Profile,
    frame: pd.DataFrame,
    columns: tuple[str, str, str] = ("mean", "low", "high"),
    seeds: bool = False,
) -> None:
    """A line per row of ``frame`` from top to bottom: a method's mean and interval, its label left.

    ``columns`` of ``frame`` hold mean, low and high; the column method holds the key. ``seeds``:
    with how many seeds a row has, of its column of that name.
    """
    for position, row in enumerate(frame.to_dict("records")):
        mean, low, high = (row[column] for column in columns)
        error_bar(axis, position, mean, low, high, horizontal=True, **look(row["method"]))
    names = [profile.label(method) for method in frame["method"]]
    if seeds:
        pairs = zip(names, frame["seeds"], strict=True)
        names = [f"{name} ({count(int(number), 'seed')})" for name, number in pairs]
    axis.set_yticks(range(len(frame)), names)
    axis.set_ylim(len(frame) - 0.5, -0.5)
    axis.margins(x=0.1)


#: What is behind a number that stands on bars.
CLEAR: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
#: How many times the upper quartile of what intervals or lines reach still belongs into a picture.
REACH = 3.0


def keep_near(axis: Axes, frame: pd.DataFrame, columns: tuple[str, str, str]) -> int:
    """Let a few rows far off not squeeze all others: where one lies beyond :data:`REACH` times what
    three quarters of the rows reach, the panel of :func:`intervals` ends at those within it; every
    row beyond has its numbers at the edge, and a bar that leaves the panel an arrow. Returns how
    many rows lie beyond."""
    mean, low, high = (frame[column].to_numpy(dtype=float) for column in columns)
    reached = np.nanmax(np.abs([mean, low, high]), axis=0)
    limit = REACH * np.nanquantile(reached, 0.75) if np.isfinite(reached).any() else 0.0
    if limit == 0 or not (np.abs(mean) > limit).any():
        return 0
    near = reached <= limit
    known = np.concatenate([mean[near], low[near], high[near]])  # a row may lack its interval
    least, most = min(0.0, np.nanmin(known)), max(0.0, np.nanmax(known))
    room = 0.1 * (most - least)
    left, right = least - room, most + room
    axis.set_xlim(left, right)
    for row, key in enumerate(frame.get("method", ())):
        for ends, edge, mark in ((low[row] < left, left, "<"), (high[row] > right, right, ">")):
            if ends and left <= mean[row] <= right:
                colour = look(key)["color"]
                axis.plot(edge, row, mark, color=colour, markersize=5, clip_on=False, zorder=4)
    bounds = [f" [{a:+.2g}, {b:+.2g}]" if a < b else "" for a, b in zip(low, high, strict=True)]
    return at_the_edge(axis, mean, more=bounds)


def at_the_edge(
    axis: Axes,
    values: ArrayLike,
    lower: float = 0.0,
    form: str = "{}",
    more: Sequence[str] | None = None,
) -> int:
    """The numbers of the rows' ``values`` that lie beyond a panel, at its edges, ``lower`` below
    the rows' own places, in a format, and with what ``more`` says of the row; returns how many
    there are."""
    left, right = axis.get_xlim()
    beyond = [(row, one) for row, one in enumerate(np.asarray(values)) if not left <= one <= right]
    known = [(row, one) for row, one in beyond if np.isfinite(one)]
    for row, one in known:
        before = one < left
        axis.annotate(
            form.format(f"{one:+.2g}") + (more[row] if more else ""),
            (left if before else right, row + lower),
            xytext=(2 if before else -2, 0),
            textcoords="offset points",
            ha="left" if before else "right",
            va="center",
            fontsize=6,
            bbox=CLEAR,
            zorder=5,
        )
    return len(known)


def keep_lines_near(axis: Axes) -> bool:
    """The same for lines: a panel ends at :data:`REACH` times the height that three quarters of its
    lines stay below, and a line that rises farther leaves it. Returns whether one does."""
    tops = np.array([np.nanmax(np.asarray(one.get_ydata(), dtype=float)) for one in axis.lines])
    if not len(tops):
        return False
    near = tops <= REACH * np.quantile(tops, 0.75)
    if near.all():
        return False
    top = tops[near].max()
    low = min(float(np.nanmin(np.asarray(one.get_ydata(), dtype=float))) for one in axis.lines)
    axis.set_ylim(low - 0.1 * (top - low), top + 0.1 * (top - low))
    return True
