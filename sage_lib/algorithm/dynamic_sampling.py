"""DAPO's dynamic sampling: fresh prompts for groups whose rewards are all equal."""

from __future__ import annotations

import torch

from sage_lib.algorithm.backend import Batch, counted_tokens
from sage_lib.algorithm.guided_trainer import GuidedTrainer

#: Added to the batch meanwhile: each reward times its weight, shape (batch, functions).
REWARD_TERMS = "reward_terms"
#: Rewards that differ by less than this share of their size are equal: sums in float32.
ROUNDING = 1e-6


def fill_batch(trainer: GuidedTrainer, batch: Batch, rounds: int) -> Batch:
    """Replace the groups of a batch that teach nothing by groups of fresh prompts, of which at most
    ``rounds`` batches are drawn. :data:`REWARD_TERMS` leave the batch."""
    gather, generations, batches = trainer.accelerator.gather, trainer.num_generations, 1

    def flat(groups: Batch) -> torch.Tensor:
        return groups_without_spread(groups[REWARD_TERMS], generations)

    # Flat on any process: all of them sample again, or none.
    while batches <= rounds and gather(flat(batch).any()).any():
        rows, data = torch.arange(len(batch["completion_ids"])), trainer.train_dataset
        rows = rows.view(-1, generations)
        prompts = torch.randint(len(data), (len(rows),), generator=trainer.prompt_generator)
        fresh = trainer._scored([data[i] for i in prompts.tolist() for _ in range(generations)])
        flat_groups, fresh_groups = (
            groups.nonzero().flatten().cpu() for groups in (flat(batch), ~flat(fresh))
        )
        count = min(len(flat_groups), len(fresh_groups))
        old_rows = rows[flat_groups[:count]].flatten().tolist()
        new_rows = rows[fresh_groups[:count]].flatten().tolist()
        batch = replace_rows(batch, old_rows, fresh, new_rows, trainer._tokenizer.pad_token_id)
        batches += 1
    if "num_items_in_batch" in batch:
        batch["num_items_in_batch"] = gather(counted_tokens(batch).sum()).sum()
    flat_share = flat(batch).float().mean()
    del batch[REWARD_TERMS]
    trainer._record("sampling/rounds", float(batches))
    trainer._record("sampling/flat", gather(flat_share).mean().item())
    return batch


def groups_without_spread(terms: torch.Tensor, generations: int) -> torch.Tensor:
    """Return which groups have equal rewards, and so teach nothing: bool of shape (groups,).

    ``terms`` are rewards times their weights, shape (groups · generations, functions), NaN for
    none. Advantages do not tell: TRL's mean of eight rewards of 0.7 in float32 is not 0.7.
    """
    grouped = terms.view(-1, generations, terms.shape[1])
    rewards, scored = grouped.nansum(2), ~grouped.isnan().all(2)
    highest = rewards.masked_fill(~scored, -torch.inf).amax(1)
    lowest = rewards.masked_fill(~scored, torch.inf).amin(1)
    size = grouped.abs().nansum(2).amax(1)
    return highest - lowest <= ROUNDING * size


def replace_rows(
    batch: Batch, rows: list[int], fresh: Batch, fresh_rows: list[int], pad_token: int
) -> Batch:
    """Return a batch in which some rows are taken from another batch.

    Both are padded to the longer of the two: prompts on the left, everything else on the right.
    Entries without a row for each completion stay as they were.
    """
    size, replaced = len(batch["completion_ids"]), dict(batch)
    for key, value in batch.items():
        other = fresh.get(key)
        if other is None or not torch.is_tensor(value) or value.shape[:1] != (size,):
            continue
        if value.dim() > 1:
            width = max(value.shape[1], other.shape[1])
            fill, pad_left = pad_token if key.endswith("_ids") else 0, key.startswith("prompt")
            value, other = (_widened(x, width, fill, pad_left) for x in (value, other))
        replaced[key] = value.clone()
        replaced[key][rows] = other[fresh_rows]
    return replaced


def _widened(x: torch.Tensor, width: int, fill: int, pad_left: bool) -> torch.Tensor:
    padding = x.new_full((x.shape[0], width - x.shape[1], *x.shape[2:]), fill)
    return torch.cat([padding, x] if pad_left else [x, padding], dim=1)
