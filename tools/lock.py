"""Write requirements*.lock, environment.yml and the table of docs/licences.md from what is
installed and pyproject.toml needs.

    python tools/lock.py      (or: make lock)

Install or upgrade what you want in .venv first; this walks the requirements of pyproject.toml
through the installed packages' own metadata and pins what it meets. The hashes are those of every
file of a release, whatever machine it is for, as uv reads them from the package index.
"""

import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import distribution, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
#: Extras that are installed with the project itself: Unsloth, its tests and its habits.
LOCKED_EXTRAS = ("train", "notebooks", "unsloth", "test", "dev")
#: Unsloth's GPU-only needs come with the extra "gpu"; torch's CUDA build brings triton.
GPU_ONLY = {"torchvision", "xformers", "bitsandbytes", "torchao", "diffusers", "triton"}
#: Needed to install the project itself, editable and without a network.
BUILD = ["setuptools", "wheel"]
#: Imported by Unsloth without being declared.
UNDECLARED = ["docstring-parser", "typeguard", "shtab"]
#: conda's pip resolves, and Unsloth asks for a newer certifi than every mirror has.
CERTIFI = "certifi>=2026.10.19  # conda's pip resolves, and Unsloth asks for this"
#: Its build is the machine's, for a processor or a CUDA version: it has a version and no hashes.
TORCH = "torch"

SITE_HEAD = """\
# What the site is built with, besides requirements.lock; made by `make lock`, installed by
# `make site` with --no-deps --require-hashes.
"""
LOCK_HEAD = """\
# Every package but torch at one version, with the hashes of its release; made by `make lock`.
# Install this with --no-deps --require-hashes, then requirements-torch.lock with its dependencies.
"""
TORCH_HEAD = """\
# torch, whose build depends on the machine; made by `make lock`, installed after requirements.lock.
"""
CONDA_HEAD = """\
# conda env create -f environment.yml: the same versions as requirements.lock, and the GPU extras.
# Made by `make lock`.
name: sage-companion
channels: [conda-forge]
dependencies:
  - python=3.11
  - pip
  - make
  - git
  - pip:
"""


def walk(names: list[str]) -> dict[str, str]:
    """Name -> public version of the named packages and all they need, as installed."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [(str(canonicalize_name(name)), frozenset[str]()) for name in names]
    while queue:
        name, extras = queue.pop()
        comes_with_the_gpu = name in GPU_ONLY or name.startswith(("nvidia-", "cuda-"))
        if (name, extras) in seen or comes_with_the_gpu:
            continue
        seen.add((name, extras))
        package = distribution(name)
        versions[name] = Version(package.version).public
        for need in map(Requirement, package.requires or []):
            marker = need.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *extras)):
                queue.append((str(canonicalize_name(need.name)), frozenset(need.extras)))
    return dict(sorted(versions.items()))


def hashed(pins: list[str]) -> str:
    """The pins as lines of a lock, each with the SHA-256 of every file of its release."""
    from uv import find_uv_bin

    words = "pip compile - --quiet --no-deps --generate-hashes --no-annotate --no-header --python"
    done = subprocess.run(
        [find_uv_bin(), *words.split(), sys.executable],
        input="\n".join(pins),
        text=True,
        capture_output=True,
    )
    if done.returncode:
        raise SystemExit(f"the hashes could not be had: {done.stderr.strip()}")
    return done.stdout


def licence(name: str) -> str:
    """What a package's metadata says: an expression, a few words or a classifier."""
    fields = metadata(name)
    [expression, *_], [words, *_] = (
        fields.get_all(key) or [""] for key in ("License-Expression", "License")
    )
    classes = [
        c.split(" :: ")[-1] for c in fields.get_all("Classifier") or [] if c[:7] == "License"
    ]
    in_short = words if len(words) < 60 and words != "UNKNOWN" else ""
    return expression or in_short or "; ".join(classes) or "only a licence file"


def licences(names: list[str]) -> str:
    """A table in Markdown: a line a licence, with the packages that have it."""
    packages = defaultdict(list)
    for name in names:
        packages[licence(name)].append(name)
    rows = sorted(packages.items(), key=lambda row: (-len(row[1]), row[0]))
    lines = [f"| {said} | {', '.join(having)} |\n" for said, having in rows]
    return "| licence | packages |\n| --- | --- |\n" + "".join(lines)


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [*project["dependencies"], *(line for extra in LOCKED_EXTRAS for line in extras[extra])]
    lock = walk([*(Requirement(line).name for line in needs), *UNDECLARED, *BUILD])

    pins = [f"{name}=={version}" for name, version in lock.items()]
    without_torch = [pin for pin in pins if pin != f"{TORCH}=={lock[TORCH]}"]
    (ROOT / "requirements.lock").write_text(LOCK_HEAD + hashed(without_torch))
    (ROOT / "requirements-torch.lock").write_text(f"{TORCH_HEAD}{TORCH}=={lock[TORCH]}\n")

    site = walk([Requirement(line).name for line in extras["site"]])
    of_site = [f"{name}=={version}" for name, version in site.items() if name not in lock]
    (ROOT / "requirements-site.lock").write_text(SITE_HEAD + hashed(of_site))

    conda = [CERTIFI if pin.startswith("certifi==") else pin for pin in pins]
    conda += [f"{requirement}  # GPU" for requirement in extras["gpu"]]
    (ROOT / "environment.yml").write_text(
        CONDA_HEAD + "".join(f"      - {line}\n" for line in conda)
    )
    page = ROOT / "docs" / "licences.md"
    head, begin, _ = page.read_text().partition("| licence | packages |\n")
    page.write_text(head + (licences(list(lock)) if begin else ""))
    print(f"requirements.lock: {len(without_torch)} packages")
    print(f"requirements-site.lock: {len(of_site)}, environment.yml: {len(conda)}")


if __name__ == "__main__":
    main()
