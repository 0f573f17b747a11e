"""The wheel: it imports and compares samples without torch, and writes nothing into itself."""

import os
import subprocess
import sys
import venv
import zipfile

import forks
import pytest

from sage_lib.paths import ROOT

#: Nothing of these is a core dependency.
BLOCKED = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "unsloth")
BLOCKED += ("math_verify", "reasoning_gym", "submitit", "psutil", "tqdm")
BLOCKED += ("papermill", "nbformat", "nbconvert", "IPython", "ipywidgets", "matplotlib_venn")
BLOCK = f"""
import sys
class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(name + " is not installed", name=name)
sys.meta_path.insert(0, Blocked)
"""
USE = """
import sage_lib, sage_lib.paths, sys
from pathlib import Path
assert not sage_lib.paths.IS_CHECKOUT, sage_lib.__file__
assert sage_lib.paths.build("x") == Path.cwd() / "build" / "x"
assert sage_lib.pass_at_k({"a": (1, 2), "b": (0, 2)})["policies"][0]["pass_at_k"] == [0.25, 0.5]
assert sage_lib.load_profile("smoke").name == "smoke"
from sage_lib.pipeline import cli
cli.main(["pass-at-k", "a.jsonl", "b.jsonl", "--out", "found"])
assert "torch" not in sys.modules
print("used", sage_lib.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools leaves build/ where it builds
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "sage_lib"):
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(source)]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), "--disable-pip-version-check"]
    forks.output_of(command)
    [made] = folder.glob("sage_companion-*.whl")
    return made


@pytest.fixture
def samples(tmp_path):
    for name, c in (("a", 2), ("b", 1)):
        lines = [f'{{"id": {i}, "c": {c + i % 2}, "n": 4}}' for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def outside():
    """The environment of somebody who has no checkout."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and k[:5] != "SAGE_"}


def test_the_wheel_works_without_torch(wheel, samples):
    zipfile.ZipFile(wheel).extractall(samples / "installed")
    environment = {**outside(), "PYTHONPATH": str(samples / "installed")}
    command = [sys.executable, "-c", BLOCK + USE]
    printed = forks.output_of(command, cwd=samples, env=environment)
    assert f"used {samples / 'installed'}" in printed
    assert (samples / "found" / "pass_at_k.png").exists()
    trainer = [sys.executable, "-c", BLOCK + "from sage_lib import SageTrainer"]
    failed = subprocess.run(trainer, cwd=samples, env=environment, capture_output=True, text=True)
    assert "SageTrainer needs the package torch: install the extra train" in failed.stderr


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment_with_core_dependencies_alone(wheel, samples):
    """Downloads what the core needs from the package index."""
    venv.create(samples / "empty", with_pip=True)
    python = samples / "empty" / "bin" / "python"
    for command in (
        [python, "-m", "pip", "install", "--quiet", wheel],
        [python, "-c", USE],
        [samples / "empty" / "bin" / "sage-companion", "pass-at-k", "a.jsonl", "b.jsonl"],
    ):
        printed = forks.output_of(command, cwd=samples, env=outside())
    assert "By the band, a is" in printed
