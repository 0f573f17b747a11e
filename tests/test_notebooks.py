"""The notebooks as a text: their order, their equations in code, and their exercises' answers."""

import ast
import re

import nbformat
import pytest

from sage_lib import paths
from sage_lib.pipeline import outputs
from sage_lib.report import links

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
#: The map: notebook 02 computes what its formula says.
WITHOUT_EQUATION = {"00_start_here"}
ANSWER = re.compile(
    r"<details><summary>Answer</summary>\n\n```python\n(?P<code>.+?)```\n\n"
    r"```text\n(?P<printed>.*?)```\n\n(?P<why>.+?)\n\n</details>",
    re.DOTALL,
)

every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == kind]


def of_tag(path, tag):
    return [c.source for c in cells(path, "code") if tag in c.metadata.get("tags", [])]


def imports(path):
    """What the notebook's cells import, as one source."""
    trees = [ast.parse(cell.source) for cell in cells(path, "code")]
    found = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Import)]
    found += [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    return "\n".join(map(ast.unparse, found))


@every
def test_a_notebook_links_its_neighbours_in_the_order_of_the_file_names(path):
    last = cells(path, "markdown")[-1].source
    assert last == links.footer(path.stem, [other.stem for other in NOTEBOOKS]), (
        "python -m sage_lib.report.links"
    )


def test_a_footer_names_the_one_before_and_the_one_after():
    names = ["00_a", "01_b_c", "02_d"]
    assert links.footer("00_a", names) == "---\nNext: [01 b c](01_b_c.ipynb)"
    both = "---\nPrevious: [00 a](00_a.ipynb) · Next: [02 d](02_d.ipynb)"
    assert links.footer("01_b_c", names) == both
    assert links.footer("02_d", names) == "---\nPrevious: [01 b c](01_b_c.ipynb)"


@every
def test_a_notebook_is_short_and_has_its_parts(path):
    nb = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in cells(path, "markdown"))
    assert len(nb.cells) < 30
    assert "**What we ask:**" in text and "## What it means" in text
    assert "$" in text, "no formula"
    assert text.count("## Change one thing") == 1
    assert bool(of_tag(path, "equation")) == (path.stem not in WITHOUT_EQUATION)


@every
def test_equations_hold_and_answers_are_what_their_code_prints(path, capsys):
    """Each cell with an equation runs on nothing but imports and parameters, and the code of the
    exercise's answer, run after it, prints what stands below it."""
    text = "\n".join(cell.source for cell in cells(path, "markdown"))
    [answer] = ANSWER.finditer(text)
    space = {}
    for source in (imports(path), *of_tag(path, "parameters"), *of_tag(path, "equation")):
        exec(source, space)
    capsys.readouterr()
    exec(answer["code"], space)
    printed = capsys.readouterr().out.strip().splitlines()
    stored = answer["printed"].strip().splitlines()
    assert len(printed) == len(stored) > 0
    for old, new in zip(stored, printed, strict=True):
        assert outputs.agree(old.rstrip(), new.rstrip()), f"stored {old!r}, now {new!r}"


@every
def test_an_answer_runs_at_the_notebooks_end_too(path):
    """What it reads of an equation's cell is not called something else by a later one."""
    text = "\n".join(cell.source for cell in cells(path, "markdown"))
    [answer] = ANSWER.finditer(text)
    read = {node.id for node in ast.walk(ast.parse(answer["code"])) if isinstance(node, ast.Name)}
    before = set()
    for cell in cells(path, "code"):
        if "equation" in cell.metadata.get("tags", []):
            before |= bound(cell.source)
        else:
            assert not before & read & bound(cell.source), cell.source


def bound(source):
    """The names that a cell binds, but for those of comprehensions and of functions."""
    inner = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.FunctionDef, ast.Lambda)
    left, found = [ast.parse(source)], set()
    while left:
        node = left.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        left += [one for one in ast.iter_child_nodes(node) if not isinstance(one, inner)]
    return found


@every
def test_no_paragraph_stands_in_two_notebooks(path):
    paragraphs = text_blocks(path)
    for other in NOTEBOOKS:
        if other != path:
            assert not paragraphs & text_blocks(other), other.stem


def text_blocks(path):
    """Paragraphs of Markdown of over 100 characters, in one line each."""
    blocks = "\n\n".join(cell.source for cell in cells(path, "markdown")).split("\n\n")
    return {" ".join(block.split()) for block in blocks if len(block) > 100}


def test_a_notebook_works_alone_and_from_another_folder(tmp_path):
    """Copied elsewhere, without the others, and run there: it reads the published results."""
    import shutil

    from sage_lib.pipeline import reproduce

    [path] = [path for path in NOTEBOOKS if path.stem.startswith("22")]
    alone = tmp_path / "elsewhere" / path.name
    alone.parent.mkdir()
    shutil.copy(path, alone)
    assert reproduce.run_notebook(alone, tmp_path / "copy.ipynb", {}) > 0
