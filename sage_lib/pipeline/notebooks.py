"""The notebooks, as they say of themselves: what each is about and what it makes.

A notebook's own metadata holds it, under "sage": "about" (a line), "figures" and "measured" (what
it leaves in the folders that paths.figures and paths.measured name; "training_{family}" stands for
a figure of every family of methods), and where there is need "theory" (with figures that depend on
no profile), by the name of a task what it makes only where a profile evaluates that task, and
"needs" (names of :data:`NEEDS`: a profile without it leaves the notebook out) and "after" (numbers
of the notebooks whose work it reads).
"""

import ast
import base64
import copy
import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile
from sage_lib.report.front_tables import front_methods
from sage_lib.report.measured import families
from sage_lib.tasks.table import TASKS

#: What a notebook may need of a profile, and how to tell that it is there.
NEEDS: dict[str, Callable[[Profile], bool]] = {
    "rl": lambda profile: bool(profile.rl) and profile.rl_data is not None,
    "exploration": lambda profile: profile.exploration.seeds > 0,
    "ood": lambda profile: any(data.ood for data in profile.evaluation.data),
    "front": lambda profile: "countdown" in profile.tasks and len(front_methods(profile)) > 1,
}
#: A picture that is wider is one of two columns, pixels.
WIDE = 700
#: The part of the metadata whose figures are drawn once, in figures/theory.
THEORY = "theory"


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
    by_part: Mapping[str, Makes] = field(default_factory=dict)  # a task, or theory
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        return self.name[:2]

    def made(self, profile: Profile) -> Makes:
        """What it makes for this profile, the figures of theory apart."""
        of_tasks = [makes for part, makes in self.by_part.items() if part in profile.tasks]
        parts = [self.makes, *of_tasks]
        names = [name for part in parts for name in part.figures]
        figures = [
            name.format(family=family)
            for name in names
            for family in (families(profile) if "{family}" in name else [""])
        ]
        return Makes(tuple(figures), tuple(name for part in parts for name in part.measured))

    def artefacts(self, profile: Profile) -> list[Path]:
        """The files that must be there after it ran for this profile."""
        made, theory = self.made(profile), self.by_part.get(THEORY, Makes())
        published = profile.published
        drawn = [paths.figures(profile.name, published) / name for name in made.figures]
        drawn += [paths.figures(THEORY, published) / name for name in theory.figures]
        figures = [
            path.with_name(f"{path.name}{end}") for path in drawn for end in (".pdf", ".png")
        ]
        measured = paths.measured(profile.name, published)
        return [*figures, *(measured / name for name in made.measured)]

    def lacks(self, profile: Profile) -> str | None:
        """What the notebook needs and this profile does not have; None where it has all."""
        return next((need for need in self.needs if not NEEDS[need](profile)), None)


def found(folder: Path | None = None) -> list[Notebook]:
    """Every notebook of a folder (the project's own without one), in the order in which they run.

    Raises SageError for a notebook that does not say what it is about.
    """
    return [read(path) for path in sorted((folder or paths.NOTEBOOKS).glob("[0-9]*.ipynb"))]


def read(path: Path) -> Notebook:
    """One notebook from its metadata; SageError where it says nothing, or what nobody knows."""
    import nbformat  # late: it takes seconds, and most commands read no notebook

    given = dict(nbformat.read(path, as_version=4).metadata.get("sage", {}))
    if not given.get("about"):
        raise SageError(
            f'notebook {path.stem} does not say what it is about: give its metadata "sage" an '
            '"about", "figures" and "measured"'
        )
    about, needs = given.pop("about"), tuple(given.pop("needs", ()))
    after = tuple(given.pop("after", ()))
    parts = {key: given.pop(key) for key in [THEORY, *TASKS] if key in given}
    by_part = {part: _makes(dict(makes), path) for part, makes in parts.items()}
    unknown = sorted(set(needs) - set(NEEDS))
    if unknown:
        known = ", ".join(NEEDS)
        raise SageError(f"notebook {path.stem} needs {unknown[0]!r}: what there is, is {known}")
    return Notebook(path, about, _makes(given, path), by_part, needs, after)


def _makes(given: dict[str, Any], path: Path) -> Makes:
    figures, measured = given.pop("figures", ()), given.pop("measured", ())
    unknown = list(given)
    if unknown:
        raise SageError(
            f'notebook {path.stem}: its metadata "sage" has an unknown key {unknown[0]!r}'
        )
    return Makes(tuple(figures), tuple(measured))


def parameters(path: Path) -> set[str]:
    """Names assigned in the cell tagged ``parameters``, which must be the first code cell."""
    import nbformat

    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    if not code or "parameters" not in code[0].metadata.get("tags", []):
        raise SageError(f"notebook {path.stem}: its first code cell must carry the tag parameters")
    assigned = [node for node in ast.parse(code[0].source).body if isinstance(node, ast.Assign)]
    targets = [target for node in assigned for target in node.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def title(path: Path) -> str:
    """A notebook's heading without its number; SageError where its first cell has none."""
    import nbformat

    first = nbformat.read(path, as_version=4).cells[0]
    found = re.match(rf"# {path.stem[:2]} (.+)", first.source)
    if first.cell_type != "markdown" or found is None:
        raise SageError(
            f"notebook {path.stem}: its first cell must begin with the heading "
            f'"# {path.stem[:2]} ..."'
        )
    return found[1].strip()


def stages(path: Path) -> tuple[str, ...]:
    """The stages that a notebook asks for: the names in its calls of ``stages.run``, in order."""
    import nbformat

    cells = nbformat.read(path, as_version=4).cells
    code = [ast.parse(cell.source) for cell in cells if cell.cell_type == "code"]
    calls = [
        node
        for tree in code
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "stages.run"
    ]
    given = [one.value for call in calls for one in call.args if isinstance(one, ast.Constant)]
    return tuple(dict.fromkeys(name for name in given if isinstance(name, str)))


def with_words(notebook: dict[str, Any]) -> dict[str, Any]:
    """An executed notebook (as JSON has it) for a page: each picture that has words in its metadata
    as HTML with that alt text, which the templates of nbconvert and MyST-NB leave out. A picture of
    a page's full width has the class "wide-figure" and the words below it, hidden: a narrow screen,
    which cannot show all of it, shows them instead of its cut title and caption."""
    shown = copy.deepcopy(notebook)
    for cell in shown["cells"]:
        for output in cell.get("outputs", []):
            words = output.get("metadata", {}).get("image/png", {}).get("alt")
            if words and "image/png" in output["data"]:
                picture = "".join(output["data"]["image/png"]).replace("\n", "")
                source = f"data:image/png;base64,{picture}"
                width = int.from_bytes(base64.b64decode(picture[:32])[16:20])  # a PNG's header
                text = html.escape(words)
                element = f'<img alt="{text}" src="{source}">'
                if width > WIDE:
                    below = f'<figcaption aria-hidden="true" hidden>{text}</figcaption>'
                    element = f'<figure class="wide-figure"><div>{element}</div>{below}</figure>'
                output["data"] = {"text/html": element}
    return shown
