"""LoRA merged into the layers it adapts while nothing is differentiated, without touching a weight.

Each adapted layer computes x·Wᵀ + s·(x·Aᵀ)·Bᵀ: three products where one with W + s·B·A does. For
the time of a ``with`` block a plain layer with these weights stands in the adapted layer's place.
Base and adapter are read, never written, so there is nothing to subtract again: after the block,
however it ends, they are bit for bit what they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn


@contextmanager
def merged_adapters(model: nn.Module) -> Iterator[int]:
    """Let plain layers stand in for the LoRA layers of ``model``, with what is active in each.

    A layer for which that would be another function, beyond the rounding of single precision, stays
    as it is, as :func:`_stand_in` has it: the others are merged all the same. It takes the memory
    of the merged layers' weights once more, for as long as the block lasts. Not for sharded
    weights.

    Yields the number of layers that are merged.
    """
    found = [(name, layer) for name, layer in model.named_modules() if type(layer) is LoraLinear]
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for name, layer in found:
            plain = _stand_in(layer)
            if plain is not None:
                above, _, own = name.rpartition(".")
                parent = model.get_submodule(above)
                replaced.append((parent, own, layer))
                setattr(parent, own, plain)
        yield len(replaced)
    finally:
        for parent, own, layer in replaced:
            setattr(parent, own, layer)


@torch.no_grad()
def _stand_in(layer: LoraLinear) -> nn.Linear | None:
    """One layer that computes what ``layer`` does; None where there is none.

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
    weight = base.weight
    for adapter in active:
        weight = weight + layer.get_delta_weight(adapter)
    # On the device meta nothing is allocated, and nothing drawn from a random stream.
    merged = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    merged.bias = base.bias
    return merged


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
