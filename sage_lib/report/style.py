"""The style of all figures: sizes, and the colour, dash and marker of each method.

Colours are black and the colours of seaborn's "colorblind" palette that are visible on white.
Markers and dashes distinguish methods in grey print.
"""

import hashlib
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from sage_lib.files import write_bytes
from sage_lib.text import count as count

#: Widths of a page with two columns and of a column, inches.
WIDE, NARROW = 6.75, 3.25
STYLE: dict[Any, Any] = {
    **dict.fromkeys(["font.size", "axes.titlesize", "axes.labelsize", "figure.titlesize"], 8),
    **dict.fromkeys(["legend.fontsize", "xtick.labelsize", "ytick.labelsize"], 7),
    **{"lines.linewidth": 1.3, "lines.markersize": 3.5, "legend.frameon": False},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.5},
    **{"figure.constrained_layout.use": True, "pdf.fonttype": 42, "figure.dpi": 120},
}
_NAMES = ("blue", "orange", "green", "vermilion", "pink", "brown", "", "grey", "", "sky")
_PALETTE = zip(_NAMES, sns.color_palette("colorblind").as_hex(), strict=True)
COLOURS = {name: colour for name, colour in _PALETTE if name} | {"black": "#262626"}
#: Colours of series that are not methods: neighbours differ in lightness as well as in hue.
_SERIES = ["grey", "orange", "green", "brown", "pink", "vermilion", "blue", "sky", "black"]
_WIDE_DASH, _DENSE, _DASHDOTS = (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1))
_DASHES: list[Any] = ["-", "--", ":", "-.", _WIDE_DASH, _DENSE, _DASHDOTS]
_MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h", "d"]
#: Not the colours of the base, GRPO and GRPO + Branch, which are in most figures.
_FREE = ["orange", "green", "brown", "pink", "sky", "black"]
LOOKS: dict[str, tuple[str, Any, str]] = {
    "base": ("grey", "-", "o"),
    "grpo": ("blue", "-", "s"),
    "grpo_no_kl": ("orange", "--", "^"),
    "grpo_forward_kl": ("green", "-.", "D"),
    "grpo_random": ("sky", _DENSE, "v"),
    "grpo_token": ("pink", _DASHDOTS, "P"),
    "grpo_branch": ("vermilion", "-", "X"),
    "branch_strong": ("brown", "-", "D"),
    "branch_corrected": ("orange", "-.", "p"),
    "branch_sequence": ("green", "--", "h"),
    "shuffled_branch": ("black", "--", "v"),
    "identity": ("sky", ":", "<"),
    "random_reward": ("pink", _DENSE, "d"),
    "matched": ("sky", "-", "<"),
    "pass_at_4": ("green", "-", "P"),
    "rft_entropy": ("pink", ":", "h"),
    "rft_branching": ("green", "-", "o"),
    "more_sft": ("brown", "--", "^"),
    "skilled_sft": ("vermilion", ":", "v"),
}
#: Methods that are drawn together: each has the next colour, dash and marker.
_TOGETHER = (
    (
        *("bnpo_no_kl", "bnpo", "bnpo_branch", "dapo_no_kl", "dapo", "dapo_branch"),
        *("beta_bnpo_no_kl", "beta_bnpo_branch"),
    ),
    ("full_grpo", "full_no_kl", "full_strong"),
    (
        *("updates", "clip_higher", "clip_cov", "kl_cov", "rapo", "nsr", "entropy_bonus"),
        *("top_entropy", "reference_reset", "reset_branch", "clip_cov_branch"),
    ),
    ("ppl_low", "ppl_high", "position_late", "position_early"),
    ("rft", "rft_noise"),
    ("branch_paper", "forward_kl_paper", "random_paper", "token_paper"),
)
for _start, _group in enumerate(_TOGETHER):
    for _i, _key in enumerate(_group, _start):
        LOOKS[_key] = (_FREE[_i % 6], _DASHES[_i % 7], _MARKERS[(2 * _i + 3 * _start) % 13])
_LINE = (f"front_beta{_beta}" for _beta in (0.02, 0.05, 0.1, 0.28, 0.4, 0.8, 0.55))
for _i, _key in enumerate((*_LINE, "grpo_low"), 1):
    LOOKS[_key] = ("blue", _DASHES[_i % 7], _MARKERS[_i + 1])


