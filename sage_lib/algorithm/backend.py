"""The one place that imports TRL: plain, unless the process imported Unsloth first.

Every module that trains imports from here. Unsloth is imported first where this TRL cannot train on
this machine without it (:mod:`unsloth_first`), and nowhere else.
"""

from typing import TYPE_CHECKING, Any

from sage_lib.algorithm import unsloth_first

if unsloth_first.is_needed():
    unsloth_first.load("trl 1.16 or newer, which trains without a GPU by itself")

# isort: split

import trl
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model, use_adapter

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.sft_config import SFTConfig

    # No static type describes what Unsloth makes of the trainers.
    GRPOTrainer: Any
    SFTTrainer: Any
else:
    GRPOConfig, GRPOTrainer = trl.GRPOConfig, trl.GRPOTrainer
    SFTConfig, SFTTrainer = trl.SFTConfig, trl.SFTTrainer

#: Whether Unsloth has put a trainer of its own in the place of GRPOTrainer, as it does on a GPU.
REPLACED: bool = any(
    "unsloth" in f"{cls.__module__}.{cls.__qualname__}".lower() for cls in GRPOTrainer.__mro__
)

__all__ = [
    "REPLACED",
    "GRPOConfig",
    "GRPOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "add_fused_lm_head",
    "disable_dropout_in_model",
    "use_adapter",
]
