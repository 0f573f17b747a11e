"""CONTRIBUTING.md, carried out: each example in a copy of the project, as a reader would make it.

A sentence that ends in a colon says what to do with the block below it ("In `path`, after `text`:",
"Try it:", ...; see ``ACTIONS``). An example may touch no more than ``ALLOWED`` says, whatever the
page says of itself.
"""

import dataclasses
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from sage_lib.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
#: What an example needs of the project, and of its results.
COPIED = (
    *("sage_lib", "notebooks", "data/reported"),
    *("README.md", "CITATION.cff", "pyproject.toml"),
)
PUBLISHED = "data/published/smoke"
#: Bytecode comes along: a copy writes none, and would compile the project in each process.
IGNORED = shutil.ignore_patterns(".*", "*.pyc.*")
PROFILES = "sage_lib/experiment/profiles/*.yaml"
#: By row of the table: the files that a change may touch, and how many of each.
ALLOWED = {
    "a guide": {"sage_lib/algorithm/guides.py": 1, PROFILES: 1},
    "an rl method": {PROFILES: 1},
    "an anchor": {"sage_lib/algorithm/anchors.py": 1, PROFILES: 1},
    "a metric": {
        "sage_lib/evaluation/metrics.py": 1,
        "sage_lib/report/result_tables.py": 1,
        "sage_lib/report/result_figures.py": 1,
        "notebooks/*.ipynb": 1,
    },
    # a module and the table of tasks
    "a data set": {"sage_lib/tasks/*.py": 2, PROFILES: 1, "mine.yaml": 1, "three.csv": 1},
    "a notebook": {"notebooks/*.ipynb": 1},
    "a variant": {"firm.yaml": 1},
}
#: By row: what the commands of an example may write anew.
GENERATED = {"a notebook": {"README.md", "notebooks/*.ipynb"}}
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
#: Prints what every policy of two profiles is made from: run -> fingerprint.
FINGERPRINTS = """
import json
from sage_lib.experiment import runs
from sage_lib.experiment.profile import load_profile
found = {}
for name in ("smoke", "smollm"):
    profile = load_profile(name)
    trained = [run for _, _, run in runs.rl_runs(profile)]
    for run in (runs.sft_run(profile), runs.entropy_run(profile), *trained):
        found[f"{name}/{run.name}"] = run.fingerprint
print(json.dumps(found))
"""


# --- reading the page -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """A block of the page, and the paragraph before it."""

    sentence: str
    language: str
    block: str


def sections(text):
    """Heading -> steps, of the headings of third rank."""
    found = {}
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        pieces = re.split(r"^```(\w+)\n(.*?)^```$", body, flags=re.DOTALL | re.MULTILINE)
        prose, languages, blocks = pieces[0::3], pieces[1::3], pieces[2::3]
        steps = []
        for before, language, block in zip(prose, languages, blocks, strict=False):
            paragraph = before.strip().split("\n\n")[-1]
            steps.append(Step(" ".join(paragraph.split()), language, block))
        found[heading.strip()] = steps
    return found


def costs(text):
    """The table of costs: what is added -> patterns of the files that it touches."""
    rows = re.findall(r"^\| (an? [^|]+) \| ([^|]*) \|", text, flags=re.MULTILINE)
    return {added.lower(): re.findall(r"`([^`]+)`", touched) for added, touched in rows}


def row_of(heading):
    """The row that an example belongs to: of "A data set: a module" it is "a data set"."""
    return heading.partition(":")[0].lower()


EXAMPLES = sections(TEXT)
TABLE = costs(TEXT)


# --- carrying it out ------------------------------------------------------------------------------


