"""One environment, described three times: pyproject.toml, requirements.lock and environment.yml agree, and are complete."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from ruamel.yaml import YAML

from sage_lib.paths import ROOT

#: What the lock leaves out on purpose: GPU-only needs of Unsloth, and its floor for certifi, newer than every mirror has.
NOT_IN_LOCK = {"torchvision", "xformers", "bitsandbytes", "torchao", "diffusers", "triton"}
BELOW_FLOOR = {("unsloth", "certifi"), ("unsloth-zoo", "certifi")}


def parse(lines):
    found = {}
    for line in lines:
        line = line.split("#")[0].strip()
        if line:
            requirement = Requirement(line)
            found[canonicalize_name(requirement.name)] = requirement.specifier
    return found


LOCK = parse((ROOT / "requirements.lock").read_text().splitlines())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = YAML(typ="safe").load((ROOT / "environment.yml").read_text())


def pinned(specifier):
    return len(specifier) == 1 and next(iter(specifier)).operator == "=="


def version_of(name):
    return Version(next(iter(LOCK[name])).version)


def test_every_locked_package_has_one_exact_version():
    assert len(LOCK) > 100 and all(pinned(s) for s in LOCK.values())


@pytest.mark.parametrize("name", sorted(LOCK))
def test_the_lock_is_complete_and_consistent(name):
    try:
        needs = distribution(name).requires or []
    except PackageNotFoundError:
        pytest.fail(
            f"{name} is locked and not installed: run make test, or install requirements.lock"
        )
    assert Version(distribution(name).version).public == str(version_of(name))
    for need in map(Requirement, needs):
        other = canonicalize_name(need.name)
        if (
            (need.marker and not need.marker.evaluate({"extra": ""}))
            or other in NOT_IN_LOCK
            or (name, other) in BELOW_FLOOR
        ):
            continue
        assert other in LOCK, f"{name} needs {need}, which is not locked"
        assert need.specifier.contains(version_of(other), prereleases=True), (
            f"{name} needs {need}, and {version_of(other)} is locked"
        )


def test_pyproject_agrees_with_the_lock():
    for name, specifier in parse(
        [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
    ).items():
        assert name in LOCK and specifier.contains(version_of(name)), (
            f"pyproject.toml asks for {name}{specifier}"
        )


def test_environment_yml_is_the_lock_and_the_gpu_extras():
    conda = [d for d in CONDA["dependencies"] if isinstance(d, str)]
    pip = parse(next(d["pip"] for d in CONDA["dependencies"] if isinstance(d, dict)))
    gpu = parse(PROJECT["optional-dependencies"]["gpu"])
    assert any(d.startswith("python=3.11") for d in conda) and {"pip", "make", "git"} <= set(conda)
    assert {n: s for n, s in pip.items() if n not in gpu and n != "certifi"} == {
        n: s for n, s in LOCK.items() if n != "certifi"
    }
    assert {n: pip.get(n) for n in gpu} == gpu
    # conda's pip resolves, so certifi must satisfy Unsloth there; everything that needs it takes any newer one.
    assert not pip["certifi"].contains(version_of("certifi")) and pip["certifi"].contains(
        "2026.10.19"
    )
