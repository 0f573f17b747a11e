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

import links
import pandas as pd
import site_claims
import site_results

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import write_json, write_text
from sage_lib.report import reported

DOCS = paths.ROOT / "docs"
#: The package that brings MathJax, and what of it a page loads.
MATHJAX = "sphinx-mathjax-offline"
MATHJAX_PARTS = ("tex-chtml.js", "output")
#: The parts of the navigation, with pages that are not notebooks; other pages of docs end the last.
PARTS = {
    "Start": ["running", "own_code"],
    "Results": ["claims", "runs", "gallery", "reported"],
    "Notebooks": ["notebooks"],
    "Guides": [
        *("profiles", "countdown_task", "one_gpu", "gpu_settings", "scaling", "measure"),
        *("pass_at_k", "live_pass_at_k", "guide_gain", "which_kl", "pass_at_1_issue"),
    ],
    "Reference": ["glossary", "api", "equations", "data", "data_training", "data_tables"],
}
#: What ends the README's first screen; what the site shows below its words, and at its end.
FIRST_SCREEN = "<!-- first screen: end -->"
LIVE = """
## The optimum, live

Move beta and q. The bars are the policy that the objective wants, eq. 4: q · π_ref · exp(r/β).
rho is the mean q of right completions over that of wrong ones. At rho 1 a guide leaves the odds of
a right answer as they are.

```{raw} html
<div data-tilt><noscript>The picture needs JavaScript.</noscript></div>
<script src="_static/tilt.js"></script>
```

"""
READ_ON = """
## Read on

- [What came out, claim by claim](claims.md), with [notebook 11](notebooks/{verdict}.ipynb)
- [Every run](runs.md): its reward, entropy and KL, its pass@k, and your own run beside it
- [Ten figures](gallery.md)
- [Train a small model in minutes](notebooks/{sft}.ipynb)
- [pass@k of your counts, live](live_pass_at_k.md)
- [Use the trainer in your own code](own_code.md)
"""
#: What follows a page of docs on the site, where there are more pages than in docs.
READ_ALSO = {
    "own_code": "See what the trainer did here: [every claim](claims.md), [every run](runs.md) "
    "beside one of your own, and [ten figures](gallery.md).",
    "pass_at_k": "[A page](live_pass_at_k.md) draws the curve of counts that you paste.",
}
#: The same, at the end of the notebook of the verdict.
VERDICT_ALSO = (
    "See [every claim](../claims.md), [every run](../runs.md), [ten figures](../gallery.md)."
)
#: Tags of cells that are never folded.
SHOWN_TAGS = {"parameters", "equation", "trained", "fill-in"}
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

    def link(match: re.Match[str]) -> str:
        words, (target, hash_, part) = match[1], match[2].partition("#")
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

    with_pictures = _PICTURE.sub(lambda match: f"{match[1]}/{place_of(match[2])}{match[3]}", text)
    return _LINK.sub(link, _BADGE.sub(r"[\1]", with_pictures))


def home(readme: str) -> str:
    """The README's first screen with the live optimum below its words, links, and the table of
    contents: the site's first page."""
    screen, marker, _ = readme.partition(FIRST_SCREEN)
    if not marker:
        raise SageError(
            f"README.md has no line {FIRST_SCREEN}: put one where its first screen ends"
        )
    read_on = READ_ON.format(**{name: site_results.notebook(name) for name in ("verdict", "sft")})
    named = {page for pages in PARTS.values() for page in pages}
    others = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in named)
    contents = {caption: list(pages) for caption, pages in PARTS.items()}
    contents["Reference"] += others
    contents["Notebooks"] += [f"notebooks/{name}" for name in _notebooks("00", "00")]
    contents["Notebooks"] += [f"notebooks/{_slug(title)}" for _, _, title in links.PARTS]
    trees = [
        TOCTREE.format(depth=2, caption=caption, pages="\n".join(pages))
        for caption, pages in contents.items()
    ]
    words, fence, commands = on_site(screen).partition("```\n")
    words, _, heading = words.rstrip().rpartition("\n\n")  # the line above the commands
    first = f"{words}\n{LIVE}## Try it\n\n{heading}\n\n{fence}{commands}"
    return _IN_INTERVAL.sub("\N{NO-BREAK SPACE}", first) + read_on + "".join(trees)


