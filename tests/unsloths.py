"""The trainer that Unsloth generates on a GPU, of its own functions, on a CPU.

Its package imports Triton there; its functions do not need it. What it would write into TRL's class
is read from its source file, compiled beside TRL's own functions and put onto TRL's class.
"""

import ast
import importlib.util
import inspect
import math
import os
import re
import sys
import textwrap
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import torch

#: What it decides by environment variables: packing into one row is for its own kernels.
SETTINGS = ("UNSLOTH_GRPO_SEQ_PACKING", "UNSLOTH_GRPO_PREFIX_GROUPER")
#: The functions that bear on log-probabilities and the loss, and where in TRL they stand.
REPLACED = (
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "compute_loss",
)


def _namespace():
    """Unsloth's module without its imports of kernels: all its functions, and the names that its
    generated file has from elsewhere."""
    import unsloth
    from unsloth_zoo import rl_replacements as zoo
    from unsloth_zoo.device_map_planner import detect_logit_transforms
    from unsloth_zoo.log import logger
    from unsloth_zoo.utils import Version

    names = {
        **{name: getattr(zoo, name) for name in dir(zoo) if not name.startswith("__")},
        **{"torch": torch, "os": os, "re": re, "inspect": inspect, "math": math, "sys": sys},
        **{"importlib": importlib, "textwrap": textwrap, "defaultdict": defaultdict},
        **{"nullcontext": nullcontext, "Version": Version, "logger": logger},
        "trl_version": Version("1.15.0"),
        "detect_logit_transforms": detect_logit_transforms,
        "device_synchronize": lambda: None,
        "DEVICE_TYPE_TORCH": "cpu",
        "UNSLOTH_ENABLE_LOGGING": False,
        "UNSLOTH_ZOO_HAS_HEAD_BIAS": True,
        "UNSLOTH_ZOO_HAS_MASKED_COL_GUARD": True,
        "UNSLOTH_GRPO_SEQ_PACKING_ON": False,
        "UNSLOTH_GRPO_PREFIX_GROUPER_ON": False,
        "_get_inference_mode_context_manager": lambda model: torch.no_grad(),
        "grpo_compute_loss_slow": zoo.grpo_compute_loss,
    }
    source = Path(unsloth.__file__).parent / "models" / "rl_replacements.py"
    tree = ast.parse(source.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    exec(compile(ast.Module(functions, []), str(source), "exec"), names)
    return names


def patch(monkeypatch):
    """Put Unsloth's functions onto TRL's GRPOTrainer, as its generated class has them."""
    from trl.trainer import grpo_trainer

    for name in SETTINGS:
        monkeypatch.setenv(name, "0")
    names = _namespace()
    cls = grpo_trainer.GRPOTrainer
    if cls.compute_loss.__code__.co_filename.startswith("<unsloth"):
        return
    for name in REPLACED:
        rewrite = names[
            f"grpo_trainer_{name.removeprefix('_') if name == 'compute_loss' else name}"
        ]
        text = rewrite(name, inspect.getsource(getattr(cls, name)))
        # Parsed anew in its module, so that its lines are those that Unsloth writes to its file.
        code = compile(textwrap.dedent(text), f"<unsloth {name}>", "exec")
        places = {**vars(grpo_trainer), **names}
        exec(code, places)
        monkeypatch.setattr(cls, name, places[name])
    for name in ("num_chunks", "grpo_mini_batch", "logit_chunk_multiplier"):
        monkeypatch.setattr(grpo_trainer.GRPOConfig, f"unsloth_{name}", None, raising=False)
