"""Scoring without most of the padding: completions of about the same length together.

The padding after a row changes no token before it, so it can be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Types of rotary positions whose factors follow the widest row: alone a row has other scores.
OF_WIDTH = {"dynamic", "longrope"}
#: Share of all tokens of a batch, padding included, that a further pass must save.
WORTH = 0.1
#: Arguments of TRL's scoring pass that concern no single row.
OF_ALL_ROWS = ("batch_size", "compute_entropy")


def by_length(
    score: Callable[..., tuple[torch.Tensor, torch.Tensor | None, Any]],
    model: torch.nn.Module,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    keep: int,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """Call ``score``, TRL's ``_get_per_token_logps_and_entropies``, once for each group of rows of
    about the same length; ``keep`` is the columns of the completions.

    All rows are scored at once where ``options`` hold data of single rows (images), or ask for a
    mean over rows (a mixture of experts). The result is that of ``score`` up to rounding, shape
    (batch, ``keep``), 0 for padding.
    """
    row_options = [value for name, value in options.items() if name not in OF_ALL_ROWS]
    if any(value is not None and value is not False for value in row_options):
        return score(model, ids, attention_mask, keep, **options)
    ends = attention_mask[:, -keep:].flip(1).argmax(1)  # padding after each row
    lengths = torch.where(attention_mask[:, -keep:].any(1), keep - ends, 0)
    order = lengths.argsort(stable=True)
    groups = order.split(_sizes(lengths[order].tolist(), ids.shape[1] - keep))
    logps, entropies = [], []
    for rows in groups:
        # At least one column is scored: a pass cannot return a tensor without columns.
        cut = keep - max(1, int(lengths[rows].max()))
        columns = slice(ids.shape[1] - cut)
        row_logps, row_entropies, _ = score(
            model, ids[rows, columns], attention_mask[rows, columns], keep - cut, **options
        )
        logps.append(torch.nn.functional.pad(row_logps, (0, cut)))
        if row_entropies is not None:
            entropies.append(torch.nn.functional.pad(row_entropies, (0, cut)))
    inverse = order.argsort()
    return torch.cat(logps)[inverse], torch.cat(entropies)[inverse] if entropies else None, None


def _sizes(lengths: list[int], prompt: int) -> list[int]:
    """Return the rows of each group: the batch is cut where that saves most, then its parts."""
    least = WORTH * len(lengths) * (prompt + lengths[-1])

    def cut(ascending: list[int]) -> list[int]:
        saved = [n * (ascending[-1] - ascending[n - 1]) for n in range(1, len(ascending))]
        if max(saved, default=0) <= least:
            return [len(ascending)]
        first = saved.index(max(saved)) + 1
        return cut(ascending[:first]) + cut(ascending[first:])

    return cut(lengths)


def depends_on_width(config: Any) -> bool:
    """Return whether a model of this configuration computes a row otherwise in a wider batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = [value for value in rope.values() if isinstance(value, dict)]
    return any(parameters.get("rope_type") in OF_WIDTH for parameters in (rope, *of_layers))
