"""One style for every figure: sizes, and the colour, dash and marker of each method.

The colours are black and those of seaborn's "colorblind" palette that show on white, which most
colour-blind readers tell apart. Markers and dashes tell methods apart in grey print as well.
"""

import hashlib
import io
import re
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from sage_lib.experiment import records
from sage_lib.files import write_bytes, write_json

#: What marks a figure's caption among its texts.
CAPTION = "caption"
#: A larger SVG is not kept, bytes: the PDF shows the same, and git keeps every version.
LARGEST_SVG = 100_000
#: What Matplotlib calls a clip path or a marker of an SVG, where it is defined and used.
_ID = re.compile(rb'(?<=["#])[pm][0-9a-f]{10}(?=[")])')
#: Columns of a two-column page and of one column, inches.
WIDE, NARROW = 6.75, 3.25
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "figure.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,
    "figure.dpi": 144,  # below a cell, where it is sharp enough for a page; files say their own
}
_PALETTE = sns.color_palette("colorblind").as_hex()
COLOURS = {
    "blue": _PALETTE[0],
    "orange": _PALETTE[1],
    "green": _PALETTE[2],
    "vermilion": _PALETTE[3],
    "pink": _PALETTE[4],
    "brown": _PALETTE[5],
    "grey": _PALETTE[7],
    "sky": _PALETTE[9],
    "black": "#262626",
}
#: Of series that are no methods, in this order: neighbours differ in lightness as well as in hue.
_SERIES = ["grey", "orange", "green", "brown", "pink", "vermilion", "blue", "sky", "black"]
_DASHES = ["-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1))]
_MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h", "d"]
#: The markers as letters, for what no figure draws.
GLYPHS = {
    **{"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "<": "◀", ">": "▶"},
    **{"p": "⬟", "*": "★", "h": "⬢", "H": "⬣", "d": "♦"},
}
#: The methods that come with the companion.
_SHIPPED: dict[str, tuple[str, Any, str]] = {
    # Table 1: seven colours, seven markers
    "base": ("grey", "-", "o"),
    "grpo": ("blue", "-", "s"),
    "grpo_no_kl": ("orange", "--", "^"),
    "grpo_forward_kl": ("green", "-.", "D"),
    "grpo_random": ("sky", (0, (1, 1)), "v"),
    "grpo_token": ("pink", (0, (3, 1, 1, 1)), "P"),
    "grpo_branch": ("vermilion", "-", "X"),
    "branch_strong": ("brown", "-", "D"),
    # the fronts of other anchors
    "corrected": ("orange", "-.", "v"),
    "sequence": ("black", "--", "h"),
    # Table 3
    "bnpo_no_kl": ("brown", "--", "<"),
    "bnpo": ("black", "-", "p"),
    "bnpo_branch": ("green", "-", ">"),
    "dapo_no_kl": ("orange", ":", "d"),
    "dapo": ("black", ":", "D"),
    "dapo_branch": ("pink", "-.", "*"),
    # anchors and controls
    "grpo_entropy": ("brown", (0, (5, 1)), "P"),
    "branch_corrected": ("orange", "-.", "p"),
    "branch_sequence": ("green", "--", "h"),
    "identity": ("sky", ":", "<"),
    "shuffled_branch": ("black", "--", "v"),
    "random_reward": ("pink", (0, (1, 1)), "d"),
}
_WIDE_DASH, _DENSE, _DOTTED = (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1))
#: Looks of the grid's rivals and shapers, many of which stand in one figure. A rival's colour says
#: what its anchor is (orange and hollow none, brown none and 4 updates a batch, green beta 1, black
#: with a guide), its marker the method; GRPO at other betas is blue. Any other key has the look
#: that it had without these.
_OF_THE_GRID: dict[str, tuple[str, Any, str]] = {
    "grpo_updates": ("brown", "-", "s"),
    "clip_higher": ("brown", "--", "^"),
    "clip_cov": ("brown", "-.", "D"),
    "kl_cov": ("brown", ":", "X"),
    "entropy_bonus_beta0.0": ("orange", "-", "o"),
    "entropy_bonus_beta1.0": ("green", "-", "o"),
    "top_entropy_tokens_beta0.0": ("orange", "-.", "v"),
    "top_entropy_tokens_beta1.0": ("green", "-.", "v"),
    "reference_reset": ("green", "--", "d"),
    "entropy_advantage_beta0.0": ("orange", _DENSE, "*"),
    "entropy_advantage_beta1.0": ("green", _DENSE, "*"),
    "entropy_advantage_branch": ("black", _DENSE, "*"),
    "negative_samples_beta0.0": ("orange", _WIDE_DASH, "<"),
    "negative_samples_beta1.0": ("green", _WIDE_DASH, "<"),
    "negative_samples_branch": ("black", _WIDE_DASH, "<"),
    "negative_only_beta0.0": ("orange", _DOTTED, "H"),
    "negative_only_beta1.0": ("green", _DOTTED, "H"),
    "pass_at_k_beta0.0": ("orange", ":", "X"),
    "pass_at_k_beta1.0": ("green", ":", "X"),
    "pass_at_k_branch": ("black", ":", "X"),
    "ppl_positive": ("green", "-", "^"),
    "ppl_negative": ("orange", "--", "v"),
    "position_plus": ("pink", "-", "o"),
    "position_minus": ("brown", "--", "p"),
    "position_plateau_shift-0.5": ("black", ":", "h"),
    "position_plateau_shift0.5": ("sky", "-.", "s"),
    "rft": ("green", "-", "P"),
    "rft_noise": ("pink", "--", "o"),
    "rft_entropy": ("black", "-.", "p"),
    "rft_branching": ("sky", "-", "v"),
    "rft_noise_branching": ("grey", ":", "*"),
    "rft_perplexity": ("pink", ":", "^"),
    "rft_position": ("green", "--", "s"),
    "more_sft": ("sky", "--", "^"),
    "diverse_sft": ("pink", "-.", "h"),
    **{
        f"grpo_front_beta{beta}": ("blue", dash, marker)
        for beta, dash, marker in (
            (0.05, ":", "v"),
            (0.2, "--", "<"),
            (0.5, "-.", ">"),
            (1.4, _DENSE, "^"),
            (2.0, _WIDE_DASH, "D"),
        )
    },
    "full_grpo": ("sky", "--", "D"),
    "full_no_kl": ("orange", ":", "s"),
    "full_branch": ("black", "-.", "P"),
}
#: The base, GRPO and GRPO + Branch stand in most figures: no other method takes their colour.
_RESERVED = {"grey", "blue", "vermilion"}


def look(method: str) -> dict[str, Any]:
    """Colour, dash and marker of a method, as keywords of ``plot``: the same in every figure.

    They follow from the method's key alone. The methods that come with the papers, and the grid's
    rivals and shapers, have a fixed look; any other key takes one of those left over, by its hash
    (two of these can share colour and marker by chance, one time in sixty; their dashes then mostly
    differ).
    """
    fixed = {**_SHIPPED, **_OF_THE_GRID}
    if method in fixed:
        colour, dash, marker = fixed[method]
    else:
        taken = {(colour, marker) for colour, _, marker in _SHIPPED.values()}
        free = [
            (colour, marker)
            for colour in COLOURS
            for marker in _MARKERS
            if colour not in _RESERVED and (colour, marker) not in taken
        ]
        number = int.from_bytes(hashlib.sha256(method.encode()).digest()[-8:])
        colour, marker = free[number % len(free)]
        dash = _DASHES[number // len(free) % len(_DASHES)]
    found = {"color": COLOURS[colour], "linestyle": dash, "marker": marker}
    # In grey, too, a rival without an anchor is told from the same with one.
    hollow = method in _OF_THE_GRID and method.endswith("_beta0.0")
    return {**found, "markerfacecolor": "white"} if hollow else found


def series(i: int) -> dict[str, Any]:
    """Colour, dash and marker of the i-th series of a figure whose series are no methods."""
    return {
        "color": COLOURS[_SERIES[i % len(_SERIES)]],
        "linestyle": _DASHES[i % len(_DASHES)],
        "marker": _MARKERS[i % len(_MARKERS)],
    }


def points(chosen: dict[str, Any]) -> dict[str, Any]:
    """A look with its marker alone: no line joins the points."""
    return {**chosen, "linestyle": "none"}


def line(chosen: dict[str, Any]) -> dict[str, Any]:
    """A look with its line alone."""
    return {**chosen, "marker": ""}


def count(number: int, word: str) -> str:
    """ "1 seed", "3 seeds": how many, for a title."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def counts(numbers: Iterable[int], word: str) -> str:
    """ "3 seeds", "1 to 5 seeds": how many where not all have the same number of them."""
    found = sorted({int(number) for number in numbers})
    last = count(found[-1], word)
    return last if len(found) == 1 else f"{found[0]} to {last}"


def error_bar(
    axis: Axes,
    at: float,
    mean: float,
    low: float,
    high: float,
    horizontal: bool = False,
    **chosen: Any,
) -> None:
    """A point with the interval from ``low`` to ``high``; ``at`` is its place on the other axis.

    Rounding can leave the mean of equal values just outside their interval, and matplotlib refuses
    a bar of negative length: such a bar has length 0.
    """
    lengths = np.maximum([[mean - low], [high - mean]], 0)
    if horizontal:
        axis.errorbar(mean, at, xerr=lengths, capsize=2, **points(chosen))
    else:
        axis.errorbar(at, mean, yerr=lengths, capsize=3, **points(chosen))


def band(axis: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, **chosen: Any) -> None:
    """A light band between ``low`` and ``high`` in the colour of a look."""
    axis.fill_between(x, low, high, color=chosen["color"], alpha=0.15, linewidth=0)


def sentence(axis: Axes, text: str) -> None:
    """An empty panel that says why there is nothing to draw."""
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
    axis.set_axis_off()


def steps(axis: Axes, name: str = "RL step") -> None:
    """An x axis of whole steps."""
    axis.set_xlabel(name)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def describe(figure: Figure, title: str, *caption: str) -> None:
    """What a figure says in its title, and below it what it stands on: profile, sizes, intervals.

    ``caption``: parts of it, of which empty ones are left out. Both break to the figure's width.
    Called last: everything has its place then, with the caption below it.
    """
    wide = figure.get_figwidth()
    figure.suptitle(fill(title, int(15 * wide)), x=0.01, ha="left", fontweight="bold")
    _settle(figure)
    text = fill("; ".join(filter(None, caption)), int(19 * wide))
    figure.text(0.01, -0.01, text, va="top", fontsize=6.5, color="0.3", gid=CAPTION)


def _settle(figure: Figure) -> None:
    """Lay a figure out, once: each format that is saved would do so again."""
    if not isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        return
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for legend in figure.legends:  # a saved figure grows by its caption, and its lower edge moves
        legend.set_bbox_to_anchor((0, 0, 1, 1), transform=figure.transFigure)


def described(figure: Figure) -> str:
    """A figure in words, for those who do not see it: its titles, its caption, and what the axes of
    each panel are."""
    found = figure.findobj(lambda one: isinstance(one, Text) and one.get_gid() == CAPTION)
    words = [figure.get_suptitle(), *(axis.get_title() for axis in figure.axes)]
    words += [one.get_text() for one in found if isinstance(one, Text)]
    panels = [axis for axis in figure.axes if axis.axison]
    words += [" by ".join(filter(None, (axis.get_ylabel(), axis.get_xlabel()))) for axis in panels]
    words.append(figure.get_supxlabel())
    return "; ".join(dict.fromkeys(" ".join(text.split()) for text in words if text))


def _numbered(svg: bytes) -> bytes:
    """An SVG whose clip paths and markers are called by their order. Matplotlib calls them by a
    hash of their outlines, in which the last digit of a layout counts that no picture shows."""
    found = dict.fromkeys(_ID.findall(svg))
    numbers = {name: b"%c%d" % (name[0], number) for number, name in enumerate(found)}
    return _ID.sub(lambda name: numbers[name[0]], svg)


def save_figure(figure: Figure, name: str, folder: Path) -> list[Path]:
    """Write <name>.pdf and .png to ``folder``, and where it is small .svg; returns the files.

    <name>.json beside them tells the revision and the versions that drew them first, and the figure
    in words: one that is drawn again and comes out the same leaves all files as they are.
    """
    # Without dates, program names and random ids the same figure is the same file.
    options: dict[str, dict[str, Any]] = {
        "pdf": {"metadata": {"CreationDate": None}},
        "png": {"metadata": {"Software": None}, "dpi": 200},
        "svg": {"metadata": {"Date": None, "Creator": None}},
    }
    made, changed = [], False
    _settle(figure)
    whole = figure.get_tightbbox().padded(0.05)  # no title or label is cut
    for ending, option in options.items():
        path, drawn = folder / f"{name}.{ending}", io.BytesIO()
        with plt.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            figure.savefig(drawn, format=ending, bbox_inches=whole, **option)
        content = _numbered(drawn.getvalue()) if ending == "svg" else drawn.getvalue()
        if ending == "svg" and len(content) > LARGEST_SVG:
            path.unlink(missing_ok=True)
            continue
        changed |= not path.is_file() or path.read_bytes() != content
        write_bytes(path, content)
        made.append(path)
    about = folder / f"{name}.json"
    if changed or not about.is_file():
        drawn_by = {"revision": records.revision(), "versions": records.versions()}
        words = {"figure": name, "folder": folder.name, "alt": described(figure)}
        write_json(about, {**words, **drawn_by})
    return made