class Copy:
    """A copy of the project, and what was done in it."""

    def __init__(self, folder):
        self.root, self.results, self.build = folder / "project", folder / "results", folder / "b"
        self.bin, self.script = folder / "bin", folder / "try_it.py"
        for name in COPIED:
            copied(ROOT / name, self.root / name)
        copied(ROOT / PUBLISHED, self.results / "measured" / "smoke")
        self.bin.mkdir()
        for command, words in {"python": "", "sage-companion": "-m sage_lib.pipeline.cli"}.items():
            shim = self.bin / command
            shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            shim.chmod(0o755)
        self.edited, self.generated, self.done = set(), set(), []
        self.notebook, self.printed = None, ""

    def files(self):
        """Path -> content of every file of the project."""
        paths = [path for path in self.root.rglob("*") if path.is_file()]
        own = [path for path in paths if not {"__pycache__", ".ruff_cache"} & set(path.parts)]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in own}

    def follow(self, step):
        """Do what a sentence says, and note which files it touched."""
        for pattern, action in ACTIONS:
            found = re.search(pattern, step.sentence)
            if found is None:
                continue
            before = self.files()
            action(self, step, *found.groups())
            after = self.files()
            touched = {name for name in {*before, *after} if before.get(name) != after.get(name)}
            (self.generated if action is try_it else self.edited).update(touched)
            self.done.append(action)
            return
        raise AssertionError(f"nobody can tell what to do with the block after: {step.sentence}")

    def run(self, command):
        """What a command prints; its results and its build stay outside the project."""
        environment = {
            **os.environ,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.root),
            "SAGE_RESULTS": str(self.results),
            "SAGE_BUILD": str(self.build),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout


def copied(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=IGNORED)
    else:
        shutil.copy(source, target)


def edit(copy, step, path, where, text):
    """The block after, before or in place of the one line that holds a text."""
    file = copy.root / path
    lines = file.read_text().splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if text in line]
    assert len(places) == 1, f"{len(places)} lines of {path} hold {text!r}"
    place = places[0]
    gap = "\n\n" if step.block.startswith(("class ", "def ", "@")) else ""
    if where == "after":
        lines[place] = f"{lines[place]}{gap}{step.block}"
    elif where == "before":
        lines[place] = f"{step.block}{gap}{lines[place]}"
    else:
        lines[place] = step.block
    file.write_text("".join(lines))


def new_file(copy, step, path):
    assert not (copy.root / path).exists(), f"{path} is not new"
    (copy.root / path).write_text(step.block)


def new_notebook(copy, step, path, kind):
    copy.notebook = copy.root / path
    assert not copy.notebook.exists(), f"{path} is not new"
    nbformat.write(nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL}), copy.notebook)
    next_cell(copy, step, kind)


def next_cell(copy, step, kind):
    nb = nbformat.read(copy.notebook, as_version=4)
    markdown = kind == "Markdown cell"
    make = nbformat.v4.new_markdown_cell if markdown else nbformat.v4.new_code_cell
    tags = re.findall(r"the tag `(\w+)`", kind)
    nb.cells.append(make(step.block.strip(), metadata={"tags": tags} if tags else {}))
    nbformat.write(nb, copy.notebook)


def cell_before(copy, step, path, text):
    nb = nbformat.read(copy.root / path, as_version=4)
    (place,) = [number for number, cell in enumerate(nb.cells) if cell.source.startswith(text)]
    nb.cells.insert(place, nbformat.v4.new_code_cell(step.block.strip()))
    nbformat.write(nb, copy.root / path)


def add_metadata(copy, step, path, key):
    """Lists grow, other values are set."""
    nb = nbformat.read(copy.root / path, as_version=4)
    section = nb.metadata.setdefault(key, {})
    for name, value in json.loads(step.block).items():
        section[name] = [*section.get(name, []), *value] if isinstance(value, list) else value
    nbformat.write(nb, copy.root / path)


def try_it(copy, step):
    if step.language == "bash":
        copy.printed = copy.run(["bash", "-euo", "pipefail", "-c", step.block])
    else:
        copy.script.write_text(step.block)
        copy.printed = copy.run([sys.executable, str(copy.script)])


def prints(copy, step):
    """Every line of the block was printed; blanks in a row count as one."""
    printed = [" ".join(line.split()) for line in copy.printed.splitlines()]
    for line in step.block.splitlines():
        assert " ".join(line.split()) in printed, f"{line!r} is not among:\n{copy.printed}"


