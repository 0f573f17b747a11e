"""The run record beside every result: what made it, from what, where and in which time."""

import contextlib
import functools
import os
import platform
import re
import resource
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from sage_lib.errors import SageError
from sage_lib.files import AGAIN, read_json, write_json
from sage_lib.paths import ROOT

PACKAGES = "torch transformers trl peft datasets accelerate unsloth unsloth_zoo math-verify numpy"
KEYS = {"stage", "profile", "fingerprint", "seed", "settings", "revision", "versions"}
KEYS |= {"machine", "seconds", "peak_memory_gb", "finished"}
#: Keys of the section ``collapsed``, which the record of a collapsed run has.
COLLAPSED = {"step", "reason"}
#: What a run measures and draws is its result: it does not count as a change of the code.
RESULTS = (":!data/published", ":!figures")


@functools.cache
def revision() -> str:
    """Return the commit of this checkout, with "+changes" when tracked files differ from it;
    "unknown" outside git. Later calls repeat the first answer: the checkout may change, and the
    code that this process has read does not."""

    def git(*words: str) -> str:
        command = ("git", "-C", str(ROOT), *words)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *RESULTS)
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Return the installed versions of Python and of each package."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES.split():
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def machine() -> dict[str, Any]:
    """Return processor, cores, memory (GB) and GPU: what a time depends on, not which machine it
    was."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
        model = named[1].strip() if named else model
    memory = round(psutil.virtual_memory().total / 1e9, 1)
    # Only a process that computes has torch, and only there does a GPU matter.
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
    return {"processor": model, "cores": os.cpu_count(), "memory_gb": memory, "gpu": gpu}


class Record:
    """Starts a clock; :meth:`finish` writes record.json, which marks the stage as done."""

    def __init__(
        self, stage: str, profile: str, fingerprint: str, seed: int, settings: dict[str, Any]
    ):
        self.started = time.perf_counter()
        self.fields: dict[str, Any] = {"stage": stage, "profile": profile}
        self.fields |= {"fingerprint": fingerprint, "seed": seed, "settings": settings}
        self.fields |= {"revision": revision(), "versions": versions()}

    def finish(self, path: Path, **extra: Any) -> dict[str, Any]:
        """Write the record with its wall time (seconds) and peak memory (GB); ``extra`` joins."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB, on macOS bytes
        record = {
            **self.fields,
            "machine": machine(),
            "seconds": round(time.perf_counter() - self.started, 2),
            "peak_memory_gb": round(peak / (1e9 if sys.platform == "darwin" else 1e6), 2),
            **extra,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(path, record)
        return record


def load(path: Path) -> dict[str, Any]:
    """Read a run record; SageError for a damaged one."""
    record: dict[str, Any] = read_json(path)
    is_whole = (
        isinstance(record, dict)
        and {*record} >= KEYS
        and {*(record.get("collapsed") or COLLAPSED)} >= COLLAPSED
        and isinstance(record["seconds"], (int, float))
    )
    if not is_whole:
        raise SageError(
            f"run record {path.parent.name}/{path.name} is damaged: delete it, and {AGAIN}"
        )
    return record


def require_whole(path: Path) -> None:
    """Raise SageError for a file whose size differs from the one in its record."""
    record = path.with_name("record.json")
    sizes = load(record).get("sizes", {}) if record.is_file() else {}
    if path.name in sizes and path.stat().st_size != sizes[path.name]:
        raise SageError(
            f"{'/'.join(path.parts[-3:])} lacks its end: delete its folder, and {AGAIN}"
        )


def collapse(path: Path) -> str:
    """Return when and why a run collapsed, by its record; "" for every other run."""
    collapsed = load(path).get("collapsed")
    return f"collapsed at step {collapsed['step']}: {collapsed['reason']}" if collapsed else ""


def done(path: Path, fingerprint: str) -> bool:
    """True when ``path`` holds the record of a finished stage made from the same settings."""
    return path.is_file() and load(path)["fingerprint"] == fingerprint
