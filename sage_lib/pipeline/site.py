"""The site: pages put together from what there is, and built by Sphinx without a network.

    make site          (or, with the extra "site" installed: sage-companion site)

Notebooks become pages from their stored outputs: nothing runs here.
"""

import argparse
import importlib.util
import posixpath
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

from PIL import Image

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile, published_specs
from sage_lib.files import read_json, write_json, write_text
from sage_lib.pipeline import notebooks, readme
from sage_lib.report import site_pages

DOCS = paths.ROOT / "docs"
#: A thumbnail's longer side, pixels: twice what it takes on a page.
THUMBNAIL = 480
#: The package that brings MathJax, and what of it a page loads.
MATHJAX = "sphinx-mathjax-offline"
MATHJAX_PARTS = ("tex-chtml.js", "output")
#: The pages written by hand, in the order in which the navigation has them; the library's own page
#: is beside its equations.
USE = (
    "running",
    "one_gpu",
    "profiles",
    "countdown_task",
    "own_code",
    "scaling",
    "reliability",
    "licences",
)
#: A badge: the picture comes from another host, and becomes its words.
_BADGE = re.compile(r"\[!\[([^\]]*)\]\(https?:[^)\s]+\)\]")
#: A picture or a page that a text names by its place in the repository.
_PICTURE = re.compile(r"(!\[[^\]]*\]\()(?!https?:)([^)#\s]+)(\))")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")
_CONTENTS = """
```{{toctree}}
:hidden:
:maxdepth: 1
:caption: {caption}

{pages}
```
"""
#: What the first page names of the site that the repository has not.
_ALONE = (
    "- Of this site alone: [gallery](gallery.md), every figure and the command that draws it; "
    "[equations](equations.md), from their number to function and test; [reported](reported.md), "
    "the tables of both papers; [fidelity](fidelity.md), setting by setting"
)
_MODULES = """
```{toctree}
:hidden:
:maxdepth: 3

api/sage_lib/index
```
"""


def on_site(text: str, folder: str = "") -> str:
    """A page of the repository as one of the site's: links lead to the site's own pages, pictures
    are found, and a link to any other file becomes the file's name.

    ``folder``: where in the repository the page lies.
    """

    def in_repository(place: str) -> PurePosixPath:
        return PurePosixPath(posixpath.normpath(posixpath.join(folder, place)))

    def picture(found: re.Match[str]) -> str:
        return f"{found[1]}/{in_repository(found[2])}{found[3]}"

    def link(found: re.Match[str]) -> str:
        words, (place, hash_, name) = found[1], found[2].partition("#")
        path = in_repository(place)
        if path.parts[0] == "docs" and path.suffix == ".md":
            page = path.name
        elif str(path) == "README.md":
            page = "index.md"
        elif path.parts[0] == "notebooks" and path.suffix == ".ipynb":
            page = str(path)
        elif path.parts[0] == "sage_lib":
            module = path.parent if path.name == "__init__.py" else path.with_suffix("")
            page = f"api/{module}/index"
        else:
            return f"{words} (`{path}`)" if str(path) not in words else words
        return f"[{words}]({page}{hash_}{name})"

    return _PICTURE.sub(picture, _LINK.sub(link, _BADGE.sub(r"[\1]", text)))


def home(readme: str) -> str:
    """The README as the site's first page, with the table of contents."""
    contents = {
        "Using it": list(USE),
        "Notebooks": [f"notebooks/{notebook.name}" for notebook in notebooks.found()],
        "Results": ["gallery", "reported", "fidelity"],
        "Code": ["equations", "api"],
    }
    tables = [
        _CONTENTS.format(caption=caption, pages="\n".join(names))
        for caption, names in contents.items()
    ]
    return on_site(readme).replace("## More\n\n", f"## More\n\n{_ALONE}\n", 1) + "".join(tables)


def library(text: str) -> str:
    """The page of the library, with the modules below it in the navigation."""
    return on_site(text, "docs") + _MODULES


