"""The README, CONTRIBUTING and the pages in docs: their code runs, their commands and files are
there, their links lead somewhere; notebooks are valid."""

import contextlib
import importlib
import io
import json
import math
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import pairwise

import forks
import links
import nbformat
import pytest
from ruamel.yaml import YAML

import sage_lib
from sage_lib import paths
from sage_lib.experiment.blocks import load_grid
from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import cli

ROOT = paths.ROOT
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(language):
    return [
        block for text in PAGES.values() for kind, block in BLOCK.findall(text) if kind == language
    ]


# --- Python ---------------------------------------------------------------------------------------


def python_block(name, page=None):
    """The one block that uses a name, on a page or on all of them."""
    texts = PAGES.values() if page is None else [PAGES[page]]
    shown = [block for text in texts for kind, block in BLOCK.findall(text) if kind == "python"]
    [block] = [block for block in shown if re.search(rf"\b{name}\b", block)]
    return block


@pytest.mark.parametrize(
    ("page", "said"), [("README.md", "'train_loss': "), ("docs/own_code.md", "\n1.4")]
)
def test_the_script_of_a_page_trains(page, said, tmp_path):
    """As it stands, in a folder and a process of its own; 1.4 is the guide's q at its bound."""
    (tmp_path / "mine.py").write_text(python_block("__main__", page))
    assert said in forks.output_of([sys.executable, "mine.py"], cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "given", "q"),
    [
        ("OnUncertainTokens", {"threshold": 1.0}, [1.0, 1.2, 1.0]),
        ("OpeningGuide", {"tokens": 1}, [1.3, 1.0, 1.0]),
    ],
)
def test_the_guides_of_the_pages_are_guides(name, given, q):
    import dataclasses

    import torch

    from sage_lib.algorithm.guides import check_guide

    page = {
        "__name__": "page",
        "torch": torch,
        "dataclass": dataclasses.dataclass,
        "GuideInputs": sage_lib.GuideInputs,
    }
    exec(python_block(name), page)
    guide = page[name](**given)
    check_guide(guide)
    signal, mask = torch.tensor([[0.4, 1.4, 2.0]]), torch.tensor([[1, 1, 0]])
    inputs = sage_lib.GuideInputs(signal, -signal, mask, 0.0, torch.Generator(), mask)
    torch.testing.assert_close(guide(inputs), torch.tensor([q]))


def test_the_tree_of_the_page_is_tilted():
    names = {}
    exec(python_block("tilted"), names)
    reference, reward, q = (names[key].tolist() for key in ("reference", "reward", "q"))
    weights = [p * g * math.exp(r / 0.1) for p, g, r in zip(reference, q, reward, strict=True)]
    expected = [weight / sum(weights) for weight in weights]
    assert names["policy"].tolist() == pytest.approx(expected, abs=1e-7)


def test_the_metrics_of_the_page_are_right():
    names = {}
    exec(python_block("last_answer"), names)
    assert names["answers"] == ["4", "1/2", None]
    assert [verdict.correct for verdict in names["verdicts"]] == [True, True, False]
    expected = [1 - math.comb(256 - c, 16) / math.comb(256, 16) for c in (3, 40)]
    assert names["chances"] == pytest.approx(expected)
    assert 0 <= names["low"] < sum(expected) / 2 < names["high"] <= 1


def test_the_results_of_the_pages_are_frames():
    names = {}
    exec(python_block("levels"), names)
    assert len(names["exact"])
    kept = []
    names["page"] = type("Page", (), {"table": lambda self, frame: kept.append(frame)})()
    exec(python_block("unstack"), names)
    assert kept[0].drop(columns="method").stack().between(0, 1).all()


def test_every_name_and_file_that_a_page_names_is_there():
    for page, text in PAGES.items():
        for dotted in re.findall(r"`(sage_lib(?:\.\w+)+)`", text):
            module, _, name = dotted.rpartition(".")
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(dotted)
        for place in re.findall(r"`((?:sage_lib|data|tests|tools|configs|docs)/[\w./-]+)`", text):
            assert (ROOT / place).exists(), f"{page}: {place}"


# --- commands -------------------------------------------------------------------------------------


