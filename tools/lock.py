"""Write requirements.lock and environment.yml from the packages that are installed and pyproject.toml needs.

    python tools/lock.py      (or: make lock)

Install or upgrade what you want in .venv first; this walks the requirements of pyproject.toml through the installed
packages' own metadata and pins what it meets.
"""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
# Unsloth's GPU-only needs come with the extra "gpu"; torch's CUDA build brings triton.
GPU_ONLY = {"torchvision", "xformers", "bitsandbytes", "torchao", "diffusers", "triton"}
# Needed to install the project itself, editable and without a network.
BUILD = ["setuptools", "wheel"]
# Imported by Unsloth without being declared.
UNDECLARED = ["docstring-parser", "typeguard", "shtab"]
HEADER = "# Every package at one version; made by `make lock`. Install torch first, with its dependencies, then this with --no-deps.\n"


def walk(names: list[str]) -> dict[str, str]:
    """Name -> public version of the named packages and all they need, as installed."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [(canonicalize_name(name), frozenset()) for name in names]
    while queue:
        name, extras = queue.pop()
        if (name, extras) in seen or name in GPU_ONLY or name.startswith(("nvidia-", "cuda-")):
            continue
        seen.add((name, extras))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(
                f"{name} is needed and not installed: install it, then run this again"
            ) from None
        found[name] = Version(package.version).public
        for need in map(Requirement, package.requires or []):
            if need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                queue.append((canonicalize_name(need.name), frozenset(need.extras)))
    return dict(sorted(found.items()))


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        Requirement(r).name
        for r in [*project["dependencies"], *project["optional-dependencies"]["test"]]
    ]
    lock = walk([*wanted, *UNDECLARED, *BUILD])
    (ROOT / "requirements.lock").write_text(
        HEADER + "".join(f"{n}=={v}\n" for n, v in lock.items())
    )
    lines = [
        f"{n}=={v}"
        if n != "certifi"
        else "certifi>=2026.10.19  # conda's pip resolves, and Unsloth asks for this"
        for n, v in lock.items()
    ]
    lines += [f"{r}  # GPU" for r in project["optional-dependencies"]["gpu"]]
    (ROOT / "environment.yml").write_text(
        "# conda env create -f environment.yml: the same versions as requirements.lock, and the GPU extras. Made by `make lock`.\n"
        "name: sage-companion\nchannels: [conda-forge]\ndependencies:\n  - python=3.11\n  - pip\n  - make\n  - git\n  - pip:\n"
        + "".join(f"      - {line}\n" for line in lines)
    )
    print(f"requirements.lock: {len(lock)} packages; environment.yml: {len(lines)}")


if __name__ == "__main__":
    main()