#: What a sentence ends in -> what is done with the block below it.
ACTIONS = (
    (r"In `([^`]+)`, (after|before|in place of) `([^`]+)`:$", edit),
    (r"In a new `([^`]+)`:$", new_file),
    (r"In a new `([^`]+)`, a (Markdown cell):$", new_notebook),
    (r"Below it, a (cell[^:]*):$", next_cell),
    (r"In `([^`]+)`, a new cell before `([^`]+)`:$", cell_before),
    (r"In the metadata of `([^`]+)`, added to `([^`]+)`:$", add_metadata),
    (r"^Try it:", try_it),
    (r"^It prints[^:]*:$", prints),
)


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory):
    """Heading -> the copy in which its example was carried out, once."""
    finished = {}

    def copy_of(heading):
        if heading not in finished:
            copy = finished[heading] = Copy(tmp_path_factory.mktemp("copy"))
            try:
                for step in EXAMPLES[heading]:
                    copy.follow(step)
            except AssertionError as error:
                finished[heading] = error
        if isinstance(finished[heading], AssertionError):
            raise finished[heading]
        return finished[heading]

    return copy_of


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    return Copy(tmp_path_factory.mktemp("untouched"))


@pytest.fixture(scope="module")
def fingerprints(untouched):
    return json.loads(untouched.run(["python", "-c", FINGERPRINTS]))


def unexpected(row, touched):
    """Touched files that the row does not allow, and those beyond the number that it allows."""
    left = set(touched)
    beyond = []
    for pattern, number in ALLOWED[row].items():
        matching = sorted(fnmatch.filter(left, pattern))
        left -= set(matching)
        beyond += matching[number:]
    return [*sorted(left), *beyond]


# --- the page and its examples --------------------------------------------------------------------


def test_every_row_of_the_table_has_its_example():
    assert set(ALLOWED) == set(TABLE) == {row_of(heading) for heading in EXAMPLES}


@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_works_as_the_page_says(carried_out, heading):
    copy = carried_out(heading)
    assert try_it in copy.done, "an example is tried"
    assert copy.edited, "an example changes something"


@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_touches_no_more_than_the_table_says(carried_out, heading):
    copy, row = carried_out(heading), row_of(heading)
    assert unexpected(row, copy.edited) == []
    for name in copy.generated:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in GENERATED.get(row, set())), name
    for name in copy.edited | copy.generated:
        named = any(fnmatch.fnmatch(name, pattern) for pattern in TABLE[row])
        assert named, f"the table does not say that {row} touches {name}"


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_is_in_form(carried_out, heading):
    copy = carried_out(heading)
    code = sorted(name for name in copy.edited if name.endswith((".py", ".ipynb")))
    if code:
        copy.run([sys.executable, "-m", "ruff", "check", *code])
        copy.run([sys.executable, "-m", "ruff", "format", "--check", *code])


@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_trains_no_other_policy_again(carried_out, fingerprints, heading):
    """Whatever was trained before has the same fingerprint after, held-out problems included."""
    copy = carried_out(heading)
    if fnmatch.filter(copy.edited, PROFILES):
        after = json.loads(copy.run(["python", "-c", FINGERPRINTS]))
        assert fingerprints.items() <= after.items()


def test_the_examples_run_the_copy(untouched):
    printed = untouched.run(["python", "-c", "import sage_lib; print(sage_lib.__file__)"])
    assert Path(printed.strip()).is_relative_to(untouched.root)


# --- faults in a page -----------------------------------------------------------------------------

FAULTS = {
    "a sentence that nobody can follow": ("Somewhere:", "yaml", "a: 1\n", "nobody can tell"),
    "a place that is not there": ("In `README.md`, after `xyzzy`:", "text", "a\n", "0 lines"),
    "a place that is not one": ("In `README.md`, after `the`:", "text", "a\n", "lines of README"),
    "a new file that is there": ("In a new `README.md`:", "text", "a\n", "is not new"),
    "a try that fails": ("Try it:", "bash", "ls xyzzy\ntrue\n", "cannot access"),
    "a text that is not printed": ("It prints:", "text", "a\n", "'a' is not among"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_page_is_noticed(untouched, fault):
    sentence, language, block, words = FAULTS[fault]
    with pytest.raises(AssertionError, match=words):
        untouched.follow(Step(sentence, language, block))


def test_a_file_too_many_is_noticed():
    profiles = [f"sage_lib/experiment/profiles/{name}.yaml" for name in ("laptop", "smoke")]
    assert unexpected("an rl method", profiles[:1]) == []
    assert unexpected("an rl method", profiles) == profiles[1:]
    assert unexpected("a notebook", ["notebooks/13_a.ipynb", "README.md"]) == ["README.md"]
