"""Scoring without most of the padding: completions of about the same length together.

What follows a row's end changes nothing before it, so rows that end sooner are scored without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Rotary positions whose factors follow the widest row: a row alone would be scored differently.
OF_WIDTH = {"dynamic", "longrope"}
#: Share of all tokens of a batch, padding included, that one pass more must save.
WORTH = 0.1
#: Arguments of TRL's scoring pass that say nothing of single rows, beside those that are None.
OF_ALL_ROWS = ("batch_size", "compute_entropy")


def by_length(
    score: Callable[..., tuple[torch.Tensor, torch.Tensor | None, Any]],
    model: torch.nn.Module,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    keep: int,
    **asked: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """TRL's ``_get_per_token_logps_and_entropies``, once for each group of rows of about a length.

    Args:
        score: that method. It is called once, with all rows, where ``asked`` holds more of single
            rows (images), or asks for a mean over them (the router's loss of a mixture of experts).
        ids: of prompts and completions, shape (batch, prompt and time), as ``attention_mask``.
        keep: tokens that a completion may have, the columns of the result, which is that of
            ``score`` up to rounding, and 0 for padding that was not scored.
    """
    more = [value for name, value in asked.items() if name not in OF_ALL_ROWS]
    if any(value is not None and value is not False for value in more):
        return score(model, ids, attention_mask, keep, **asked)
    ends = attention_mask[:, -keep:].flip(1).argmax(1)  # of each row the padding after it
    lengths = torch.where(attention_mask[:, -keep:].any(1), keep - ends, 0)
    order = lengths.argsort(stable=True)
    groups = order.split(_sizes(lengths[order].tolist(), ids.shape[1] - keep))
    logps, entropies = [], []
    for rows in groups:
        # Of rows without a token one column is scored: none would be a tensor without columns.
        left = keep - max(1, int(lengths[rows].max()))
        columns = slice(ids.shape[1] - left)
        found, of_states, _ = score(
            model, ids[rows, columns], attention_mask[rows, columns], keep - left, **asked
        )
        logps.append(torch.nn.functional.pad(found, (0, left)))
        if of_states is not None:
            entropies.append(torch.nn.functional.pad(of_states, (0, left)))
    back = order.argsort()
    return torch.cat(logps)[back], torch.cat(entropies)[back] if entropies else None, None


def _sizes(lengths: list[int], prompt: int) -> list[int]:
    """How many rows each group has: cut in two where that saves most, and the parts again."""
    worth = WORTH * len(lengths) * (prompt + lengths[-1])

    def cut(some: list[int]) -> list[int]:
        saved = [n * (some[-1] - some[n - 1]) for n in range(1, len(some))]
        if max(saved, default=0) <= worth:
            return [len(some)]
        first = saved.index(max(saved)) + 1
        return cut(some[:first]) + cut(some[first:])

    return cut(lengths)


def depends_on_width(config: Any) -> bool:
    """Whether a model, by its configuration, computes a row differently in a wider batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))]
    return any(kind.get("rope_type") in OF_WIDTH for kind in kinds)
