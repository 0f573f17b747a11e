"""The notebooks, as they say of themselves: what each is about and what it makes.

A notebook's own metadata holds it, under "sage": "about" (a line), "figures" and "measured" (what
it leaves in figures/<profile> and data/measured/<profile>), and optionally "theme" (figures that
depend on no profile lie in figures/<theme>) and, by the name of a task, what it makes only where a
profile evaluates that task. "training_{family}" stands for a figure of every family of methods.

    python -m sage_lib.pipeline.notebooks       writes the README's table anew
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile
from sage_lib.files import write_text
from sage_lib.report.measured import families

#: Where the README's table of notebooks begins and ends.
BEGIN, END = "<!-- notebooks: begin -->", "<!-- notebooks: end -->"


@dataclass(frozen=True)
class Makes:
    """Names of figures, and of measured files with their endings."""

    figures: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()


@dataclass(frozen=True)
class Notebook:
    """One notebook: its file, its line, and what it makes, always and by task."""

    path: Path
    about: str
    makes: Makes
    theme: str | None = None
    by_task: Mapping[str, Makes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        return self.name[:2]

    def made(self, profile: Profile) -> Makes:
        """What it makes for this profile."""
        parts = [self.makes, *(m for task, m in self.by_task.items() if task in profile.tasks)]
        names = [name for part in parts for name in part.figures]
        figures = [
            name.format(family=family)
            for name in names
            for family in (families(profile) if "{family}" in name else [""])
        ]
        return Makes(tuple(figures), tuple(name for part in parts for name in part.measured))

    def artefacts(self, profile: Profile) -> list[Path]:
        """The files that must be there after it ran for this profile."""
        made, folder = self.made(profile), paths.figures(self.theme or profile.name)
        figures = [folder / f"{name}{end}" for name in made.figures for end in (".pdf", ".png")]
        return [*figures, *(paths.measured(profile.name) / name for name in made.measured)]


def found(folder: Path | None = None) -> list[Notebook]:
    """Every notebook of a folder (the project's own without one), in the order in which they run.

    Raises SageError for a notebook that does not say what it is about.
    """
    return [read(path) for path in sorted((folder or paths.NOTEBOOKS).glob("[0-9]*.ipynb"))]


def read(path: Path) -> Notebook:
    """One notebook from its metadata; SageError where it says nothing, or what nobody knows."""
    given = dict(nbformat.read(path, as_version=4).metadata.get("sage", {}))
    if not given.get("about"):
        raise SageError(
            f'notebook {path.stem} does not say what it is about: give its metadata "sage" an '
            '"about", "figures" and "measured"'
        )
    about, theme = given.pop("about"), given.pop("theme", None)
    makes = _makes(given, path)
    by_task = {task: _makes(dict(part), path, rest=False) for task, part in given.items()}
    return Notebook(path, about, makes, theme, by_task)


def _makes(given: dict[str, Any], path: Path, rest: bool = True) -> Makes:
    figures, measured = given.pop("figures", ()), given.pop("measured", ())
    unknown = [key for key, value in given.items() if not (rest and isinstance(value, Mapping))]
    if unknown:
        raise SageError(
            f'notebook {path.stem}: its metadata "sage" has an unknown key {unknown[0]!r}'
        )
    return Makes(tuple(figures), tuple(measured))


def parameters(path: Path) -> set[str]:
    """Names assigned in the cell tagged ``parameters``, which must be the first code cell."""
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    if not code or "parameters" not in code[0].metadata.get("tags", []):
        raise SageError(f"notebook {path.stem}: its first code cell must carry the tag parameters")
    assigned = [node for node in ast.parse(code[0].source).body if isinstance(node, ast.Assign)]
    targets = [target for node in assigned for target in node.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def readme_table() -> str:
    """The table of notebooks as the README has it, in Markdown."""
    lines = ["| notebook | story | makes |", "|---|---|---|"]
    for notebook in found():
        parts = [notebook.makes, *notebook.by_task.values()]
        made = [name for part in parts for name in (*part.figures, *part.measured)]
        shown = ", ".join(name.replace("_{family}", "_*") for name in made)
        lines.append(f"| {notebook.name} | {notebook.about} | {shown} |")
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """A README's text with the table as it should be."""
    if BEGIN not in readme or END not in readme:
        raise SageError(
            f"README.md lacks the lines {BEGIN} and {END} around its table of notebooks"
        )
    before, after = readme.split(BEGIN)[0], readme.split(END)[1]
    return f"{before}{BEGIN}\n{readme_table()}\n{END}{after}"


if __name__ == "__main__":
    file = paths.ROOT / "README.md"
    write_text(file, with_table(file.read_text()))
