"""Write the figure of docs/which_kl.md and the numbers of its table.

python tools/which_kl.py
"""

import matplotlib
import readme

from sage_lib.files import write_text
from sage_lib.paths import FIGURES, ROOT
from sage_lib.report import kl_forms, style

PAGE = ROOT / "docs" / "which_kl.md"


def page() -> str:
    """The page's text with the fixed points as a table."""
    numbers = kl_forms.fixed_points().set_index("form")
    table = numbers.map(lambda number: "-" if number != number else f"{number:.4f}").reset_index()
    table.columns = ["form", "right", "rare right", "right, guided", "rare right, guided"]
    return readme.filled(PAGE.read_text(), "fixed points", readme.markdown(table))


def main() -> None:
    with matplotlib.rc_context(style.STYLE):
        style.save_figure(kl_forms.draw(kl_forms.fixed_points()), "which_kl", FIGURES / "theory")
    write_text(PAGE, page())


if __name__ == "__main__":
    main()
