"""Unsloth, which replaces TRL's classes on a GPU: imported before TRL, or not at all."""

import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sage_lib.errors import SageError

# Unsloth writes compiled code below the working directory unless told otherwise. The stages point
# this at a run's own folder first: one run's cache must not meet another's.
_CACHE = Path.home() / ".cache" / "sage-companion" / "unsloth"
os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(_CACHE))
# Else it tells a server, by what it downloads, on which cloud and card it runs.
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")

#: The first TRL whose log-probabilities need no Triton kernel.
PORTABLE_TRL = (1, 16)


def is_installed() -> bool:
    return importlib.util.find_spec("unsloth") is not None


def is_loaded() -> bool:
    return "unsloth" in sys.modules


def is_needed() -> bool:
    """Return whether this TRL needs a Triton kernel that this machine cannot run."""
    installed = tuple(int(part) for part in version("trl").split(".")[:2])
    runs_kernel = has_gpu() and importlib.util.find_spec("triton") is not None
    return installed < PORTABLE_TRL and not runs_kernel


def load_unsloth(otherwise: str = "set compute.backend to trl") -> None:
    """Import Unsloth. SageError where TRL came first on a GPU, or Unsloth is not installed."""
    if is_loaded():
        return
    if not is_installed():
        raise SageError(
            f"Unsloth is needed here and not installed: install the extra unsloth, or {otherwise}"
        )
    if comes_late():
        raise SageError(
            "Unsloth replaces TRL's classes and must be imported before them: "
            "start a new process, or restart the notebook's kernel"
        )
    try:
        import unsloth  # noqa: F401
    except Exception as error:  # it patches what it meets, and fails in many ways
        raise SageError(
            f"Unsloth is needed here and cannot be imported ({error!r:.120}): install the extra "
            f"unsloth at the versions of requirements.lock, or {otherwise}"
        ) from error


def comes_late() -> bool:
    """Return whether TRL's classes, which Unsloth would replace, are imported already."""
    return "trl" in sys.modules and has_gpu() and not is_loaded()


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()


def fast_language_model() -> Any:
    """Return Unsloth's class that loads models and adds adapters."""
    load_unsloth()
    from unsloth import FastLanguageModel

    return FastLanguageModel
