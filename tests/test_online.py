"""Notebooks opened elsewhere: their badges, and the cell that sets Colab up."""

import copy
import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from ruamel.yaml import YAML

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import read_json
from sage_lib.pipeline import notebooks, online

ADDRESS = "repository-code: https://github.com/some-one/sage.companion"


def cited(tmp_path, monkeypatch, line):
    file = tmp_path / "CITATION.cff"
    file.write_text(
        f"cff-version: 1.2.0\n{line}\npreferred-citation:\n  repository-code: https://github.com/a/b\n"
    )
    monkeypatch.setattr(online, "CITATION", file)


def test_badges_open_the_public_repository_where_there_is_one(tmp_path, monkeypatch):
    cited(tmp_path, monkeypatch, "")
    assert online.repository() is None and online.badges("13_verdict") == ""
    cited(tmp_path, monkeypatch, "repository-code: https://github.com/some-one/sage.companion")
    colab, binder = re.findall(r"\]\((https://[^)]+)\)(?!\])", online.badges("13_verdict"))
    place = "notebooks/13_verdict.ipynb"
    assert (
        colab
        == f"https://colab.research.google.com/github/some-one/sage.companion/blob/main/{place}"
    )
    assert binder == f"https://mybinder.org/v2/gh/some-one/sage.companion/main?labpath={place}"
    cited(tmp_path, monkeypatch, "repository-code: https://example.org/sage")
    with pytest.raises(SageError, match=r"https://github\.com/OWNER/NAME"):
        online.repository()


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def address(folder, *words):
    """The tool in a copy of the project, run from elsewhere."""
    return subprocess.run(
        ["bash", str(folder / "tools" / "address"), *words],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=paths.ROOT.parent, capture_output=True, text=True,
    )  # fmt: skip


def test_the_address_is_set_once_and_everything_follows(tmp_path):
    copied = tmp_path / "project"
    for name in ("sage_lib", "notebooks", "tools"):
        ignored = shutil.ignore_patterns("*.pyc*", ".*")
        shutil.copytree(paths.ROOT / name, copied / name, ignore=ignored)
    for name in ("README.md", "CITATION.cff"):
        shutil.copy(paths.ROOT / name, copied / name)
    cited = YAML(typ="safe").load((copied / "CITATION.cff").read_text())
    before = files(copied)
    for bad in (
        ["https://example.org/a"],
        ["git@github.com:a/b.git"],
        ["--help me"],
        [],
        ["a", "b"],
    ):
        done = address(copied, *bad)
        assert done.returncode and "https://github.com/OWNER/NAME" in done.stderr
        assert "Traceback" not in done.stderr and files(copied) == before
    assert address(copied, "https://github.com/some-one/its.name.git").returncode == 0
    after = files(copied)
    linked = [path for path in after if path.suffix == ".ipynb"]
    assert {path for path in after if after[path] != before[path]} == {
        *linked, copied / "README.md", copied / "CITATION.cff"
    }  # fmt: skip
    for path in (*linked, copied / "README.md"):
        text = after[path].decode()
        opened = "00_start_here" if path.suffix == ".md" else path.stem
        assert f"/github/some-one/its.name/blob/main/notebooks/{opened}.ipynb" in text
        assert f"/gh/some-one/its.name/main?labpath=notebooks/{opened}.ipynb" in text
    whole = YAML(typ="safe").load((copied / "CITATION.cff").read_text())
    assert whole == {**cited, "repository-code": "https://github.com/some-one/its.name"}
    assert address(copied, "https://github.com/some-one/its.name").returncode == 0
    assert files(copied) == after, "a second time changes nothing"
    assert address(copied, "https://github.com/other/name").returncode == 0
    moved = files(copied)
    assert not any(b"its.name" in moved[path] for path in moved)


def linked(number):
    [path] = paths.NOTEBOOKS.glob(f"{number}_*.ipynb")
    before = read_json(path)
    return path.stem, before, online.with_links(copy.deepcopy(before), path.stem)


@pytest.mark.parametrize("number", ["00", "06", "19"])
def test_a_notebook_gets_its_links_and_loses_them(number, tmp_path, monkeypatch):
    cited(tmp_path, monkeypatch, ADDRESS)
    name, before, after = linked(number)
    first = "".join(after["cells"][0]["source"])
    assert first.splitlines()[0].startswith(f"# {number} ")
    assert (
        f"(https://mybinder.org/v2/gh/some-one/sage.companion/main?labpath=notebooks/{name}"
        in first
    )
    assert "\n\n**What we ask:**" in first or "\n\nThis is" in first
    assert online.with_links(after, name) == after, "written once"
    nbformat.validate(nbformat.from_dict(after))
    cited(tmp_path, monkeypatch, "")
    assert online.with_links(after, name) == before


def test_colab_is_set_up_below_the_parameters_and_before_any_import(tmp_path, monkeypatch):
    cited(tmp_path, monkeypatch, ADDRESS)
    _, _, after = linked("22")
    path = tmp_path / "22_guides.ipynb"
    nbformat.write(nbformat.from_dict(after), path)
    assert notebooks.parameters(path) == {"profile", "results"}
    _, setup, imports, *_ = [cell for cell in after["cells"] if cell["cell_type"] == "code"]
    assert setup["metadata"]["tags"][0] == "colab"
    assert "from sage_lib" in "".join(imports["source"])


def test_the_cell_installs_on_colab_alone(tmp_path, monkeypatch):
    cited(tmp_path, monkeypatch, ADDRESS)
    _, _, after = linked("22")
    [cell] = [c for c in after["cells"] if "colab" in c["metadata"].get("tags", [])]
    called = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(subprocess, "run", lambda command, check: called.append(command))
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    exec("".join(cell["source"]), {})
    assert called == [] and not any("sage.companion" in place for place in sys.path)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    exec("".join(cell["source"]), {})
    clone, install = called
    assert (
        clone[:2] == ["git", "clone"] and clone[-1] == "https://github.com/some-one/sage.companion"
    )
    assert install == ["bash", "sage.companion/tools/setup.sh", "gpu"]
    assert sys.path[0] == str(tmp_path / "sage.companion")


def test_the_set_up_installs_what_make_installs(tmp_path, monkeypatch):
    """With a python3 that only says what it is asked."""
    said = tmp_path / "said"
    fake = tmp_path / "python3"
    fake.write_text(
        f'#!/bin/bash\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\necho "$@" >> {said}\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    subprocess.run(["bash", str(paths.ROOT / "tools" / "setup.sh"), "gpu"], check=True)
    lock, torch, own, gpu = said.read_text().splitlines()
    makefile = (paths.ROOT / "Makefile").read_text()
    for line, words in {
        lock: "--no-deps --require-hashes --requirement requirements.lock",
        torch: "--no-warn-conflicts --requirement requirements-torch.lock",
        own: "--no-deps --no-build-isolation --editable .",
    }.items():
        assert words in line and words in makefile
    assert "bitsandbytes==" in gpu and "--no-deps" in gpu


@pytest.mark.parametrize("path", sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb")), ids=lambda p: p.stem)
def test_the_notebooks_have_the_links_of_the_address_there_is(path):
    found = read_json(path)
    assert online.with_links(found, path.stem) == found, "python -m sage_lib.pipeline.online"
