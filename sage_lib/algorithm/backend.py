"""The one place that imports Unsloth and TRL, in the order that works.

Unsloth comes first: on a GPU it replaces TRL's trainers, and on a CPU without Triton plain TRL 1.15
has no kernel for its chunked log-probabilities until Unsloth supplies one. Every module that trains
imports from here.
"""

import os
from typing import TYPE_CHECKING, Any

# TRL and Unsloth write caches of compiled code below the working directory unless told otherwise;
# one run's cache must not meet another's, so the stages point this at their own folder before they
# import this module.
os.environ.setdefault(
    "UNSLOTH_COMPILE_LOCATION",
    os.path.join(os.path.expanduser("~"), ".cache", "sage-companion", "unsloth"),
)

# isort: off
import unsloth  # noqa: F401  (must come before trl)
import trl
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model, use_adapter
from unsloth import FastLanguageModel
# isort: on

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.sft_config import SFTConfig

    # No static type describes what Unsloth makes of the trainers.
    GRPOTrainer: Any
    SFTTrainer: Any
else:
    GRPOConfig, GRPOTrainer = trl.GRPOConfig, trl.GRPOTrainer
    SFTConfig, SFTTrainer = trl.SFTConfig, trl.SFTTrainer

__all__ = [
    "FastLanguageModel",
    "GRPOConfig",
    "GRPOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "add_fused_lm_head",
    "disable_dropout_in_model",
    "use_adapter",
]
