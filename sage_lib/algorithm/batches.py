"""Batches as TRL's trainer makes them: a mapping from names to tensors, a row for each completion.

What SageTrainer reads of them beside the loss. Tensors of completions have shape (batch, time).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: TRL's own type of a batch.
Batch = dict[str, Any]


def counted_tokens(batch: Batch) -> torch.Tensor:
    """The tokens that TRL's loss counts: 1 or 0, shape (batch, time)."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def groups_without_spread(batch: Batch, generations: int) -> torch.Tensor:
    """Groups whose rewards are all equal, and so teach nothing: bool of shape (groups,)."""
    advantages: torch.Tensor = batch["advantages"]
    return advantages.view(-1, generations).abs().amax(1) < 1e-6


def replace_rows(
    batch: Batch, rows: list[int], fresh: Batch, fresh_rows: list[int], pad_token: int
) -> Batch:
    """``batch`` with ``rows`` taken from ``fresh_rows`` of another batch.

    Both are padded to the longer of the two: prompts on the left, everything else on the right.
    What has no row for each completion stays as it was.
    """
    size, fresh_size = batch["completion_ids"].shape[0], fresh["completion_ids"].shape[0]
    merged = dict(batch)
    for key, value in batch.items():
        if key not in fresh:
            continue
        other = fresh[key]
        if not (_has_rows(value, size) and _has_rows(other, fresh_size)):
            continue
        if value.dim() > 1:
            width = max(value.shape[1], other.shape[1])
            fill = pad_token if key.endswith("_ids") else 0
            value = _widened(value, width, fill, left=key.startswith("prompt"))
            other = _widened(other, width, fill, left=key.startswith("prompt"))
        value = value.clone()
        value[rows] = other[fresh_rows]
        merged[key] = value
    return merged


def _has_rows(value: Any, size: int) -> bool:
    import torch

    return torch.is_tensor(value) and value.dim() > 0 and value.shape[0] == size


def _widened(x: torch.Tensor, width: int, fill: int, left: bool) -> torch.Tensor:
    import torch

    extra = x.new_full((x.shape[0], width - x.shape[1], *x.shape[2:]), fill)
    return torch.cat([extra, x] if left else [x, extra], dim=1)
