"""LoRA merged into the adapted layers for the time of a pass, without a change of any weight.

Each adapted layer computes x·Wᵀ + s·(x·Aᵀ)·Bᵀ: three products where one with W + s·B·A does. For
the time of a ``with`` block a plain product with that sum replaces the adapted layer. Gradients go
through the sum to A and B, where that is quicker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from sage_lib.algorithm.guided_trainer import GuidedTrainer, is_sharded

#: Weights of the largest layer that is merged for a pass with gradients. The gradient of the sum
#: costs one more whole product, which takes longer than the adapter's two where layers are large.
SMALL = 2**17


@contextmanager
def merged_adapters(model: nn.Module, rounded: bool = False) -> Iterator[int]:
    """Replace the LoRA layers of a model by plain products, for the time of a ``with`` block.

    It takes the memory of those layers' weights once more, and yields the number of merged layers.
    Layers that no plain product equals stay as they are (:func:`_merged_layer`). With ``rounded``
    layers of 16 bits are merged, too, their sums rounded to 16 bits as in vLLM.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                merged = _merged_layer(layer, rounded) if type(layer) is LoraLinear else None
                if merged is not None:
                    replaced.append((parent, name, layer))
                    setattr(parent, name, merged)
        yield len(replaced)
    finally:
        for parent, name, layer in replaced:
            setattr(parent, name, layer)


def may_merge(trainer: GuidedTrainer) -> bool:
    """Return whether the adapter of a trainer's policy is to be merged, and can be."""
    t = trainer
    unsupported = t.use_vllm or t.use_transformers_continuous_batching or t.shaped_at_scoring
    return t.merge_adapter and isinstance(t.model, PeftModel) and not (unsupported or is_sharded(t))


def merged_to_score(trainer: GuidedTrainer, model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which the adapter is merged for a pass over whole completions.

    Nothing is merged for the reference, where layers run again in the backward pass, or where their
    products are rounded to half precision.
    """
    recomputes_layers = torch.is_grad_enabled() and trainer.model.is_gradient_checkpointing
    is_mixed_precision = trainer.accelerator.mixed_precision != "no"
    merges = (
        may_merge(trainer)
        and model is not trainer.ref_model
        and not recomputes_layers
        and not is_mixed_precision
    )
    return merged_adapters(trainer.model) if merges else nullcontext()


class _Product(nn.Module):
    """x·weightᵀ + bias, where the weight may be a sum of others."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        # Not by nn.Module, which would make them parameters of the model: nothing is trained here.
        self.__dict__.update(weight=weight, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def _merged_layer(layer: LoraLinear, rounded: bool) -> nn.Module | None:
    """Return a single product that equals a layer, or None.

    None for a base of fewer than 32 bits (unless ``rounded``) or of another type than nn.Linear;
    for DoRA, dropout in training, and a bias of the adapter; for a layer with hooks, or merged
    already. And None where it takes longer: for a large layer with gradients (:data:`SMALL`).
    """
    base, active = layer.base_layer, []
    if not layer.disable_adapters:
        active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    plain = type(base) is nn.Linear and type(base.weight) is nn.Parameter
    if not plain or layer.merged or _is_hooked(layer) or _is_hooked(base):
        return None
    if torch.is_grad_enabled() and base.weight.numel() > SMALL:
        return None
    is_16_bit = rounded and base.weight.dtype in (torch.bfloat16, torch.float16)
    weight: torch.Tensor = base.weight.float() if is_16_bit else base.weight
    for adapter in active:
        if not _is_product(layer, adapter, weight):
            return None
        weight = weight + layer.get_delta_weight(adapter)
    return _Product(weight.to(base.weight.dtype), base.bias)


def _is_product(layer: LoraLinear, adapter: str, weight: torch.Tensor) -> bool:
    """Return whether the adapter adds s·B·A to ``weight`` and nothing else, in its precision."""
    dropout = layer.lora_dropout[adapter]
    matrices = (layer.lora_A[adapter], layer.lora_B[adapter])
    return (
        adapter not in layer.lora_variant
        and not layer.lora_bias[adapter]
        and (isinstance(dropout, nn.Identity) or not layer.training)
        and all(type(matrix) is nn.Linear and not _is_hooked(matrix) for matrix in matrices)
        and all(matrix.weight.dtype == weight.dtype for matrix in matrices)
        and all(matrix.weight.device == weight.device for matrix in matrices)
        and weight.dtype in (torch.float32, torch.float64)
    )


def _is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a method forward set on the instance."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or "forward" in vars(module)
