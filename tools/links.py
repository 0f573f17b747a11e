"""Links of the notebooks: to their parts and neighbours, and once there is a public address to
Colab and Binder.

    python tools/links.py                                  write them anew (make format does)
    python tools/links.py https://github.com/OWNER/NAME    set the public address first

The address stands in CITATION.cff, as `repository-code`; without one there are no badges. Notebooks
are written in the form that git has.
"""

import argparse
import json
import re
import sys
from typing import Any

from sage_lib import paths
from sage_lib.files import notebook_text, write_text

CITATION = paths.ROOT / "CITATION.cff"
README = paths.ROOT / "README.md"
#: The parts of the companion: first and last number of their notebooks, and the title.
PARTS = [
    ("01", "03", "Theory"),
    ("04", "07", "Walkthrough"),
    ("08", "11", "The paper"),
    ("12", "14", "Why"),
    ("15", "16", "Exploration report"),
    ("17", "19", "Further"),
]
COLAB, BINDER = "https://colab.research.google.com", "https://mybinder.org"
_ADDRESS = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(\.git)?/?")
#: The line of CITATION.cff; that of the paper's own repository is indented.
_LINE = re.compile(r"^repository-code: \"?([^\s\"]+)\"?\n", re.MULTILINE)
_BADGES = re.compile(r"\n\n\[!\[Open in Colab\].*")
_ROAD = re.compile(r"\n\nParts?: .*")
_PART = re.compile(r"(<!-- badges: begin -->\n).*?(<!-- badges: end -->)", re.DOTALL)
#: What Colab runs before the first import; anywhere else it does nothing.
SETUP = """\
import os
import subprocess
import sys

if "COLAB_RELEASE_TAG" in os.environ:  # it has neither the library nor the published results
    if not os.path.isdir("{name}"):
        address = "https://github.com/{owner}/{name}"
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", address], check=True)
        subprocess.run(["bash", "{name}/tools/setup.sh", "gpu"], check=True)
    sys.path.insert(0, os.path.abspath("{name}"))"""


def repository() -> str | None:
    """OWNER/NAME of the public repository that CITATION.cff names, or None."""
    line = _LINE.search(CITATION.read_text())
    return owner_and_name(line[1]) if line else None


def owner_and_name(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        sys.exit(f"{address!r} is no address that Colab opens: https://github.com/OWNER/NAME is")
    return match[1]


def with_address(citation: str, address: str) -> str:
    """The text of CITATION.cff with a public address."""
    line = f'repository-code: "https://github.com/{owner_and_name(address)}"\n'
    return _LINE.sub("", citation).replace("\nauthors:", f"\n{line}authors:", 1)


def badges(address: str, name: str) -> str:
    """Links in Markdown that open a notebook on Colab and Binder."""
    colab = f"{COLAB}/github/{address}/blob/main/notebooks/{name}.ipynb"
    binder = f"{BINDER}/v2/gh/{address}/main?labpath=notebooks/{name}.ipynb"
    return (
        f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Binder]({BINDER}/badge_logo.svg)]({binder})"
    )


def road(name: str, names: list[str]) -> str:
    """The line below a notebook's title: its part, with a link to the list of all in the first
    notebook, which has links to the parts instead."""
    firsts = {other[:2]: other for other in names}
    for first, last, title in PARTS:
        if first <= name[:2] <= last:
            return f"Part: [{title}]({names[0]}.ipynb)"
    links = [
        f"[{title}]({firsts[first]}.ipynb)" if first in firsts else title
        for first, _, title in PARTS
    ]
    return f"Parts: {', '.join(links)}"


def footer(name: str, names: list[str]) -> str:
    """The last cell of a notebook: links to those before and after it."""
    number = names.index(name)
    around = {"Previous": names[:number][-1:], "Next": names[number + 1 :][:1]}
    links = [f"[{word}]({other}.ipynb)" for word, others in around.items() for other in others]
    return "---\n" + " · ".join(links)


def with_links(
    notebook: dict[str, Any], name: str, names: list[str], address: str | None
) -> dict[str, Any]:
    """A notebook (as JSON has it) with the line of its part, its badges, its set-up for Colab and
    its last cell."""
    ids = (f"links-{name[:2]}", f"colab-{name[:2]}")
    first, *cells = [cell for cell in notebook["cells"] if cell["id"] not in ids]
    plain = _ROAD.sub("", _BADGES.sub("", "".join(first["source"])))
    heading, *rest = plain.split("\n", 1)
    lines = [f"\n{road(name, names)}"]
    lines += [f"\n{badges(address, name)}"] if address else []
    cells = [{**first, "source": "\n".join([heading, *lines, *rest])}, *cells]
    if address:
        owner, _, repository_name = address.partition("/")
        setup: dict[str, Any] = {
            "cell_type": "code",
            "execution_count": None,
            "id": ids[1],
            "metadata": {"tags": ["colab", "remove-cell"]},
            "outputs": [],
            "source": SETUP.format(owner=owner, name=repository_name),
        }
        first_code = next(i for i, cell in enumerate(cells) if cell["cell_type"] == "code")
        cells.insert(first_code + 1, setup)  # below the parameters
    last = {"cell_type": "markdown", "id": ids[0], "metadata": {}, "source": footer(name, names)}
    return {**notebook, "cells": [*cells, last]}


def write() -> None:
    """Write the links of every notebook and the badges of the README."""
    address = repository()
    files = sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
    names = [path.stem for path in files]
    for path in files:
        text = notebook_text(with_links(json.loads(path.read_text()), path.stem, names, address))
        if text != path.read_text():
            print(write_text(path, text).name)
    line = f"{badges(address, names[0])}\n" if address else ""
    write_text(README, _PART.sub(lambda match: f"{match[1]}{line}{match[2]}", README.read_text()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write the links of the notebooks")
    parser.add_argument("address", nargs="?", help="https://github.com/OWNER/NAME")
    address = parser.parse_args().address
    if address:
        write_text(CITATION, with_address(CITATION.read_text(), address))
    write()
