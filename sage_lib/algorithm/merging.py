"""LoRA merged into the layers it adapts for the time of a pass, without touching a weight.

Each adapted layer computes x·Wᵀ + s·(x·Aᵀ)·Bᵀ: three products where one with W + s·B·A does. For
the time of a ``with`` block a plain product with that sum stands in the adapted layer's place. Base
and adapter are read, never written, so there is nothing to subtract again: after the block, however
it ends, they are bit for bit what they were. Where gradients are taken, the sum is a step of their
way, and they arrive at A and B: where tokens are many and layers narrow, one gradient of the size
of W costs less than those of the four thin products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn


@contextmanager
def merged_adapters(model: nn.Module) -> Iterator[int]:
    """Let plain products stand in for the LoRA layers of ``model``, with what is active in each.

    A layer for which that would be another function, beyond the rounding of single precision, stays
    as it is, as :func:`_stand_in` has it: the others are merged all the same. It takes the memory
    of the merged layers' weights once more, for as long as the block lasts, or what was computed in
    it with gradients. Not for sharded weights, nor where layers run again after the block
    (gradient checkpointing).

    Yields the number of layers that are merged.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent, name, layer in _lora_layers(model):
            merged = _stand_in(layer)
            if merged is not None:
                replaced.append((parent, name, layer))
                setattr(parent, name, merged)
        yield len(replaced)
    finally:
        for parent, name, layer in replaced:
            setattr(parent, name, layer)


def _lora_layers(model: nn.Module) -> list[tuple[nn.Module, str, LoraLinear]]:
    """What each stands in, its name there, and the layer. What is in a layer is not looked
    through: a step merges four times, and most modules of an adapted model are parts of those."""
    found: list[tuple[nn.Module, str, LoraLinear]] = []
    for name, module in model.named_children():
        adapted = type(module) is LoraLinear
        found += [(model, name, module)] if adapted else _lora_layers(module)
    return found


class _Product(nn.Module):
    """x·weightᵀ + bias, where the weight may be made of others."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        # Past nn.Module, to which they would be parameters of the model: nothing is trained here.
        self.__dict__.update(weight=weight, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def _stand_in(layer: LoraLinear) -> nn.Module | None:
    """What computes the same as ``layer`` in one product; None where there is nothing.

    There is none for a base of fewer than 32 bits, or of a type of its own (4-bit, sharded, tensor
    parallel): most of a small adapter would be lost in the rounding of the sum. None for what is no
    fixed product: DoRA and its like, dropout in training, a bias of the adapter, and what somebody
    else has hooked into or merged.
    """
    base = layer.base_layer
    active = (
        [] if layer.disable_adapters else [a for a in layer.active_adapters if a in layer.lora_A]
    )
    plain = type(base) is nn.Linear and type(base.weight) is nn.Parameter
    if not plain or layer.merged or any(_is_hooked(module) for module in (layer, base)):
        return None
    if not all(_is_product(layer, adapter) for adapter in active):
        return None
    weight: torch.Tensor = base.weight
    for adapter in active:
        weight = weight + layer.get_delta_weight(adapter)
    return _Product(weight, base.bias)


def _is_product(layer: LoraLinear, adapter: str) -> bool:
    """Whether the adapter adds s·B·A to the base's weight and nothing else, in its precision."""
    dropout, weight = layer.lora_dropout[adapter], layer.base_layer.weight
    halves = (layer.lora_A[adapter], layer.lora_B[adapter])
    return (
        adapter not in layer.lora_variant
        and not layer.lora_bias[adapter]
        and (isinstance(dropout, nn.Identity) or not layer.training)
        and all(type(half) is nn.Linear and not _is_hooked(half) for half in halves)
        and all(half.weight.dtype == weight.dtype for half in halves)
        and all(half.weight.device == weight.device for half in halves)
        and weight.dtype in (torch.float32, torch.float64)
    )


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody changed what the module computes: hooks, or a method forward of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or "forward" in vars(module)
