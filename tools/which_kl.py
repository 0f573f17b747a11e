"""Write the figure of docs/which_kl.md and the numbers of its table.

python tools/which_kl.py
"""

import matplotlib

from sage_lib.paths import FIGURES, ROOT
from sage_lib.report import kl_forms, style

PAGE = ROOT / "docs" / "which_kl.md"
BEGIN, END = "<!-- fixed points: begin -->\n", "<!-- fixed points: end -->\n"


def table() -> str:
    """The fixed points as a table in Markdown."""
    lines = ["| form | right | rare right | right, guided | rare right, guided |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for form, *numbers in kl_forms.fixed_points().itertuples(index=False):
        shown = ["-" if number != number else f"{number:.4f}" for number in numbers]
        lines.append(f"| {form} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    with matplotlib.rc_context(style.STYLE):
        style.save_figure(kl_forms.draw(kl_forms.fixed_points()), "which_kl", FIGURES / "theory")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
