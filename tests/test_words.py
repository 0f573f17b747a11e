"""Names are nouns: participles and pronouns are no variables, parameters, functions or keys."""

import ast

import nbformat
import pytest

from sage_lib.paths import NOTEBOOKS, ROOT

WORDS = {
    "found",
    "one",
    "own",
    "chosen",
    "given",
    "asked",
    "kept",
    "told",
    "every",
    "beside",
    "like",
}
#: Arguments that users type, keys of profiles, and columns of published tables.
PUBLIC = {"results.py": {"own"}, "settings.py": {"beside", "every"}, "made_from.py": {"every"}}
PUBLIC |= {"compare.py": {"own"}, "publish.py": {"own"}, "guide_gain.py": {"asked", "found"}}
PUBLIC |= {"page.py": {"own"}, "exploration.py": {"kept"}}
ROOMS = ("", *(f.name for f in (ROOT / "sage_lib").iterdir() if (f / "__init__.py").is_file()))
FILES = [path for room in ROOMS for path in sorted((ROOT / "sage_lib" / room).glob("*.py"))]
FILES += [*sorted((ROOT / "tools").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]


def names(source):
    """The names that a module gives, with the keys of its dictionaries."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_name_is_a_participle_or_a_pronoun(path):
    assert WORDS & {*names(path.read_text())} <= PUBLIC.get(path.name, set())


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_name_of_a_notebook_is_a_participle_or_a_pronoun(path):
    words = WORDS | {"apart", "moved", "of", "printed", "said", "shown", "theirs"}
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    tree = ast.parse("\n".join(cell.source for cell in cells))
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.arg))
    assert words & {node.id if isinstance(node, ast.Name) else node.arg for node in stored} == set()


def test_every_kind_of_name_is_read():
    source = "def one(own, *, told=1):\n    found = {'kept': 1}\n"
    source += "    self.like = f(given=[0 for asked in x])"
    assert {*names(source)} >= {"one", "own", "told", "found", "kept", "like", "given", "asked"}
