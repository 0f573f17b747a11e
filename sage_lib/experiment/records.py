"""The run record that stands beside every result: what made it, from what, where and in which
time."""

import contextlib
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import read_json, write_json
from sage_lib.paths import ROOT

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "accelerate",
    "unsloth",
    "unsloth_zoo",
    "math-verify",
    "numpy",
)
KEYS = {
    "stage",
    "profile",
    "fingerprint",
    "seed",
    "settings",
    "revision",
    "versions",
    "machine",
    "seconds",
    "peak_memory_gb",
    "finished",
}


def revision() -> str:
    """The commit this checkout stands at, with "+changes" when tracked files differ from it;
    "unknown" outside git."""
    try:

        def run(*args: str) -> str:
            return subprocess.run(
                ("git", "-C", str(ROOT), *args), capture_output=True, text=True, check=True
            ).stdout.strip()

        # What a run measures and draws is its result, not its cause: only the rest counts as a
        # change.
        changed = run(
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ".",
            ":!data/published",
            ":!figures",
        )
        return run("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Python's and each package's installed version."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """Processor, cores, memory in GB and accelerator: what a time depends on, nothing that names
    the machine."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = next(iter(named), model)
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (ValueError, OSError):
        memory = float("nan")
    # Only a process that computes has torch, and only there does a GPU matter.
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
    return {"processor": model, "cores": os.cpu_count(), "memory_gb": round(memory, 1), "gpu": gpu}


def peak_memory_gb() -> float:
    """Largest resident set of this process so far, in GB (ru_maxrss is in kB on Linux and in bytes
    on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6)


class Record:
    """Starts a clock; :meth:`finish` writes record.json, which marks the stage as done."""

    def __init__(
        self, stage: str, profile: str, fingerprint: str, seed: int, settings: dict[str, Any]
    ):
        self.started = time.perf_counter()
        self.fields = {
            "stage": stage,
            "profile": profile,
            "fingerprint": fingerprint,
            "seed": seed,
            "settings": settings,
            "revision": revision(),
            "versions": versions(),
        }

    def finish(self, path: Path, **extra: Any) -> dict[str, Any]:
        """Write the record with its wall time (seconds, of this process) and peak memory (GB).
        ``extra`` joins it."""
        record = {
            **self.fields,
            "machine": machine(),
            "seconds": round(time.perf_counter() - self.started, 2),
            "peak_memory_gb": round(peak_memory_gb(), 2),
            **extra,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(path, record)
        return record


def load(path: Path) -> dict[str, Any]:
    """Read a run record; SageError names what is missing from a damaged one."""
    record = read_json(path)
    missing = KEYS - set(record) if isinstance(record, dict) else KEYS
    if missing:
        raise SageError(
            f"run record {path.parent.name}/{path.name} lacks {', '.join(sorted(missing))}: "
            "delete it and run with --resume to make it again"
        )
    seconds, collapsed = record["seconds"], record.get("collapsed")
    numbers = isinstance(seconds, (int, float)) and isinstance(record["fingerprint"], str)
    told = isinstance(collapsed, dict) and {"step", "reason"} <= set(collapsed)
    if not numbers or not (told or collapsed is None):
        raise SageError(
            f"run record {path.parent.name}/{path.name} is damaged: "
            "delete it and run with --resume to make it again"
        )
    return record


def require_whole(path: Path) -> None:
    """SageError for a text file beside a record that has lost its end.

    By the size that the record has of it; a published file may be thinned, and older records have
    none: then by its last line's end.
    """
    record, size = path.with_name("record.json"), None
    if record.is_file() and paths.PUBLISHED not in path.parents:
        size = load(record).get("sizes", {}).get(path.name)
    data = path.read_bytes()
    if len(data) != (len(data) if size is None else size) or not data.endswith(b"\n"):
        raise SageError(
            f"{'/'.join(path.parts[-3:])} lacks its end: delete its folder and run with --resume "
            "to make it again"
        )


def collapse(path: Path) -> str:
    """What the record of a run that collapsed says of that; "" of every other run."""
    found = load(path).get("collapsed")
    return f"collapsed at step {found['step']}: {found['reason']}" if found else ""


def done(path: Path, fingerprint: str) -> bool:
    """True when ``path`` holds the record of a finished stage made from the same settings."""
    return path.is_file() and load(path)["fingerprint"] == fingerprint
