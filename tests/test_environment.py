"""One environment, described three times: pyproject.toml, requirements.lock and environment.yml
agree, and are complete; what is packaged is all there is."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution

import pytest
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


def test_every_locked_package_has_one_exact_version():
    assert len(LOCK) > 100 and all(pinned(specifier) for specifier in LOCK.values())


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


def test_no_lock_with_hashes_is_installed_without_them():
    asked = re.findall(r"\$\(PIP\)(.*)--requirement (\S+)", (ROOT / "Makefile").read_text())
    assert {name for _, name in asked} == {*HASHED, "requirements-torch.lock"}
    for words, name in asked:
        assert ("--require-hashes" in words and "--no-deps" in words) == (name in HASHED)


def test_a_package_that_is_not_the_release_is_refused(tmp_path):
    """Another six of the same version lies on the index, and pip is told what make test tells it,
    of six alone."""
    wheel, info = tmp_path / f"six-{version_of('six')}-py2.py3-none-any.whl", "six.dist-info"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("six.py", "")
        packed.writestr(f"{info}/METADATA", f"Name: six\nVersion: {version_of('six')}\n")
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py2-none-any\n")
    whole = (ROOT / "requirements.lock").read_text().replace("\\\n", "")
    (tmp_path / "six.lock").write_text(next(n for n in whole.splitlines() if n.startswith("six==")))
    makefile = (ROOT / "Makefile").read_text()
    [given] = re.findall(r"\$\(PIP\) (.*) --requirement requirements.lock", makefile)
    words = [*given.split(), "--requirement", str(tmp_path / "six.lock"), "--dry-run"]
    index = ["--isolated", "--no-index", "--find-links", str(tmp_path), "--ignore-installed"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *words, *index], capture_output=True, text=True
    )
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize("name", sorted(LOCK))
def test_the_lock_is_complete_and_consistent(name):
    try:
        package = distribution(name)
    except PackageNotFoundError:
        pytest.fail(f"{name} is locked and not installed: run make test")
    assert Version(package.version).public == str(version_of(name))
    for need in map(Requirement, package.requires or []):
        if not is_locked(name, need):
            continue
        other = canonicalize_name(need.name)
        assert other in LOCK, f"{name} needs {need}, which is not locked"
        agrees = need.specifier.contains(version_of(other), prereleases=True)
        assert agrees, f"{name} needs {need}, and {version_of(other)} is locked"


def test_pyproject_agrees_with_the_lock():
    wanted = parse([*PROJECT["dependencies"], *EXTRAS["test"], *EXTRAS["dev"]])
    for name, specifier in wanted.items():
        agrees = name in LOCK and specifier.contains(version_of(name))
        assert agrees, f"pyproject.toml asks for {name}{specifier}"


def test_the_page_of_licences_names_every_package_once_and_counts_what_is_under_agpl():
    page = (ROOT / "docs" / "licences.md").read_text()
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    assert sorted(name for _, names in rows for name in names.split(", ")) == sorted(LOCK)
    said = {name: licence for licence, names in rows for name in names.split(", ")}
    # By the packages' own LICENSE files.
    assert said["numpy"].startswith("BSD-3-Clause") and said["certifi"] == "MPL-2.0"
    assert said["unsloth"] == "Apache-2.0" and said["unsloth-zoo"] == "LGPL-3.0-or-later"
    for name, place in (("unsloth-zoo", "unsloth_zoo/cpu/"), ("unsloth", None)):
        modules = [file for file in distribution(name).files if file.suffix == ".py"]
        under = {
            str(file) for file in modules if "Affero General Public" in file.locate().read_text()
        }
        assert f"{len(under)} of {len(modules):,} " in page
        assert place is None or {str(f) for f in modules if str(f).startswith(place)} <= under


@pytest.mark.slow
def test_the_bill_of_materials_has_every_package_with_its_licence(tmp_path):
    tool = ROOT / ".venv" / "tools" / "bin" / "cyclonedx-py"
    if not tool.is_file():
        pytest.skip("make sbom installs the tool")
    words = ["environment", sys.executable, "--output-reproducible", "--output-file"]
    subprocess.run([tool, *words, tmp_path / "a.json"], check=True)
    made = json.loads((tmp_path / "a.json").read_text())
    assert made["bomFormat"] == "CycloneDX"
    found = {canonicalize_name(one["name"]): one for one in made["components"]}
    assert set(LOCK) <= set(found) and str(ROOT) not in json.dumps(made["components"])
    assert sum("licenses" in found[name] for name in LOCK) > 0.9 * len(LOCK)


def test_the_tools_of_make_lint_have_one_exact_version():
    """Another version formats otherwise, and finds other errors."""
    assert all(pinned(specifier) for specifier in parse(EXTRAS["dev"]).values())


def test_environment_yml_is_the_lock_and_the_gpu_extras():
    conda = [line for line in CONDA["dependencies"] if isinstance(line, str)]
    by_pip = next(line["pip"] for line in CONDA["dependencies"] if isinstance(line, dict))
    pip = parse(by_pip)
    gpu = parse(EXTRAS["gpu"])
    assert any(line.startswith("python=3.11") for line in conda)
    assert {"pip", "make", "git"} <= set(conda)
    assert {name: pip.get(name) for name in gpu} == gpu
    # conda's pip resolves, so certifi must satisfy Unsloth there; everything else that needs it
    # takes any newer one.
    certifi = pip.pop("certifi")
    assert certifi.contains("2026.10.19") and not certifi.contains(version_of("certifi"))
    shared = {name: specifier for name, specifier in pip.items() if name not in gpu}
    assert shared == {name: specifier for name, specifier in LOCK.items() if name != "certifi"}


def test_the_hooks_run_the_tools_of_the_environment():
    """A pinned tool in a second place would drift, and a hook that fetches needs a network."""
    hooks = YAML(typ="safe").load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [source["repo"] for source in hooks["repos"]] == ["local"]
    assert {hook["language"] for hook in hooks["repos"][0]["hooks"]} == {"system"}


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


def test_the_console_script_exists():
    module, _, function = PROJECT["scripts"]["sage-companion"].partition(":")
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    assert f"def {function}(" in path.read_text()
