"""What a notebook makes: figures and tables, saved where they belong and shown below the cell."""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from sage_lib import paths
from sage_lib.experiment.profile import Profile
from sage_lib.files import write_text
from sage_lib.report.measured import labelled
from sage_lib.report.style import save_figure

#: Text reads from the left, its own line breaks kept.
LEFT = {"text-align": "left", "white-space": "pre-wrap"}


class Page:
    """Saves and shows the figures and tables of one profile, or of the theory notebooks (None).

    Figures go to figures/<name>, measured tables to data/measured/<name>; the name is that of the
    profile, or "theory".
    """

    def __init__(self, profile: Profile | None) -> None:
        self.profile = profile
        self.name = "theory" if profile is None else profile.name

    def show(self, figure: Figure, name: str | None = None) -> None:
        """Save a figure (<name>.pdf, .png, and .json: what made it), close it, display it once.

        Without a name it is displayed alone, such as another profile's figure.
        """
        if name is not None:
            save_figure(figure, name, self.name)
        plt.close(figure)  # an open figure would be displayed again at the end of the cell
        _display(figure)

    def keep(
        self,
        frame: pd.DataFrame,
        name: str,
        precision: int = 3,
        shown: pd.DataFrame | None = None,
        **formats: str,
    ) -> None:
        """Write <name>.csv to data/measured with keys of methods; display it with their labels.

        ``shown``: display this part or layout of it instead. ``precision`` and ``formats`` as
        :meth:`table` has them.
        """
        write_text(paths.measured(self.name) / f"{name}.csv", frame.to_csv(index=False))
        self.table(frame if shown is None else shown, precision, **formats)

    def table(self, frame: pd.DataFrame, precision: int = 3, **formats: str) -> None:
        """Display a table: labels for keys, no row numbers, floats with ``precision`` decimals.

        ``formats`` gives a column another format, such as ``share="{:.1%}"``. An index that has a
        name is shown, since it says what a row is; any other only numbers the rows. A column
        without any value (the std over one seed) is left out; a cell without one is empty.
        """
        shown = frame if self.profile is None else labelled(self.profile, frame)
        if len(shown):
            shown = shown.dropna(axis="columns", how="all")
            formats = {name: given for name, given in formats.items() if name in shown}
        numbered = not any(shown.index.names)
        if numbered:
            shown = shown.reset_index(drop=True)
        style = shown.style.format(formats, precision=precision, na_rep="")
        if numbered:
            style = style.hide(axis="index")
        words = [c for c, kind in shown.dtypes.items() if not pd.api.types.is_numeric_dtype(kind)]
        _display(style.set_properties(subset=words, **LEFT))


def theory_page() -> Page:
    """The page of notebooks without a profile: their figures go to figures/theory."""
    return Page(None)


def _display(shown: Any) -> None:
    """Show something below the running cell; IPython is imported only where there is one."""
    from IPython.display import display

    display(shown)
