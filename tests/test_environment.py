"""pyproject.toml, requirements.lock and environment.yml agree and are complete; what is packaged is
all there is."""

import re
import tomllib
from importlib.metadata import distribution

import pytest
from lock import LOCKED_EXTRAS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from ruamel.yaml import YAML
from setuptools import find_packages

from sage_lib.paths import ROOT

#: What the lock leaves out on purpose: GPU-only needs of Unsloth, and its floor for certifi, newer
#: than every mirror has.
NOT_IN_LOCK = {"torchvision", "xformers", "bitsandbytes", "torchao", "diffusers", "triton"}
BELOW_FLOOR = {("unsloth", "certifi"), ("unsloth-zoo", "certifi")}


def parse(lines):
    """Name -> what is asked of its version, of lines of a requirements file."""
    found = {}
    for line in lines:
        text = line.split("#")[0].strip().removesuffix("\\")
        if text and not text.startswith("--hash="):
            requirement = Requirement(text)
            found[canonicalize_name(requirement.name)] = requirement.specifier
    return found


def lines(name):
    return (ROOT / name).read_text().splitlines()


HASHED = ("requirements.lock", "requirements-site.lock")
LOCK = parse([*lines("requirements.lock"), *lines("requirements-torch.lock")])
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA = YAML(typ="safe").load((ROOT / "environment.yml").read_text())


def pinned(specifier):
    return len(specifier) == 1 and next(iter(specifier)).operator == "=="


def version_of(name):
    return Version(next(iter(LOCK[name])).version)


def is_locked(package, need):
    """Whether the lock has to hold this requirement of a package."""
    if need.marker and not need.marker.evaluate({"extra": ""}):
        return False
    name = canonicalize_name(need.name)
    return name not in NOT_IN_LOCK and (package, name) not in BELOW_FLOOR


@pytest.mark.parametrize("name", HASHED)
def test_every_locked_package_but_torch_has_its_hashes(name):
    """A release for several platforms has as many as files: its wheels and its source."""
    hashes = {}
    for line in lines(name):
        if "==" in line and not line.startswith("#"):
            hashes[line.split("==")[0]] = found = []
        elif "--hash=" in line:
            found.append(re.fullmatch(r" +--hash=sha256:([0-9a-f]{64})( \\)?", line)[1])
    assert set(hashes) == set(parse(lines(name)))
    assert all(found and len(set(found)) == len(found) for found in hashes.values())
    if name == "requirements.lock":
        assert set(LOCK) - set(hashes) == {"torch"}
        assert all(len(hashes[of_many]) > 20 for of_many in ("numpy", "pandas", "regex"))


def test_the_lock_is_complete_and_consistent():
    assert len(LOCK) > 100 and all(map(pinned, LOCK.values()))
    for name in LOCK:
        package = distribution(name)
        assert Version(package.version).public == str(version_of(name)), f"{name}: run make test"
        for need in map(Requirement, package.requires or []):
            other = canonicalize_name(need.name)
            if is_locked(name, need):
                assert other in LOCK, f"{name} needs {need}, which is not locked"
                assert need.specifier.contains(version_of(other), prereleases=True), (name, need)


def test_pyproject_agrees_with_the_lock():
    assert all(map(pinned, parse(EXTRAS["dev"]).values())), "another version formats otherwise"
    locked = [line for extra in LOCKED_EXTRAS for line in EXTRAS[extra]]
    wanted = parse([*PROJECT["dependencies"], *locked])
    for name, specifier in wanted.items():
        agrees = name in LOCK and specifier.contains(version_of(name))
        assert agrees, f"pyproject.toml asks for {name}{specifier}"


def test_environment_yml_is_the_lock_and_the_gpu_extras():
    by_pip = next(line["pip"] for line in CONDA["dependencies"] if isinstance(line, dict))
    pip = parse(by_pip)
    gpu = parse(EXTRAS["gpu"])
    assert {name: pip.get(name) for name in gpu} == gpu
    # conda's pip resolves, so certifi must satisfy Unsloth there; everything else that needs it
    # takes any newer one.
    certifi = pip.pop("certifi")
    assert certifi.contains("2026.10.19") and not certifi.contains(version_of("certifi"))
    shared = {name: specifier for name, specifier in pip.items() if name not in gpu}
    assert shared == {name: specifier for name, specifier in LOCK.items() if name != "certifi"}


def test_every_module_and_profile_is_packaged():
    found = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    packages = find_packages(str(ROOT), include=found["include"])
    folders = {ROOT.joinpath(*package.split(".")): package for package in packages}
    for module in (ROOT / "sage_lib").rglob("*.py"):
        assert module.parent in folders, f"{module} would not be installed"

    kept = PYPROJECT["tool"]["setuptools"]["package-data"]
    packaged = set()
    for folder, package in folders.items():
        for pattern in kept.get(package, ()):
            packaged |= set(folder.glob(pattern))
    assert ROOT / "sage_lib" / "py.typed" in packaged
    files = {path for path in (ROOT / "sage_lib").rglob("*") if path.is_file()}
    others = {path for path in files if path.suffix not in {".py", ".pyc"}}
    assert others == packaged, "files of sage_lib that package-data misses"


def test_the_set_up_of_colab_installs_what_make_installs():
    setup, makefile = ((ROOT / name).read_text() for name in ("tools/setup.sh", "Makefile"))
    for words in (
        r"sed -nE '/^(setuptools|wheel)==/,/[^\\]$",
        "--no-deps --no-build-isolation --require-hashes --requirement requirements.lock",
        "--no-warn-conflicts --requirement requirements-torch.lock",
        "--no-deps --no-build-isolation --editable .",
    ):
        assert words in setup and words in makefile
