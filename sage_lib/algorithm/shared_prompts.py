"""Each distinct prompt of a batch read once: the completions of a group have it in common.

Keys and values of a prompt do not depend on the completion. So the rows of a group share the
keys and values of a single pass, with its gradient, and the model computes only the columns after
the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from sage_lib.algorithm.padding import depends_on_width

#: Columns by which the room for keys and values grows.
ROOM = 64
#: The tensors of a pass with a row for each prompt, and those that are cut to the completion.
ROWS, CUT = ("input_ids", "attention_mask", "position_ids"), ("input_ids", "position_ids")


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values with room for more columns. A new token writes its columns after the old
    ones, where transformers copies all of them."""

    keys: Any
    values: Any
    room: Any = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.keys.shape[-2]
        after = before + key_states.shape[-2]
        room = self.room
        moved = room is None or room[0].data_ptr() != self.keys.data_ptr()  # other rows were chosen
        if moved or room[0].shape[-2] < after:
            ends = (0, 0, 0, after - before + ROOM)
            self.room = room = [nn.functional.pad(old, ends) for old in (self.keys, self.values)]
        for tensor, new in zip(room, (key_states, value_states), strict=True):
            tensor[..., before:after, :] = new
        self.keys, self.values = (tensor[..., :after, :] for tensor in room)
        return self.keys, self.values


@contextmanager
def prompts_read_once(model: PreTrainedModel, prompt: int | None = None) -> Iterator[None]:
    """Let passes of a model read each distinct prompt once, for the time of a ``with`` block.

    From the prompt's last column on, the results are the same up to rounding; hidden states of the
    columns before are 0. A pass is not changed where no two rows share a prompt, or where the model
    keeps more, or less, than keys and values of every column. ``model`` has no wrappers. ``prompt``
    is the columns of the padded prompts; None: all columns of a pass that starts to generate.
    """
    backbone, cached_columns = model.base_model, 0

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        nonlocal cached_columns
        cached_columns, inputs = 0, {k: value for k, value in kwargs.items() if value is not None}
        columns = _shared_columns(inputs, prompt)
        cache = _read(model, inputs, columns) if columns > 0 else None
        if cache is None:
            return None
        cached_columns = columns
        cut = {name: inputs[name][..., columns:] for name in CUT if name in inputs}
        return args, {**inputs, **cut, "past_key_values": cache, "use_cache": True}

    def after(module: Any, args: Any, output: Any) -> None:
        if cached_columns:  # the width of a whole pass, for callers that count columns
            states = output["last_hidden_state"]
            output["last_hidden_state"] = nn.functional.pad(states, (0, 0, cached_columns, 0))

    hooks = (
        backbone.register_forward_pre_hook(before, with_kwargs=True),
        backbone.register_forward_hook(after),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _shared_columns(inputs: dict[str, Any], prompt: int | None) -> int:
    """Return the columns of a pass that rows may share; 0 unless the pass is over whole rows."""
    ids, mask, past = (inputs.get(name) for name in (*ROWS[:2], "past_key_values"))
    begun = past is not None and (type(past) is not DynamicCache or past.get_seq_length() > 0)
    other_tensors = [
        name for name, value in inputs.items() if name not in ROWS and torch.is_tensor(value)
    ]
    inner = [name for name, value in inputs.items() if name.startswith("output_") and value]
    if ids is None or mask is None or ids.shape != mask.shape or begun or other_tensors or inner:
        return 0
    return (ids.shape[1] if prompt is None else prompt) - 1


def _read(model: Any, inputs: dict[str, Any], columns: int) -> DynamicCache | None:
    """Return keys and values of the first columns of each row; each distinct prompt is read once.
    None where the model cannot do without a whole pass."""
    # Layers that run again take no keys and values; some positions follow the widest row.
    recomputes_layers = model.training and model.is_gradient_checkpointing
    if recomputes_layers or depends_on_width(model.config):
        return None
    prompts = torch.cat([inputs[name][:, :columns] for name in ROWS[:2]], 1).tolist()
    numbers: dict[tuple[int, ...], int] = {}
    of_row = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
    if len(numbers) == len(of_row):
        return None
    first = [of_row.index(number) for number in range(len(numbers))]
    heads = {name: inputs[name][:, :columns] for name in ROWS if name in inputs}
    heads = {
        name: value[first] if len(value) == len(of_row) else value for name, value in heads.items()
    }
    # By the method, which does not run the hooks of the module.
    cache = model.base_model.forward(**heads, use_cache=True).get("past_key_values")
    if type(cache) is not DynamicCache or {type(layer) for layer in cache.layers} != {DynamicLayer}:
        return None
    cache.batch_select_indices(torch.tensor(of_row, device=inputs["input_ids"].device))
    if not torch.is_grad_enabled():
        for layer in cache.layers:
            layer.__class__ = RoomyLayer
    return cache