def _notebooks(first: str, last: str) -> list[str]:
    """The names of the notebooks whose numbers lie between two."""
    names = sorted(path.stem for path in paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
    return [name for name in names if first <= name[:2] <= last]


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def part_pages() -> dict[str, str]:
    """A page for each part of the notebooks, by its name: it folds them in the navigation."""
    pages = {}
    for first, last, title in links.PARTS:
        ends = "99" if title == links.PARTS[-1][2] else last
        names = _notebooks(first, ends)
        listed = "\n".join(f"- {_about(name)}" for name in names)
        tree = TOCTREE.format(depth=1, caption=title, pages="\n".join(names))
        pages[_slug(title)] = f"# {title}\n\n{listed}\n{tree}"
    return pages


def _about(name: str) -> str:
    notebook = json.loads((paths.NOTEBOOKS / f"{name}.ipynb").read_text())
    about = notebook["metadata"].get("sage", {}).get("about", "")
    return f"[{_title(notebook)}]({name}.ipynb){about and ': '}{about}"


def _title(notebook: dict[str, Any]) -> str:
    return "".join(notebook["cells"][0]["source"]).partition("\n")[0].removeprefix("# ")


def notebook_page(notebook: dict[str, Any]) -> dict[str, Any]:
    """A stored notebook for MyST-NB: its links, folded cells, and the words of its pictures."""
    heading = _title(notebook)
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":  # pages of docs lie at the top of the site
            cell["source"] = _BADGE.sub(r"[\1]", text).replace("](../docs/", "](../")
            heading = (re.findall(r"^#+ (.+)$", text, re.MULTILINE) or [heading])[-1]
        else:
            tags = cell["metadata"].setdefault("tags", [])
            if is_folded(text, tags):
                tags.append("hide-input")
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                words = output["metadata"].get("image/png", {}).get("alt", f"Figure: {heading}")
                cell["metadata"]["mystnb"] = {"image": {"alt": words}}
    return notebook


def is_folded(source: str, tags: list[str]) -> bool:
    """Whether a page folds a cell: imports and loading, or a long one that draws a figure, or ends
    one."""
    if SHOWN_TAGS & {*tags} or "hide-input" in tags:
        return False
    lines = source.count("\n")
    if ("plt.subplot" in source and lines >= 12) or ("page.show(figure" in source and lines >= 7):
        return True
    return source.startswith(("import ", "from "))


def glossary(text: str) -> str:
    """The glossary's table as a directive, so that the search and links know the terms."""
    head, rows = text.split("| term | meaning |\n|---|---|\n")
    parts = [head, "```{glossary}\n"]
    for row in filter(None, rows.split("\n")):
        terms, meaning = (cell.strip() for cell in row.strip("|").split("|", 1))
        parts += [*(f"{term}\n" for term in terms.split(", ")), f"  {meaning.strip(' |')}\n\n"]
    return "".join([*parts, "```\n"])


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
    index: dict[tuple[str, int], list[str]] = defaultdict(list)
    for path in sorted((paths.ROOT / "sage_lib").rglob("*.py")):
        names = path.relative_to(paths.ROOT).with_suffix("").parts
        module = ".".join(name for name in names if name != "__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name = getattr(node, "name", "")
                link = f"[{module}{name and '.'}{name}](api/{module.replace('.', '/')}/index)"
                for equation in dict.fromkeys(equations(ast.get_docstring(node) or "")):
                    index[equation].append(link)
    rows = [f"| {paper} {n} | {', '.join(links)} |" for (paper, n), links in sorted(index.items())]
    table = "\n".join(["| equation | in the code |", "|---|---|", *rows])
    return f"# From equation to code\n\nRead from the docstrings.\n\n{table}\n"


def assemble(source: Path) -> None:
    """Write the site's sources to a folder, from nothing."""
    shutil.rmtree(source, ignore_errors=True)
    for path in sorted(paths.NOTEBOOKS.glob("*.ipynb")):
        page = notebook_page(json.loads(path.read_text()))
        if path.stem == site_results.notebook("verdict"):
            also = {"cell_type": "markdown", "id": "read-also", "metadata": {}}
            page["cells"].insert(-1, also | {"source": VERDICT_ALSO})
        write_json(source / "notebooks" / path.name, page)
    shutil.copytree(paths.FIGURES, source / "figures", ignore=shutil.ignore_patterns("*.pdf"))
    written = {path.stem: on_site(path.read_text(), "docs") for path in DOCS.glob("*.md")}
    written |= {name: f"{written[name]}\n{words}\n" for name, words in READ_ALSO.items()}
    api = TOCTREE.format(depth=3, caption="Modules", pages="api/sage_lib/index")
    pages = {
        **written,
        "index": home((paths.ROOT / "README.md").read_text()),
        "api": written["api"] + api,
        "glossary": glossary(written["glossary"]),
        **{f"notebooks/{name}": text for name, text in part_pages().items()},
        "claims": site_claims.claims_map(),
        "runs": site_results.RUNS_PAGE,
        "live_pass_at_k": site_results.LIVE_PAGE,
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
    # A page that is opened as a file may fetch nothing: the runs are JSON behind a name.
    runs = json.dumps(site_results.run_data(), separators=(",", ":"))
    write_text(site / "_static" / "runs_data.js", f"const RUNS = {runs};\n")


def main() -> None:
    site, made = paths.build("site"), paths.build("site-new")
    shutil.rmtree(made, ignore_errors=True)
    build(made)
    shutil.rmtree(site, ignore_errors=True)
    made.rename(site)
    print(f"open {site}/index.html")


if __name__ == "__main__":
    main()
