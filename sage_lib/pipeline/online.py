"""Notebooks opened elsewhere: badges, and a cell that sets Colab up.

    python -m sage_lib.pipeline.online       writes them into the notebooks anew, and brings the
                                             files into the form that git has (make format does)

Both need the repository's public address, ``repository-code`` of CITATION.cff, and are left out
while that file has none.
"""

import re
from typing import Any

from ruamel.yaml import YAML

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import notebook_text, read_json, write_text

CITATION = paths.ROOT / "CITATION.cff"
#: The branch that badges open.
BRANCH = "main"
COLAB = "https://colab.research.google.com"
BINDER = "https://mybinder.org"
#: The tag of the cell that sets Colab up, and how its id begins. The site leaves the cell out.
TAG = "colab"
_GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git)?/?")
_BADGES = re.compile(r"\n\n\[!\[Open in Colab\].*")
#: What Colab runs before the first import; anywhere else it does nothing.
_SETUP = """\
import os
import subprocess
import sys

if "COLAB_RELEASE_TAG" in os.environ:  # it has neither the library nor the published results
    if not os.path.isdir("{name}"):
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", "{address}"], check=True)
        subprocess.run(["bash", "{name}/tools/setup.sh", "gpu"], check=True)
    sys.path.insert(0, os.path.abspath("{name}"))"""


def repository() -> str | None:
    """The owner/name of the companion's public repository; None while CITATION.cff names none.

    Raises SageError for an address that is none of GitHub's, which the badges could not open.
    """
    given: Any = YAML(typ="safe").load(CITATION.read_text()).get("repository-code")
    if given is None:
        return None
    found = _GITHUB.fullmatch(str(given))
    if found is None:
        raise SageError(
            f"CITATION.cff: repository-code is {given!r}: Colab and Binder open what stands at "
            "https://github.com/OWNER/NAME"
        )
    return found[1]


def badges(notebook: str) -> str:
    """Links in Markdown that open a notebook, given by its name, on Colab and Binder; "" without
    a public address."""
    where = repository()
    if where is None:
        return ""
    place = f"notebooks/{notebook}.ipynb"
    colab = f"{COLAB}/github/{where}/blob/{BRANCH}/{place}"
    binder = f"{BINDER}/v2/gh/{where}/{BRANCH}?labpath={place}"
    return (
        f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Binder]({BINDER}/badge_logo.svg)]({binder})"
    )


def with_links(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """A notebook (as JSON has it) with its badges below its heading, and before the first cell that
    imports the one that sets Colab up; without a public address with neither."""
    shown, where = badges(name), repository()
    cells = [cell for cell in notebook["cells"] if TAG not in cell["metadata"].get("tags", [])]
    first = cells[0]
    heading, *rest = _BADGES.sub("", "".join(first["source"])).split("\n", 1)
    text = "\n".join([heading, *([f"\n{shown}"] if shown else []), *rest])
    cells[0] = {**first, "source": text.splitlines(keepends=True)}
    if where is not None:
        source = _SETUP.format(name=where.split("/")[1], address=f"https://github.com/{where}")
        setup = {
            "cell_type": "code",
            "execution_count": None,
            "id": f"{TAG}-{name[:2]}",
            "metadata": {"tags": [TAG, "remove-cell"]},
            "outputs": [],
            "source": source.splitlines(keepends=True),
        }
        place = next(i for i, cell in enumerate(cells) if cell["cell_type"] == "code")
        cells.insert(place + 1, setup)  # below the parameters, which are the first code cell
    return {**notebook, "cells": cells}


def write() -> list[str]:
    """Bring the links and the form of every notebook up to date; returns the names of those that
    changed."""
    changed = []
    for path in sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb")):
        text = notebook_text(with_links(read_json(path), path.stem))
        if text != path.read_text():
            write_text(path, text)
            changed.append(path.stem)
    return changed


if __name__ == "__main__":
    print("\n".join(write()) or "every notebook has its links")
