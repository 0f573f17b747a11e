"""Notebooks opened elsewhere: badges, and a cell that sets Colab up.

    tools/address https://github.com/OWNER/NAME     sets the public address, from which all follows
    python -m sage_lib.pipeline.online              writes what follows anew (make format does)

The address stands in one place, ``repository-code`` of CITATION.cff. While that file has none, the
badges and the cell are left out. Notebooks are written in the form that git has.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import notebook_text, read_json, write_text

CITATION = paths.ROOT / "CITATION.cff"
README = paths.ROOT / "README.md"
#: The branch that badges open.
BRANCH = "main"
COLAB = "https://colab.research.google.com"
BINDER = "https://mybinder.org"
#: The tag of the cell that sets Colab up, and how its id begins. The site leaves the cell out.
TAG = "colab"
_GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git)?/?")
#: The line of CITATION.cff; that of the paper's own repository is indented.
_LINE = re.compile(r"^repository-code:.*\n", re.MULTILINE)
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
    return None if given is None else _owner_and_name(str(given))


def _owner_and_name(address: str) -> str:
    found = _GITHUB.fullmatch(address)
    if found is None:
        raise SageError(
            f"{address!r} is no public address that Colab and Binder can open: give tools/address "
            "one of the form https://github.com/OWNER/NAME"
        )
    return found[1]


def set_address(address: str) -> None:
    """Write the public address into CITATION.cff; SageError for one that is none of GitHub's."""
    line = f'repository-code: "https://github.com/{_owner_and_name(address)}"\n'
    text = _LINE.sub("", CITATION.read_text())
    write_text(CITATION, text.replace("\nauthors:", f"\n{line}authors:", 1))


def filled(text: str, made: Mapping[str, str], page: Path) -> str:
    """The text of a page with its generated parts. SageError where a part's lines are missing."""
    for name, part in made.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SageError(
                f"{page.name} lacks the lines {begin} and {end} around a generated part"
            )
        before, after = text.split(begin)[0], text.split(end)[1]
        inside = f"{part}\n" if part else ""
        text = f"{before}{begin}\n{inside}{end}{after}"
    return text


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
    """Bring the badges of the README, and links and form of every notebook, up to date; returns the
    names of the files that changed."""
    files = sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
    made = {path: notebook_text(with_links(read_json(path), path.stem)) for path in files}
    made[README] = filled(README.read_text(), {"badges": badges(files[0].stem)}, README)
    changed = [path for path, text in made.items() if text != path.read_text()]
    for path in changed:
        write_text(path, made[path])
    return [path.name for path in changed]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=write.__doc__)
    parser.add_argument("address", nargs="?", help="https://github.com/OWNER/NAME")
    given = parser.parse_args().address
    try:
        if given is not None:
            set_address(given)
        print("\n".join(write()) or "every link is as it should be")
    except SageError as error:
        sys.exit(str(error))
