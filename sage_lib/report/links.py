"""The last cell of every notebook: links to the one before and the one after, by file name.

python -m sage_lib.report.links       writes these cells anew, after a notebook was added
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.files import notebook_text, write_text

#: How the id of such a cell begins.
CELL = "links"


def footer(name: str, names: Sequence[str]) -> str:
    """The Markdown of the last cell of the notebook ``name``; ``names``: all of them, in order."""
    place = list(names).index(name)
    around = {"Previous": names[place - 1 : place], "Next": names[place + 1 : place + 2]}
    found = [
        f"{word}: [{other.replace('_', ' ')}]({other}.ipynb)"
        for word, others in around.items()
        for other in others
    ]
    return "---\n" + " · ".join(found)


def write(folder: Path | None = None) -> list[str]:
    """Bring the last cell of every notebook of a folder (the project's own without one) up to date;
    returns the names of those that changed."""
    import nbformat  # late: it takes seconds

    files = sorted((folder or paths.NOTEBOOKS).glob("[0-9]*.ipynb"))
    names, changed = [path.stem for path in files], []
    for path in files:
        notebook: Any = nbformat.read(path, as_version=4)
        text = footer(path.stem, names)
        others = [cell for cell in notebook.cells if not cell["id"].startswith(CELL)]
        last = nbformat.v4.new_markdown_cell(text, id=f"{CELL}-{path.stem[:2]}")
        before = notebook.cells[-1]
        if len(others) == len(notebook.cells) - 1 and before == last:
            continue
        notebook.cells = [*others, last]
        write_text(path, notebook_text(notebook))
        changed.append(path.stem)
    return changed


if __name__ == "__main__":
    print("\n".join(write()) or "every notebook links its neighbours")
