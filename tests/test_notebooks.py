"""The notebooks as a text: their order, their equations in code, and their exercises' answers."""

import ast
import dataclasses
import dis
import re
import shutil

import nbformat
import pytest

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.results import load_results
from sage_lib.pipeline import notebooks, outputs
from sage_lib.report import page

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
ANSWER = re.compile(
    r"<details><summary>Answer</summary>\n\n```python\n(?P<code>.+?)```\n\n"
    r"```text\n(?P<printed>.*?)```\n\n(?P<why>.+?)\n\n</details>",
    re.DOTALL,
)
#: A prediction and, below it, the answer: both folded, in Markdown, for which the blank lines are.
PREDICTED = re.compile(
    r"(?P<question>.+)\n\n<details><summary>Predict: [^<]+\?</summary>\n\n(?P<choices>a\) .+?)"
    r"\n\n</details>\n\n<details><summary>Answer</summary>\n\n"
    r"(?P<letter>[a-c])\).*?\n\n</details>",
    re.DOTALL,
)
WORDS = 9_000  # of all notebooks

every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
#: All but the map, which has no exercise.
with_exercise = pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda path: path.stem)


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
def test_a_notebook_opens_with_a_question_and_closes_with_its_answer(path):
    """The first cell folds a prediction, and then the answer. The last section says it openly."""
    first, *others = [cell.source for cell in cells(path, "markdown")]
    opening = PREDICTED.search(first)
    assert re.search(r"\*\*Question:\*\* .*\?|\*\*[^*].*\?\*\*", opening["question"], re.DOTALL)
    assert f"{opening['letter']}) " in opening["choices"].lower()
    assert sum("## What it means\n" in text for text in others) == 1


def test_the_notebooks_can_be_read_in_an_hour():
    """All words of all markdown cells count: links, and the code of answers, too."""
    sources = [cell.source for path in NOTEBOOKS for cell in cells(path, "markdown")]
    assert sum(len(source.split()) for source in sources) <= WORDS


@with_exercise
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


@with_exercise
def test_an_answer_runs_at_the_notebooks_end_too(path):
    """What it reads of an equation's cell is not called something else by a later one."""
    text = "\n".join(cell.source for cell in cells(path, "markdown"))
    [answer] = ANSWER.finditer(text)
    read = {node.id for node in ast.walk(ast.parse(answer["code"])) if isinstance(node, ast.Name)}
    before = set()
    for cell in cells(path, "code"):
        code = compile(cell.source, path.stem, "exec")
        bound = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_NAME"}
        if "equation" in cell.metadata.get("tags", []):
            before |= bound
        else:
            assert not before & read & bound, cell.source


def test_a_notebook_works_alone_and_from_another_folder(tmp_path):
    """Copied elsewhere, without the others, and run there: it reads the published results."""
    [path] = [path for path in NOTEBOOKS if path.stem.startswith("12")]
    alone = tmp_path / "elsewhere" / path.name
    alone.parent.mkdir()
    shutil.copy(path, alone)
    notebooks.execute(alone, tmp_path / "copy.ipynb", {})


def test_reproduce_reads_own_runs_only_where_a_notebook_takes_any_profile():
    """08 and 19 show one profile, whose runs a user of another profile does not have."""
    for notebook in notebooks.select():
        names = notebooks.parameters(notebook.path)
        assert not {"trained", "own_results"} <= names, notebook.path.name


SAMPLED = load_profile("smollm")  # no task whose right completions can be listed
OF_SAMPLES = [one for one in notebooks.select() if "profile" in notebooks.parameters(one.path)]
OF_SAMPLES = [one.path for one in OF_SAMPLES if one.lacks(SAMPLED) is None]
#: What is published of it; and as if it had been evaluated on shifted data alone, without a guide.
VARIANTS = {"whole": None, "shifted": ("base", "grpo", "grpo_no_kl")}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("path", OF_SAMPLES, ids=lambda path: path.stem)
def test_the_notebooks_of_a_profile_show_one_that_has_samples_alone(path, variant, monkeypatch):
    """As those of the GPU have."""
    monkeypatch.setattr(page, "save_figure", lambda *given: None)
    monkeypatch.setattr(page, "write_text", lambda *given: None)
    results = load_results(SAMPLED.name)
    if (methods := VARIANTS[variant]) is not None:
        (data,) = SAMPLED.evaluation.data
        shifted = dataclasses.replace(data, ood=True)
        evaluation = dataclasses.replace(SAMPLED.evaluation, data=(shifted,))
        results.profile = dataclasses.replace(SAMPLED, evaluation=evaluation)
        for name in ("runs", "steps", "counts", "scores", "samples"):
            frame = getattr(results, name)
            setattr(results, name, frame[frame["method"].isin(methods)].reset_index(drop=True))
    monkeypatch.setattr(
        "sage_lib.experiment.results.load_results", lambda name, own=False: loaded(name, results)
    )
    space = {}
    for cell in cells(path, "code"):
        exec(cell.source, space)
    assert space["results"] is results


def loaded(name, results):
    if name in ("operating_point", "study_short"):  # beside those of the profile
        return load_results(name)
    if name.endswith("_larger"):
        raise SageError("there is no such profile")
    return results


@every
def test_a_notebook_has_short_cells(path):
    for cell in cells(path, "code"):
        assert len(cell.source.splitlines()) <= 25, "a reader does not see it at a glance"


@pytest.mark.parametrize(
    "path", [p for p in NOTEBOOKS if p.name[:2] not in notebooks.WALK], ids=lambda path: path.stem
)
def test_a_figure_is_displayed_when_it_is_complete_alone(path):
    """A figure that a cell leaves open is displayed at its end, without a title or words."""
    for cell in cells(path, "code"):
        for output in (one for one in cell.outputs if "image/png" in one.get("data", {})):
            assert output.metadata.get("image/png", {}).get("alt"), cell.source
