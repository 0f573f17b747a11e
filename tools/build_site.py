"""Build the site into build/site: the README's first screen, docs, notebooks as they are stored,
the API, figures, claims, runs and reported tables. Needs the extra "site", and no network. A site
that cannot be built leaves the former one where it was.

    make site
"""

import ast
import importlib.util
import json
import posixpath
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd
import site_results

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import write_json, write_text
from sage_lib.report import reported

DOCS = paths.ROOT / "docs"
#: The package that brings MathJax, and what of it a page loads.
MATHJAX = "sphinx-mathjax-offline"
MATHJAX_PARTS = ("tex-chtml.js", "output")
#: The order of the pages of docs in the navigation; pages that are not named follow.
FIRST = [
    *("running", "notebooks", "profiles", "countdown_task", "one_gpu", "gpu_settings", "scaling"),
    *("own_code", "which_kl", "measure", "pass_at_k", "data", "data_training", "data_tables"),
]
#: What ends the README's first screen, and what follows it on the site's first page.
FIRST_SCREEN = "<!-- first screen: end -->"
READ_ON = """\
## Read on

- [What came out, claim by claim](notebooks/{verdict}.ipynb)
- [Every run: its reward, entropy and KL, and its pass@k](runs.md)
- [Train a small model in minutes](notebooks/{sft}.ipynb)
- [Use the trainer in your own code](own_code.md)
"""
#: A badge: its picture comes from another host, and becomes its words.
_BADGE = re.compile(r"\[!\[([^\]]*)\]\(https?:[^)\s]+\)\]")
_PICTURE = re.compile(r"(!\[[^\]]*\]\()(?!https?:)([^)#\s]+)(\))")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")
#: Blanks of a number with its interval, "+0.1 [+0.0, +0.2]", at which no line may end.
_IN_INTERVAL = re.compile(r"(?<=\d) (?=\[[-+]\d)|(?<=\d,) (?=[-+][\d.]+\])")
_EQUATION = re.compile(r"\beq\. (\d+(?:(?:-|, (?:and )?| and )\d+)*)", re.IGNORECASE)
TOCTREE = "\n```{{toctree}}\n:hidden:\n:maxdepth: {depth}\n:caption: {caption}\n\n{pages}\n```\n"


def on_site(text: str, folder: str = "") -> str:
    """A page of the repository, which lies in `folder` there, as one of the site's.

    Links lead to the site's own pages; a link to any other file becomes the file's name.
    """

    def place_of(link: str) -> PurePosixPath:
        return PurePosixPath(posixpath.normpath(posixpath.join(folder, link)))

    def link(found: re.Match[str]) -> str:
        words, (target, hash_, part) = found[1], found[2].partition("#")
        path = place_of(target)
        if path.parts[0] == "docs" and path.suffix == ".md":
            page = path.name
        elif str(path) == "README.md":
            page = "index.md"
        elif path.suffix == ".ipynb":
            page = str(path)
        elif path.parts[0] == "sage_lib":
            module = path.parent if path.name == "__init__.py" else path.with_suffix("")
            page = f"api/{module}/index"
        else:
            return words if str(path) in words else f"{words} (`{path}`)"
        return f"[{words}]({page}{hash_}{part})"

    with_pictures = _PICTURE.sub(lambda found: f"{found[1]}/{place_of(found[2])}{found[3]}", text)
    return _LINK.sub(link, _BADGE.sub(r"[\1]", with_pictures))


def home(readme: str) -> str:
    """The README's first screen, four links, and the table of contents: the site's first page."""
    screen, marker, _ = readme.partition(FIRST_SCREEN)
    if not marker:
        raise SageError(
            f"README.md has no line {FIRST_SCREEN}: put one where its first screen ends"
        )
    read_on = READ_ON.format(**{name: site_results.notebook(name) for name in ("verdict", "sft")})
    written = sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "api")
    contents = {
        "Using it": [*FIRST, *(name for name in written if name not in FIRST)],
        "Notebooks": [f"notebooks/{path.stem}" for path in sorted(paths.NOTEBOOKS.glob("*.ipynb"))],
        "Results": ["claims", "runs", "gallery", "reported"],
        "Code": ["equations", "api"],
    }
    trees = [
        TOCTREE.format(depth=1, caption=caption, pages="\n".join(pages))
        for caption, pages in contents.items()
    ]
    return _IN_INTERVAL.sub("\N{NO-BREAK SPACE}", on_site(screen)) + read_on + "".join(trees)