def look(method: str) -> dict[str, Any]:
    """Return colour, dash and marker of a method, as keywords of `plot`: by LOOKS or its hash."""
    number = int.from_bytes(hashlib.sha256(method.encode()).digest()[-8:])
    by_hash = _FREE[number % 6], _DASHES[number // 6 % 7], _MARKERS[number // 42 % 13]
    colour, dash, marker = LOOKS.get(method, by_hash)
    return {"color": COLOURS[colour], "linestyle": dash, "marker": marker}


def series(i: int) -> dict[str, Any]:
    """Return colour, dash and marker of the i-th series of a figure without methods."""
    colour, dash = COLOURS[_SERIES[i % len(_SERIES)]], _DASHES[i % len(_DASHES)]
    return {"color": colour, "linestyle": dash, "marker": _MARKERS[i % len(_MARKERS)]}


def points(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return a look with its marker alone."""
    return {**keywords, "linestyle": "none"}


def line(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return a look with its line alone."""
    return {**keywords, "marker": ""}


def counts(numbers: Iterable[int], word: str) -> str:
    """Return the range of several numbers with their noun: "3 seeds" or "1 to 5 seeds"."""
    distinct = sorted({int(number) for number in numbers})
    last = count(distinct[-1], word)
    return last if len(distinct) == 1 else f"{distinct[0]} to {last}"


def error_bar(
    axis: Axes,
    at: float,
    mean: float,
    low: float,
    high: float,
    horizontal: bool = False,
    **keywords: Any,
) -> None:
    """Draw a point with its interval along y, or x if ``horizontal``; NaN bounds draw none.

    ``at`` is its place on the other axis, and the keywords are a look.
    """
    # Rounding can leave the mean of equal values just outside: such a bar has length 0.
    lengths = np.nan_to_num(np.maximum([[mean - low], [high - mean]], 0))
    if horizontal:
        axis.errorbar(mean, at, xerr=lengths, capsize=2, **points(keywords))
    else:
        axis.errorbar(at, mean, yerr=lengths, capsize=3, **points(keywords))


def bases(
    axis: Axes, at: float, bounds: Iterable[Sequence[float]], step: float = 0.28, **keywords: Any
) -> None:
    """Draw each base alone beside a horizontal interval: < is the first base, > the second.

    A single base is not drawn again.

    Args:
        axis: to draw on.
        at: place of the interval of all bases.
        bounds: (mean, low, high) of each base; NaN bounds draw no interval.
        step: from one interval to the next.
        keywords: of `plot`.
    """
    rows = list(bounds)
    for number, (marker, (mean, low, high)) in enumerate(zip("<>", rows, strict=False), 1):
        if len(rows) > 1:
            y, look = at + number * step, {"linewidth": 0.6, "markersize": 2.5, **keywords}
            axis.plot([low, high], [y, y], **line(look))
            axis.plot(mean, y, **points({**look, "marker": marker, "markerfacecolor": "none"}))


def forest(
    axis: Axes,
    rows: pd.DataFrame,
    label: Callable[[str], str],
    shift: float = 0,
    alone: Sequence[pd.DataFrame] = (),
    **keywords: Any,
) -> None:
    """Draw differences with their intervals below one another.

    Args:
        axis: to draw on.
        rows: with the columns method, difference, low and high.
        label: gives the name of a method.
        shift: how far below their places.
        alone: the same rows of each base, drawn by :func:`bases`.
        keywords: a look in place of the methods' looks.
    """
    names = ["difference", "low", "high"]
    for place, row in enumerate(rows.itertuples()):
        drawn = keywords if keywords else look(str(row.method))
        bounds = (row.difference, row.low, row.high)
        error_bar(axis, -place - shift, *bounds, horizontal=True, **drawn)
        of_bases = [of[names].to_numpy()[place] for of in alone]
        bases(axis, -place, of_bases, step=-0.22, color=drawn["color"])
    axis.set_yticks(-np.arange(len(rows)), [label(method) for method in rows["method"]])
    lowest = 0.5 - max(len(rows), 1) - shift - 0.22 * len(alone)
    axis.set_ylim(lowest, 0.5)  # no row is on the frame
    axis.axvline(0, color="0.4", linewidth=0.8)
    axis.locator_params("x", nbins=4)


def band(axis: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, **keywords: Any) -> None:
    """Draw a light band between bounds of shape (n,), in the colour of a look."""
    axis.fill_between(x, low, high, color=keywords["color"], alpha=0.15, linewidth=0)


def steps(axis: Axes) -> None:
    """Make x an axis of whole steps."""
    axis.set_xlabel("RL step")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def describe(figure: Figure, title: str, *caption: str) -> None:
    """Write a title, which says what the figure shows, and a caption, whose parts ";" joins.

    This fixes the layout, so it is called last.
    """
    wide = figure.get_figwidth()
    figure.suptitle(fill(title, int(15 * wide)), x=0.01, ha="left", fontweight="bold")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # else each saved format has another layout
    for legend in figure.legends:  # the caption moves the lower edge of a saved figure
        legend.set_bbox_to_anchor((0, 0, 1, 1), transform=figure.transFigure)
    text = fill("; ".join(filter(None, caption)), int(19 * wide))
    figure.text(0.01, -0.01, text, va="top", fontsize=6.5, color="0.3", gid="caption")


def described(figure: Figure) -> str:
    """Describe a figure for those who do not see it: titles, caption and labels of axes."""
    panels = [axis for axis in figure.axes if axis.axison]
    words = [figure.get_suptitle(), *(axis.get_title() for axis in figure.axes)]
    words += [text.get_text() for text in figure.texts if text.get_gid() == "caption"]
    words += [" by ".join(filter(None, (axis.get_ylabel(), axis.get_xlabel()))) for axis in panels]
    return "; ".join(dict.fromkeys(" ".join(text.split()) for text in words if text))


def save_figure(figure: Figure, name: str, folder: Path) -> list[Path]:
    """Write <name>.pdf and <name>.png, and return their paths. The same figure gives the same
    bytes."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    box = figure.get_tightbbox().padded(0.05)  # no title or label is cut
    files = []
    for ending, unstable in (("pdf", "CreationDate"), ("png", "Software")):
        drawn = io.BytesIO()
        options: dict[str, Any] = {"metadata": {unstable: None}, "dpi": 200}
        figure.savefig(drawn, format=ending, bbox_inches=box, **options)
        files.append(write_bytes(folder / f"{name}.{ending}", drawn.getvalue()))
    return files
