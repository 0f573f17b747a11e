"""Methods in the groups that are drawn together, and figures with a part for each group."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D

from sage_lib.experiment.profile import Profile
from sage_lib.report.style import WIDE, error_bar, look

#: Of more methods than this in a panel, the reference alone has a band: more would hide the lines.
FEW = 3


def families(profile: Profile, chosen: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The methods to draw together, by family, each group in the order of ``chosen`` (keys).

    Beside the methods of a family stand those to compare them with, where they are chosen: the
    base, the profile's reference, and for each guide of the family the first method that has it (so
    that a shuffled branch guide is drawn beside the branch guide). The base alone is a family, too.
    """
    methods = [method for method in chosen if method != "base"]
    first_with: dict[str, str] = {}
    for method in methods:
        first_with.setdefault(_guide(profile, method), method)
    groups = {}
    for family in dict.fromkeys(profile.methods[method].family for method in methods):
        members = {method for method in methods if profile.methods[method].family == family}
        guides = {_guide(profile, method) for method in members} - {"None"}
        beside = {"base", profile.reference, *(first_with[guide] for guide in guides)}
        groups[family] = tuple(method for method in chosen if method in members | beside)
    return groups or {"base": tuple(chosen)}


def _guide(profile: Profile, method: str) -> str:
    """A method's guide as text, a guide inside another one ("inner") in its place."""
    guide: Mapping[str, Any] | None = profile.methods[method].guide
    while guide is not None and guide.get("inner"):
        guide = guide["inner"]
    return str(guide)


def banded(profile: Profile, methods: Sequence[str]) -> tuple[str, ...]:
    """Which methods of a panel have a band: all of a few, of many the one to compare with."""
    if len(methods) <= FEW:
        return tuple(methods)
    return (profile.reference,) if profile.reference in methods else (methods[0],)


def band_name(profile: Profile, methods: Sequence[str]) -> str:
    """Whose bands a panel of ``methods`` has, for its title."""
    shown = banded(profile, methods)
    return "bands" if len(shown) == len(methods) else f"band of {profile.label(shown[0])}"


def panel_rows(
    profile: Profile,
    chosen: Sequence[str],
    width_ratios: Sequence[float],
    lines: int = 1,
    legend: bool = True,
    **options: Any,
) -> tuple[Figure, list[tuple[tuple[str, ...], np.ndarray]]]:
    """An empty figure with a part for each family: (its methods, its axes (lines, columns)).

    ``lines``: rows of panels within a part. ``legend``: name the methods below each part; without,
    the part has room for their names along an axis. ``options`` go to ``subplots``.
    """
    groups = families(profile, chosen)
    if legend:
        heights = [1.75 * lines + 0.45 + 0.17 * -(-len(group) // 4) for group in groups.values()]
    else:
        heights = [max(1.9, 0.75 + 0.19 * len(group)) for group in groups.values()]
    figure = plt.figure(figsize=(WIDE, 0.2 + sum(heights)))
    parts = figure.subfigures(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    rows = []
    for part, (family, methods) in zip(parts, groups.items(), strict=True):
        axes = part.subplots(
            lines, len(width_ratios), squeeze=False, width_ratios=width_ratios, **options
        )
        if len(groups) > 1:
            part.suptitle(f"family “{family}”", x=0.01, ha="left", fontweight="bold")
        if legend:
            method_legend(part, profile, methods)
        rows.append((methods, axes))
    return figure, rows


def method_legend(figure: FigureBase, profile: Profile, methods: Sequence[str]) -> None:
    """Every method's look and label below a figure, drawn or not."""
    handles = [Line2D([], [], label=profile.label(method), **look(method)) for method in methods]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))


def intervals(
    axis: Axes,
    profile: Profile,
    frame: pd.DataFrame,
    columns: tuple[str, str, str] = ("mean", "low", "high"),
) -> None:
    """A line per row of ``frame`` from top to bottom: a method's mean and interval, its label left.

    ``columns`` of ``frame`` hold mean, low and high; the column method holds the key.
    """
    for position, row in enumerate(frame.to_dict("records")):
        mean, low, high = (row[column] for column in columns)
        error_bar(axis, position, mean, low, high, horizontal=True, **look(row["method"]))
    axis.set_yticks(range(len(frame)), [profile.label(method) for method in frame["method"]])
    axis.set_ylim(len(frame) - 0.5, -0.5)
    axis.margins(x=0.1)
