"""GuidedTrainer: the parts of SageTrainer that the other modules here use, as a type.

Those without a comment are GRPOTrainer's own. This module loads without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from trl.trainer.grpo_config import GRPOConfig

    from sage_lib.algorithm.advantages import AdvantageShaper
    from sage_lib.algorithm.backend import Batch
    from sage_lib.algorithm.forward_kl import HiddenStates
    from sage_lib.algorithm.guides import Guide
    from sage_lib.algorithm.kl_forms import KlForm


def is_sharded(trainer: GuidedTrainer) -> bool:
    """Return whether no process holds whole weights, as under FSDP and ZeRO."""
    return trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled


class GuidedTrainer(Protocol):
    """A trainer as :class:`sage_lib.algorithm.trainer.SageTrainer` is one."""

    args: GRPOConfig
    accelerator: Any  # accelerate's, which has no types
    model: Any  # of transformers or PEFT, which have no types
    ref_model: Any  # the same; None where the reference is the model without its adapter
    state: Any
    train_dataset: Any
    beta: float
    loss_type: str
    importance_sampling_level: str
    top_entropy_quantile: float
    off_policy_mask_threshold: float | None
    num_generations: int
    num_iterations: int
    scale_rewards: str
    multi_objective_aggregation: str
    use_vllm: bool
    use_transformers_continuous_batching: bool
    aux_loss_enabled: bool
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    _entropy_bonus_enabled: bool
    _metrics: Mapping[str, Mapping[str, list[float]]]
    _step: int
    _tokenizer: Any

    # SageTrainer's arguments.
    guide: Guide | None
    kl_form: KlForm | None
    advantage: AdvantageShaper | None
    other_reference: bool
    reference_reset: int
    resampling: int  # dynamic_sampling
    merge_adapter: bool
    trim_padding: bool
    share_prompts: bool

    # Its state.
    shaped_at_scoring: bool  # it is Unsloth's trainer
    reached_loss: bool  # the guide was seen in the loss
    states: HiddenStates | None  # of the last pass, for a KL over the whole vocabulary
    prompt_generator: torch.Generator

    def _mean(self, per_token: torch.Tensor, mask: torch.Tensor) -> float: ...

    def _record(self, name: str, value: float) -> None: ...

    def _reduced(self, per_token: torch.Tensor, batch: Batch) -> torch.Tensor: ...

    def _policy_signals(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]: ...

    def _scored(self, inputs: list[dict[str, Any]]) -> Batch: ...