def _drawn_by() -> dict[str, str]:
    """ "folder/figure" -> name of the notebook that draws it."""
    found = {}
    for notebook in notebooks.found():
        for spec in published_specs().values():
            profile = load_profile(spec, "published")
            for path in notebook.artefacts(profile):
                found[f"{path.parent.name}/{path.stem}"] = notebook.name
    return found


def assemble(source: Path) -> None:
    """Write the site's sources to a folder, from nothing."""
    if source.is_dir():
        shutil.rmtree(source)
    source.mkdir(parents=True)
    shutil.copytree(paths.NOTEBOOKS, source / "notebooks", ignore=shutil.ignore_patterns(".*"))
    for page in (source / "notebooks").glob("*.ipynb"):
        shown = notebooks.with_words(read_json(page))
        first = shown["cells"][0]
        first["source"] = _BADGE.sub(r"[\1]", "".join(first["source"]))
        for cell in shown["cells"]:
            if cell["cell_type"] == "markdown":  # the pages of docs lie at the top of the site
                cell["source"] = "".join(cell["source"]).replace("](../docs/", "](../")
        write_json(page, shown)
    shutil.copytree(paths.FIGURES, source / "figures", ignore=shutil.ignore_patterns("*.pdf"))
    profiles = [load_profile(spec, "published") for spec in published_specs().values()]
    [evidence] = [profile for profile in profiles if profile.name == readme.EVIDENCE]
    about = {notebook.name: notebook.about for notebook in notebooks.found()}
    names = {name[:2]: name for name in about}
    pages = {
        "index": home((paths.ROOT / "README.md").read_text()),
        **{name: on_site((DOCS / f"{name}.md").read_text(), "docs") for name in USE},
        "api": library((DOCS / "api.md").read_text()),
        "gallery": site_pages.gallery(_drawn_by(), about),
        "reported": site_pages.reported_tables(profiles, evidence, names),
        "fidelity": site_pages.fidelity(),
        "equations": site_pages.equation_map(),
    }
    for name, text in pages.items():
        write_text(source / f"{name}.md", text)


def _add_static(site: Path) -> None:
    """Figures, their thumbnails and MathJax, beside the pages."""
    static = site / "_static"
    for figure in sorted(paths.FIGURES.glob("*/*.png")):
        place = figure.relative_to(paths.FIGURES)
        for folder in ("figures", "thumbnails"):
            (static / folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(figure, static / "figures" / place)
        with Image.open(figure) as picture:
            picture.thumbnail((THUMBNAIL, THUMBNAIL))
            picture.convert("RGB").save(static / "thumbnails" / place, optimize=True)
    found = importlib.util.find_spec(MATHJAX)
    if found is None or found.origin is None:
        raise SageError(f"the site's formulas need {MATHJAX}: make site installs it")
    mathjax = Path(found.origin).parent / "static" / "mathjax"
    for part in MATHJAX_PARTS:
        copied = shutil.copytree if (mathjax / part).is_dir() else shutil.copy
        (static / "mathjax").mkdir(exist_ok=True)
        copied(mathjax / part, static / "mathjax" / part)


def build(warnings_are_errors: bool = True) -> Path:
    """Build the site; returns its folder. SageError where Sphinx is missing or fails."""
    if importlib.util.find_spec("sphinx") is None:
        raise SageError('the site needs the extra "site": make site installs it')
    source, site = paths.build("site-source"), paths.build("site")
    assemble(source)
    if site.is_dir():
        shutil.rmtree(site)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-c", str(DOCS)]
    command += ["-d", str(paths.build("site-doctrees"))]
    command += ["-W", "--keep-going"] if warnings_are_errors else []
    done = subprocess.run([*command, str(source), str(site)])
    if done.returncode:
        raise SageError("Sphinx could not build the site: see its messages above")
    _add_static(site)
    return site


def do(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    site = build()
    files = [path for path in site.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    pages = sum(path.suffix == ".html" for path in files)
    seconds = time.perf_counter() - started
    print(f"{site}: {pages} pages, {size:.0f} MB, {seconds:.0f} s; open index.html")
