"""Batches as TRL's trainer makes them: a mapping from names to tensors, a row for each completion.

What SageTrainer reads of them beside the loss. Tensors of completions have shape (batch, time).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Rewards that differ by less than this share of their size are equal: sums in float32.
ROUNDING = 1e-6
#: TRL's own type of a batch.
Batch = dict[str, Any]


def counted_tokens(batch: Batch) -> torch.Tensor:
    """The tokens that TRL's loss counts: 1 or 0, shape (batch, time)."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def groups_without_spread(terms: torch.Tensor, generations: int) -> torch.Tensor:
    """Groups whose rewards are all equal, and so teach nothing: bool of shape (groups,).

    Advantages do not tell: TRL takes the mean of eight rewards of 0.7 in float32, which is not 0.7,
    and divides what is left by a standard deviation as small.

    Args:
        terms: each reward times its weight, float32 of shape (groups · generations, functions), not
            a number where a function gave none. A completion with none at all teaches nothing.
    """
    import torch

    grouped = terms.view(-1, generations, terms.shape[1])
    rewards, scored = grouped.nansum(2), ~grouped.isnan().all(2)
    highest = rewards.masked_fill(~scored, -torch.inf).amax(1)
    lowest = rewards.masked_fill(~scored, torch.inf).amin(1)
    size = grouped.abs().nansum(2).amax(1)
    return highest - lowest <= ROUNDING * size


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