def notebook_page(notebook: dict[str, Any]) -> dict[str, Any]:
    """A stored notebook for MyST-NB: its links, and the words of its pictures."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":  # pages of docs lie at the top of the site
            cell["source"] = _BADGE.sub(r"[\1]", text).replace("](../docs/", "](../")
        for output in cell.get("outputs", []):
            if words := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell["metadata"]["mystnb"] = {"image": {"alt": words}}
    return notebook


def reported_page() -> str:
    """Every figure and table of the two papers, setting by setting, and the tables as printed."""
    parts = ["# What the papers report\n", _html(reported.items())]
    parts += ["## Settings: paper, the authors' code, and here\n", _html(reported.fidelity())]
    for name in reported.tables():
        frame = reported.as_printed(name)
        frame["cell"] = frame["mean"] + frame["std"].map(lambda std: f" ± {std}" if std else "")
        wide = frame.pivot(index="row", columns=["dataset", "metric"], values="cell").fillna("")
        parts += [f"## {name}\n", _html(wide.loc[frame["row"].unique()].reset_index())]
    return "\n".join(parts)


def _html(frame: pd.DataFrame) -> str:
    return f'<div class="wide">{frame.to_html(index=False)}</div>\n'


def equations(docstring: str) -> Iterator[tuple[str, int]]:
    """(paper, number) of every equation that a docstring names: "eq. 4", "Eq. 19-21", "eq. 3, 6".

    A sentence that speaks of the exploration report names the report's, any other SAGE's.
    """
    for sentence in re.split(r"(?<=[.;:])\s+(?=[A-Z(])|\n\n", docstring):
        report = "exploration report" in " ".join(sentence.split())
        for numbers in _EQUATION.findall(sentence):
            for part in re.split(r", (?:and )?| and ", numbers):
                first, _, last = part.partition("-")
                for number in range(int(first), int(last or first) + 1):
                    yield ("exploration report" if report else "SAGE"), number


def equation_page() -> str:
    """Equation -> the modules, classes and functions whose docstrings name it."""
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for path in sorted((paths.ROOT / "sage_lib").rglob("*.py")):
        place = path.relative_to(paths.ROOT).with_suffix("")
        module = ".".join(part for part in place.parts if part != "__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name = getattr(node, "name", "")
                link = f"[{module}{name and '.'}{name}](api/{module.replace('.', '/')}/index)"
                for equation in dict.fromkeys(equations(ast.get_docstring(node) or "")):
                    found[equation].append(link)
    rows = [f"| {paper} {n} | {', '.join(links)} |" for (paper, n), links in sorted(found.items())]
    table = "\n".join(["| equation | in the code |", "|---|---|", *rows])
    return f"# From equation to code\n\nRead from the docstrings.\n\n{table}\n"


def assemble(source: Path) -> None:
    """Write the site's sources to a folder, from nothing."""
    shutil.rmtree(source, ignore_errors=True)
    for path in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        page = notebook_page(json.loads(path.read_text()))
        write_json(source / "notebooks" / path.name, page)
    shutil.copytree(paths.FIGURES, source / "figures", ignore=shutil.ignore_patterns("*.pdf"))
    written = {path.stem: on_site(path.read_text(), "docs") for path in DOCS.glob("*.md")}
    api = TOCTREE.format(depth=3, caption="Modules", pages="api/sage_lib/index")
    pages = {
        **written,
        "index": home((paths.ROOT / "README.md").read_text()),
        "api": written["api"] + api,
        "claims": site_results.claims_map(),
        "runs": site_results.RUNS_PAGE,
        "gallery": site_results.gallery(),
        "reported": reported_page(),
        "equations": equation_page(),
    }
    for name, text in pages.items():
        write_text(source / f"{name}.md", text)


def build(site: Path) -> None:
    """Build the whole site into an empty or new folder; SystemExit where it cannot be built."""
    mathjax = importlib.util.find_spec(MATHJAX)
    if importlib.util.find_spec("sphinx") is None or mathjax is None or mathjax.origin is None:
        sys.exit('the site needs the extra "site": make site installs it')
    source = paths.build("site-source")
    assemble(source)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going"]
    command += ["-c", str(DOCS), "-d", str(paths.build("site-doctrees")), str(source), str(site)]
    if subprocess.run(command).returncode:
        sys.exit("Sphinx could not build the site: see its messages above")
    for part in MATHJAX_PARTS:
        have = Path(mathjax.origin).parent / "static" / "mathjax" / part
        target = site / "_static" / "mathjax" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if have.is_dir() else shutil.copy)(have, target)
    write_text(site / "_static" / "runs_data.js", site_results.run_script())


def main() -> None:
    site, made = paths.build("site"), paths.build("site-new")
    shutil.rmtree(made, ignore_errors=True)
    build(made)
    shutil.rmtree(site, ignore_errors=True)
    made.rename(site)
    print(f"open {site}/index.html")


if __name__ == "__main__":
    main()
