"""What a notebook makes: figures and tables, saved where they belong and shown below the cell."""

import html
import io
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from sage_lib import paths
from sage_lib.experiment import runs
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.files import SAME, write_text
from sage_lib.report import arm_tables, bases, sliders
from sage_lib.report.measured import labelled, main_methods
from sage_lib.report.style import count, described, save_figure

#: What the folded commands below a table are called.
AGAIN = "commands that make these rows again"
#: Columns that are displayed by other words than their file has: the names of files stay as they
#: are for those who read them.
HEADINGS = {
    "on_front": "on the front",
    "to_base": "share of the base",
    "holds_for": "holds for",
    "law_error": "error of the law",
    "mean_error": "error of the mean",
    "a_error": "standard error of a",
    "above_2": "|z| above 2",
    "above_3": "|z| above 3",
    "rare_share": "rare share",
    "rare_low": "rare low",
    "rare_high": "rare high",
    "both_ways": "both ways",
    "both_ways_low": "both ways low",
    "both_ways_high": "both ways high",
    "valid_common": "valid common",
    "valid_rare": "valid rare",
    "early_std": "early std",
    "mid_std": "mid std",
    "late_std": "late std",
    "along_se": "along, standard error",
    "share_se": "share, standard error",
    "at_beta": "at beta",
    "at_beta_kappa": "at beta/kappa",
    "to_reverse": "to the reverse KL",
    "to_forward": "to the forward KL",
    "peak_memory_gb": "peak GB",
    "most_GB": "most GB",
    "median_seconds": "median seconds",
    "total_hours": "hours in all",
    "step_time": "seconds a step",
    "frac_reward_zero_std": "groups without a spread",
}
#: Of a table with more rows than this, those of the profile's main methods are displayed (of one
#: without methods the first :data:`FIRST`), and the others are folded away below them.
LONG, FIRST = 30, 12
#: Text reads from the left, its own line breaks kept.
LEFT = {"text-align": "left", "white-space": "pre-wrap"}


class Page:
    """Saves and shows the figures and tables of one profile, or of the theory notebooks (None).

    Figures go to results/figures/<name>, measured tables to results/measured/<name>; those of
    published results to figures/<name> and data/published/<name>, where they are the same files
    unless something changed. The name is that of the profile, or "theory".

    Raises SageError for published results that were made from other settings than today's.
    """

    def __init__(self, profile: Profile | None, published: bool = False) -> None:
        if profile is not None and profile.published:
            runs.require_current(profile)
        self.profile = profile
        self.name = "theory" if profile is None else profile.name
        self.published = published if profile is None else profile.published

    def show(self, figure: Figure, name: str | None = None) -> None:
        """Save a figure (<name>.pdf, .png, and .json: what made it), close it, display it once.

        Without a name it is displayed alone, such as another profile's figure.
        """
        if name is not None:
            save_figure(figure, name, paths.figures(self.name, self.published))
        plt.close(figure)  # an open figure would be displayed again at the end of the cell
        _display(figure)

    def slide(
        self,
        figures: Mapping[str, Figure],
        label: str,
        start: int = 0,
        choices: Mapping[str, tuple[str, str, str]] | None = None,
        ticked: Collection[str] | None = None,
    ) -> None:
        """Display figures behind a slider that needs no kernel, as :func:`sliders.slider` has them;
        nothing is saved."""
        for figure in figures.values():
            plt.close(figure)
        _display(sliders.slider(figures, label, start, choices, ticked))

    def keep(
        self,
        frame: pd.DataFrame,
        name: str,
        precision: int = 3,
        shown: pd.DataFrame | None = None,
        first: pd.Series | None = None,
        **formats: str,
    ) -> None:
        """Write <name>.csv with keys of methods; display it with their labels.

        Floats have 10 significant digits. A table that is there already and differs by rounding
        alone (:data:`SAME`) stays as it is. ``shown``: display this part or layout of it instead.
        ``first``: the rows of what is displayed that are never folded away,
        as booleans. ``precision`` and ``formats`` as :meth:`table` has them.
        """
        text = frame.to_csv(index=False, float_format="%.10g")
        path = paths.measured(self.name, self.published) / f"{name}.csv"
        if not _says(path, text):
            write_text(path, text)
        self._table(frame if shown is None else shown, precision, formats, first)
        self._commands(frame)

    def table(self, frame: pd.DataFrame, precision: int = 3, **formats: str) -> None:
        """Display a table: labels for keys, no row numbers, floats with ``precision`` decimals.

        ``formats`` gives a column another format, such as ``share="{:.1%}"``. An index that has a
        name is shown, since it says what a row is; any other only numbers the rows. A column
        without any value (the std over one seed) is left out; a cell without one is empty. Columns
        have the words of :data:`HEADINGS`, where these have some. Of more than :data:`LONG` rows
        most are folded away. Below a table with a column
        ``method`` stand, folded away, the commands that make its rows again.
        """
        self._table(frame, precision, formats)
        self._commands(frame)

    def _table(
        self,
        frame: pd.DataFrame,
        precision: int,
        formats: Mapping[str, str],
        first: pd.Series | None = None,
    ) -> None:
        shown = frame if self.profile is None else labelled(self.profile, frame)
        if len(shown):
            shown = shown.dropna(axis="columns", how="all")
            formats = {name: given for name, given in formats.items() if name in shown}
        at_once = np.ones(len(shown), dtype=bool)
        if len(shown) > LONG:
            at_once = self._first(frame) | (False if first is None else first.to_numpy())
        _display(_styled(shown[at_once], precision, formats))
        if at_once.all():
            return
        rest = _styled(shown[~at_once], precision, formats).to_html()
        more = f"{count(int((~at_once).sum()), 'more row')}{self._of_others(at_once, frame)}"
        _display(f"<details><summary>{more}</summary>{rest}</details>")

    def _first(self, frame: pd.DataFrame) -> np.ndarray:
        """Which rows of a long table are displayed at once."""
        keys = _methods(frame)
        if self.profile is not None and keys is not None:
            main = {BASE, *main_methods(self.profile)}
            of_main = np.array([key in main for key in keys])
            if of_main.any() and not of_main.all():
                return of_main
        return np.arange(len(frame)) < FIRST

    def _of_others(self, first: np.ndarray, frame: pd.DataFrame) -> str:
        """ ", of other methods" where no method has rows both displayed and folded away."""
        keys = _methods(frame)
        if keys is None or set(keys[first]) & set(keys[~first]):
            return ""
        return ", of other methods"

    def _commands(self, frame: pd.DataFrame) -> None:
        if self.profile is None or "method" not in frame:
            return
        second = arm_tables.BASES[1]  # then its seeds are of two bases
        of_both = second in frame or second in set(frame.get("base", ()))
        bases_of = [self.profile, *(bases.others(self.profile) if of_both else ())]
        lines = [line for profile in bases_of for line in commands(profile, frame)]
        if lines:
            text = html.escape("\n".join(lines))
            _display(f"<details><summary>{AGAIN}</summary><pre>{text}</pre></details>")


