"""Figures and tables of a notebook: displayed below the cell, and saved."""

import io
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from sage_lib import paths
from sage_lib.experiment.results import Results
from sage_lib.files import SAME, write_text
from sage_lib.report.style import STYLE, described, save_figure

#: Columns with keys of methods. Tables display the methods' labels.
KEYS = ("method", "against")
#: Rows that are displayed at once; the others are folded below them.
ROWS = 8


class Page:
    """Displays and saves the figures and tables of a notebook.

    Figures go to figures/<name>, tables to data/published/<name>. For your own results they go to
    results/figures/<name> and results/measured/<name>.

    Args:
        results: of a profile; or a name, such as "theory", for a notebook without results.
        own: of a name: whether its files go to results/.
    """

    def __init__(self, results: Results | str, own: bool = False) -> None:
        self.results = None if isinstance(results, str) else results
        self.name = results if isinstance(results, str) else results.name
        self.published = not (own if isinstance(results, str) else results.own)
        plt.rcParams.update(STYLE)  # of all figures of the notebook

    def show(self, figure: Figure, name: str | None = None) -> None:
        """Display a figure. With a name it is also saved, as <name>.png and <name>.pdf."""
        if name is not None:
            save_figure(figure, name, paths.figures(self.name, self.published))
        plt.close(figure)  # an open figure would be displayed again at the end of the cell
        _display(figure)

    def table(
        self, frame: pd.DataFrame, precision: int = 3, rows: int = ROWS, **formats: str
    ) -> None:
        """Display a table with labels for keys of methods. A named index is displayed, too.

        Floats have ``precision`` decimals, and columns formats, as in `share="{:.1%}"`. The first
        ``rows`` are displayed at once, and the others are folded.
        """
        labelled = self._labelled(frame)
        if len(labelled):
            labelled = labelled.dropna(axis="columns", how="all")
        _display(_styled(labelled[:rows], precision, formats))
        if len(labelled) > rows:
            folded = _styled(labelled[rows:], precision, formats).to_html()
            summary = f"{len(labelled) - rows} more rows"
            _display(f"<details><summary>{summary}</summary>{folded}</details>")

    def keep(
        self,
        frame: pd.DataFrame,
        name: str,
        shown: pd.DataFrame | None = None,
        **formats: str,
    ) -> None:
        """Write <name>.csv with keys of methods, and display it, or another table (``shown``).

        Floats have 10 significant digits. A file that differs by rounding alone (SAME) stays.
        """
        text = frame.to_csv(index=False, float_format="%.10g")
        path = paths.measured(self.name, self.published) / f"{name}.csv"
        if not _has_cells(path, text):
            write_text(path, text)
        self.table(frame if shown is None else shown, 3, ROWS, **formats)

    def _labelled(self, frame: pd.DataFrame) -> pd.DataFrame:
        if self.results is None:
            return frame
        label = self.results.label
        shown = frame.assign(**{name: frame[name].map(label) for name in KEYS if name in frame})
        return shown.rename(index=label) if shown.index.name in KEYS else shown


def _has_cells(path: Path, text: str) -> bool:
    """Return whether a CSV file has the cells of a CSV text, up to the rounding of fractions."""
    try:
        stored, new = (
            pd.read_csv(source, keep_default_na=False, na_values=[""])
            for source in (path, io.StringIO(text))
        )
        pd.testing.assert_frame_equal(stored, new, rtol=SAME, atol=0)
    except (OSError, ValueError, AssertionError):  # no file, a broken one, or another table
        return False
    counts = new.select_dtypes("integer")
    return counts.equals(stored[list(counts)])


def _styled(shown: pd.DataFrame, precision: int, formats: dict[str, str]) -> Styler:
    numbered = not any(shown.index.names)
    if not numbered and shown.index.nlevels == shown.columns.nlevels == 1:
        # Pandas would write the index's name into a second row of headings.
        shown = shown.rename_axis(index=None, columns=shown.index.name)
    used = {name: format for name, format in formats.items() if name in shown}
    style = Styler(shown.reset_index(drop=True) if numbered else shown, cell_ids=False)
    # Labels come from profiles and data files: HTML in them is escaped.
    escape: dict[str, Any] = {"escape": "html"}
    style = style.format(used, precision=precision, na_rep="", **escape)
    style = style.hide(axis="index") if numbered else style.format_index(_plain, axis=0, **escape)
    style = style.format_index(_plain, axis=1, **escape)
    style = style.format_index_names(axis=0, **escape).format_index_names(axis=1, **escape)
    texts = [c for c, kind in shown.dtypes.items() if not pd.api.types.is_numeric_dtype(kind)]
    left = [{"selector": "", "props": [("text-align", "left"), ("white-space", "pre-wrap")]}]
    return style.set_table_styles(dict.fromkeys(texts, left))


def _plain(label: Any) -> str:
    """Return a name with blanks between words, or a number without zeros at its end."""
    return f"{label:g}" if isinstance(label, float) else str(label).replace("_", " ")


def _display(shown: Any) -> None:
    """Display text as HTML, or a figure as a PNG with a text for those who cannot see it."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.pylabtools import print_figure
    from IPython.display import HTML, display

    if isinstance(shown, Figure) and InteractiveShell.initialized():
        data = {"image/png": print_figure(shown, base64=True), "text/plain": repr(shown)}
        display(data, metadata={"image/png": {"alt": described(shown)}}, raw=True)
    else:
        display(HTML(shown) if isinstance(shown, str) else shown)