def commands():
    """Every command in a block, and those that prose names in full."""
    found = set()
    for text in PAGES.values():
        for kind, block in BLOCK.findall(text):
            if not kind:
                found |= {line.partition("  #")[0].strip() for line in block.splitlines()}
        inline = re.findall(r"`((?:make|sage-companion|python)\s[^`]+)`", BLOCK.sub("", text))
        found |= {" ".join(command.split()) for command in inline}
    first = ("make", "sage-companion", "python", "accelerate", "sbatch")
    return sorted(command for command in found if command.split(" ")[0] in first)


@cache
def help_of(command):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    assert "usage:" in said.getvalue(), f"there is no command {command}"
    return said.getvalue()


def written_profiles(folder):
    """The profiles that the pages write down, and the file that they name."""
    (folder / "my_problems.csv").write_text("problem,answer\n1 + 1?,2\n")
    for block in blocks("yaml"):
        if block.startswith("name: "):
            (folder / f"{block.split()[1]}.yaml").write_text(block)
    return sorted(folder.glob("*.yaml"))


def check_command(words, folder):
    """The subcommand and its options exist, and so do the profile, variant or grid it names."""
    _, command, *rest = words
    known = help_of(command)
    for word in rest:
        assert not word.startswith("--") or re.search(rf"{word}\b", known), f"{command} {word}"
    if command == "grid" and rest[:1] != ["NAME"]:
        load_grid(rest[0])
    given = list(pairwise(rest))
    changes = [value for option, value in given if option == "--set"]
    for profile in [value for option, value in given if option == "--profile"]:
        if profile != "NAME":
            place = folder / profile
            load_profile("+".join([str(place) if place.is_file() else profile, *changes]))


@pytest.mark.parametrize("command", commands())
def test_a_command_is_one(command, tmp_path):
    program, *words = shlex.split(command)
    if program == "make":
        forks.output_of(["make", "--dry-run", *words], cwd=ROOT)
    elif program == "sage-companion":
        written_profiles(tmp_path)
        check_command([program, *words], tmp_path)
    else:
        for word in words:
            if "/" in word:
                assert (ROOT / word).is_file() or word.startswith("https:"), word


# --- YAML -----------------------------------------------------------------------------------------


def test_the_profiles_of_the_pages_load(tmp_path):
    read = {file.stem: load_profile(file) for file in written_profiles(tmp_path)}
    assert set(read.pop("ranked").methods) == {"grpo", "grpo_rank"}
    data = {name: [one.name for one in profile.evaluation.data] for name, profile in read.items()}
    assert data == {"mine": ["countdown"], "base_only": ["file"]}


@pytest.mark.parametrize("block", [b for b in blocks("yaml") if not b.startswith("name: ")])
def test_a_section_of_a_profile_can_be_added_to_one(tmp_path, block):
    (tmp_path / "added.yaml").write_text(f"name: added\nextends: paper\n{block}")
    profile = load_profile(tmp_path / "added.yaml")
    assert set(YAML(typ="safe").load(block).get("train", [])) <= set(profile.methods)


# --- links, notebooks -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_picture_of_a_page_is_there(page):
    for place in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", BLOCK.sub("", PAGES[page])):
        assert ((ROOT / page).parent / place).exists(), place


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_its_parameters_and_links(path):
    notebook = json.loads(path.read_text())
    nbformat.validate(nbformat.from_dict(notebook))
    tagged = [c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1 and tagged[0]["cell_type"] == "code"
    names = [other.stem for other in NOTEBOOKS]
    linked = links.with_links(notebook, path.stem, names, links.repository())
    assert links.notebook_text(linked) == path.read_text(), "python tools/links.py"
    text = "".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")
    title = text.splitlines()[0].removeprefix(f"# {path.name[:2]} ")
    assert f"(../notebooks/{path.name}) | {title} |" in PAGES["docs/notebooks.md"]
    for place in re.findall(r"\]\((?!https?:|attachment:)([^)#\s]+)[^)]*\)", text):
        assert (paths.NOTEBOOKS / place).exists(), place


def test_every_data_file_has_its_checksum():
    listed = (ROOT / "data" / "SHA256SUMS").read_text().splitlines()
    files = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "data"]
    there = set(subprocess.check_output(files, cwd=ROOT, text=True).splitlines())
    assert {line.split("  ")[1] for line in listed} == there - {"data/SHA256SUMS"}
    check = ["sha256sum", "--check", "--quiet", "data/SHA256SUMS"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, f"{done.stdout}python tools/readme.py"
