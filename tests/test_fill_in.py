"""The cells that a reader completes: unfilled, with the solution, and with a wrong one."""

import ast

import nbformat
import pytest
from test_notebooks import imports, of_tag

from sage_lib import paths

EMPTY = "    return None  # fill in\n"
#: Of each notebook: the lines in the place of EMPTY, and what a wrong solution changes in them.
SOLUTIONS = {
    "02": (
        """
    right, weighted = reward == 1, reference * q
    sides = [weighted[side].sum() / reference[side].sum() for side in (right, ~right)]
    return np.log(sides[0] / sides[1])
""",
        ("reference", "np.ones_like(reference)"),
    ),
    "03": (
        """
    d = log_q + log_ref - log_pi
    return d.exp() - d - 1
""",
        ("log_q + log_ref - log_pi", "log_pi - log_ref - log_q"),
    ),
    "05": (
        """
    r = torch.tensor(rewards)
    return ((r - r.mean()) / (r.std(correction=1) + 1e-4)).tolist()
""",
        ("correction=1", "correction=0"),
    ),
    "06": (
        """
    return (1 + 0.3 * (entropies - 1.2).clamp(min=0)).clamp(0.6, 1.4)
""",
        (".clamp(0.6, 1.4)", ""),
    ),
    "12": (
        """
    ways = [np.prod([(m - i) / (i + 1) for i in range(k)]) for m in (n - c, n)]
    return 1 - ways[0] / ways[1]
""",
        ("(m - i)", "m"),  # draws with replacement
    ),
}


def notebook(number):
    [path] = paths.NOTEBOOKS.glob(f"{number}_*.ipynb")
    return path


def run(number, capsys, lines=EMPTY):
    """Run the cell with these lines, as a reader does; return what it says."""
    path, space = notebook(number), {}
    [cell] = of_tag(path, "fill-in")
    assert cell.count(EMPTY) == 1
    for source in (imports(path), *of_tag(path, "parameters"), *of_tag(path, "equation")):
        exec(source, space)
    capsys.readouterr()
    exec(cell.replace(EMPTY, lines.lstrip("\n")), space)
    return capsys.readouterr().out


def test_every_cell_that_is_to_be_filled_in_has_its_solution_here():
    numbers = {path.name[:2] for path in paths.NOTEBOOKS.glob("[0-9]*.ipynb")}
    assert {number for number in numbers if of_tag(notebook(number), "fill-in")} == set(SOLUTIONS)


@pytest.mark.parametrize("number", SOLUTIONS)
def test_a_cell_tells_what_is_right_wrong_and_missing(number, capsys):
    right, fault = SOLUTIONS[number]
    assert run(number, capsys).startswith("Not filled in yet: ")
    assert run(number, capsys, right) == "Right.\n"
    with pytest.raises(AssertionError, match=r"\w+ \w+"):
        run(number, capsys, right.replace(*fault))


@pytest.mark.parametrize("number", SOLUTIONS)
def test_the_solution_is_not_in_the_notebook(number):
    returned = SOLUTIONS[number][0].strip().splitlines()[-1].strip()
    text = [cell.source for cell in nbformat.read(notebook(number), as_version=4).cells]
    assert ast.parse(returned) and not any(returned in source for source in text)
