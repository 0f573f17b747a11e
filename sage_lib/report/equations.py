"""The equation map: equation -> functions -> tests, read from docstrings; nothing is imported.

A docstring names an equation by "Eq." or "eq." and its number, a range or a list of numbers: one of
the SAGE paper, and in a sentence that speaks of the exploration report one of the report.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sage_lib import paths

SAGE, REPORT = "SAGE", "exploration report"
_MENTION = re.compile(r"\b[Ee]q\. (\d+(?:(?:\s*-\s*|, (?:and )?| and )\d+(?!\d| [+·/=]|\.\d))*)")
_SENTENCE = re.compile(r"(?<=[.;:])\s+(?=[A-Z(])|\n\n")


@dataclass(frozen=True, order=True)
class Equation:
    """An equation of one of the two papers."""

    paper: str
    number: int


@dataclass(frozen=True)
class Place:
    """A module, a class or a function whose docstring names equations."""

    module: str  # sage_lib.theory.solutions
    name: str  # tilted, Tree.entropies; "" for the module itself
    line: int
    tests: tuple[str, ...] = field(default=(), compare=False)  # tests/test_theory.py::test_...

    @property
    def qualified(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def equations(docstring: str) -> set[Equation]:
    """The equations that a docstring names."""
    found = set()
    for sentence in _SENTENCE.split(docstring):
        paper = REPORT if "exploration report" in " ".join(sentence.split()) else SAGE
        for numbers in _MENTION.findall(sentence):
            for part in re.split(r", (?:and )?| and ", numbers):
                first, _, last = part.partition("-")
                found |= {Equation(paper, n) for n in range(int(first), int(last or first) + 1)}
    return found


def _documented(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Qualified name, line and docstring of a module's classes and functions, and its own ("")."""
    yield "", 1, ast.get_docstring(tree) or ""
    todo: list[tuple[str, ast.AST]] = [("", tree)]
    while todo:
        owner, node = todo.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                name = f"{owner}{child.name}"
                yield name, child.lineno, ast.get_docstring(child) or ""
                todo.append((f"{name}.", child))


def _tests(folder: Path) -> list[tuple[str, set[str], set[str]]]:
    """Of every test: its name, the modules of sage_lib that its file imports (a public name counts
    as ``sage_lib``), and the names that it and its file's helpers use."""
    found = []
    for path in sorted(folder.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        modules: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sage_lib"):
                modules |= {str(node.module), *(f"{node.module}.{a.name}" for a in node.names)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                used = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                used |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                found.append((f"{folder.name}/{path.name}::{node.name}", modules, used))
    return found


def equation_map(
    library: Path | None = None, tests: Path | None = None
) -> dict[Equation, list[Place]]:
    """Equation -> the places that name it, each with the tests that use it by its name.

    ``library``: the folder of the package sage_lib, ``tests``: that of its tests; those of the
    checkout without them. In the order of paper and number, then of modules.
    """
    library = library or paths.ROOT / "sage_lib"
    known = _tests(tests or paths.ROOT / "tests")
    found: dict[Equation, list[Place]] = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for name, line, docstring in _documented(ast.parse(path.read_text())):
            named = equations(docstring)
            if not named:
                continue
            used = tuple(
                test
                for test, modules, names in known
                if name
                and name.rpartition(".")[2] in names
                and (module in modules or f"sage_lib.{name.partition('.')[0]}" in modules)
            )
            for equation in named:
                found.setdefault(equation, []).append(Place(module, name, line, used))
    return dict(sorted(found.items()))