def _says(path: Path, text: str) -> bool:
    """Whether a table's file has these cells already, but for the rounding of fractions."""
    try:
        stored, new = (
            pd.read_csv(source, dtype=str, keep_default_na=False)
            for source in (path, io.StringIO(text))
        )
    except (OSError, ValueError):  # no file, or one that something else cut short: made again
        return False
    if list(stored) != list(new) or len(stored) != len(new):
        return False
    cells = zip(stored.to_numpy().ravel(), new.to_numpy().ravel(), strict=True)
    return all(one == other or _rounded(one, other) for one, other in cells)


def _rounded(one: str, other: str) -> bool:
    if not {".", "e"} & {*one, *other}:  # whole numbers are counts
        return False
    try:
        return math.isclose(float(one), float(other), rel_tol=SAME)
    except ValueError:
        return False


def _methods(frame: pd.DataFrame) -> np.ndarray | None:
    """The keys of methods that the rows of a table belong to; None where it has none."""
    if "method" in frame.index.names:
        return frame.index.get_level_values("method").to_numpy()
    return frame["method"].to_numpy() if "method" in frame else None


def _styled(shown: pd.DataFrame, precision: int, formats: Mapping[str, str]) -> Styler:
    """A table as it is displayed; see :meth:`Page.table`."""
    numbered = not any(shown.index.names)
    if numbered:
        shown = shown.reset_index(drop=True)
    elif shown.index.nlevels == shown.columns.nlevels == 1 and shown.columns.name is None:
        # In one row with the names of the columns; pandas gives it a row of its own below them.
        shown = shown.rename_axis(index=None, columns=shown.index.name)
    # Without a name for each cell a table takes half the room in a notebook.
    style = Styler(shown, cell_ids=False).format(formats, precision=precision, na_rep="")
    for axis in (0, 1):
        style = style.format_index(_heading if axis else _plain, axis=axis)
    if numbered:
        style = style.hide(axis="index")
    words = [c for c, kind in shown.dtypes.items() if not pd.api.types.is_numeric_dtype(kind)]
    left = [{"selector": "", "props": [*LEFT.items()]}]
    return style.set_table_styles(dict.fromkeys(words, left))


def _plain(label: Any) -> str:
    """A row's or a column's name: a number without the zeros behind it."""
    return f"{label:g}" if isinstance(label, float) else str(label)


def _heading(label: Any) -> str:
    """A column's name as it is displayed."""
    return HEADINGS.get(label, _plain(label)) if isinstance(label, str) else _plain(label)


def commands(profile: Profile, frame: pd.DataFrame) -> list[str]:
    """What makes each row of a table again, by its columns ``method`` and ``against``: RL, then
    the evaluation."""
    named = {key for column in ("method", "against") for key in frame.get(column, ())}
    trained = [runs.sft_run(profile)] if BASE in named else []
    trained += [run for method, _, run in runs.rl_runs(profile) if method in named]
    evaluated = {policy.name: run for _, _, run, policy in runs.evaluations(profile)}
    both = [run for policy in trained for run in (policy, evaluated.get(policy.name)) if run]
    return [runs.command(profile, run) for run in both]


def theory_page(results: str = "own") -> Page:
    """The page of notebooks without a profile: their figures go to results/figures/theory, or as
    "published" to figures/theory."""
    return Page(None, results == "published")


def _display(shown: Any) -> None:
    """Show something below the running cell: text as HTML, a figure as a PNG with its alt text,
    where nbconvert looks for it, whatever Matplotlib's backend is (``MPLBACKEND=agg`` would leave
    the picture out); IPython is imported only where there is one."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.pylabtools import print_figure
    from IPython.display import HTML, display

    if isinstance(shown, Figure) and InteractiveShell.initialized():
        data = {"image/png": print_figure(shown, base64=True), "text/plain": repr(shown)}
        display(data, metadata={"image/png": {"alt": described(shown)}}, raw=True)
    else:
        display(HTML(shown) if isinstance(shown, str) else shown)
