"""TRL's classes and batches. TRL is imported here alone, and after Unsloth where this TRL cannot
train on this machine without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sage_lib.algorithm import unsloth_first

if unsloth_first.is_needed():
    unsloth_first.load_unsloth("trl 1.16 or newer, which trains without a GPU by itself")

# isort: split

import torch
import trl
from trl.trainer import callbacks, utils

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig as GRPOConfig
    from trl.trainer.sft_config import SFTConfig as SFTConfig

    # No static type describes what Unsloth makes of the trainers.
    GRPOTrainer: Any
    SFTTrainer: Any
else:
    GRPOConfig, GRPOTrainer = trl.GRPOConfig, trl.GRPOTrainer
    SFTConfig, SFTTrainer = trl.SFTConfig, trl.SFTTrainer

add_fused_lm_head, use_adapter = utils.add_fused_lm_head, utils.use_adapter
disable_dropout_in_model = utils.disable_dropout_in_model
SyncRefModelCallback = callbacks.SyncRefModelCallback

#: Whether Unsloth has replaced GRPOTrainer by its trainer, as it does on a GPU.
REPLACED: bool = any(
    "unsloth" in f"{cls.__module__}.{cls.__qualname__}".lower() for cls in GRPOTrainer.__mro__
)

#: Names to tensors with a row for each completion; those of tokens have shape (batch, time).
Batch = dict[str, Any]


def counted_tokens(batch: Batch) -> torch.Tensor:
    """Return the tokens that TRL's loss counts: 1 or 0, shape (batch, time)."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def whole_rows(batch: Batch) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Return token ids of prompts and completions, shape (batch, prompt and time), the columns of
    the prompts, and the attention mask, shape of the ids."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    return ids, batch["prompt_ids"].shape[1], attention
