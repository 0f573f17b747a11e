"""SageTrainer on Unsloth's GPU trainer, whose loss is not TRL's.

There the anchor is shaped as soon as the reference is scored, at the price of a forward pass
without a gradient. It is then put into Unsloth's layout of log-probabilities.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sage_lib.algorithm.backend import Batch, counted_tokens
from sage_lib.algorithm.checks import START_KL, require_equal, require_start
from sage_lib.algorithm.kl_forms import k3
from sage_lib.algorithm.rollouts import Rollouts
from sage_lib.errors import SageError

#: Added to the first batches: the KL that Unsloth's loss must have, (batch, time).
EXPECTED_KL = "expected_kl"
#: The entries in Unsloth's layout, and the entry that marks it: the most padding of a prompt.
PACKED, MOST_PADDING = ("ref_per_token_logps", "old_per_token_logps"), "max_left_pad"
#: Its loss clamps the log-ratio of the KL and the KL itself, nats.
UNSLOTHS_CLAMPS = (20.0, 10.0)
#: Share of the expected KL by which Unsloth's may miss it, where either is in half precision.
HALF_SHARE = 0.25


class Packing:
    """The map between shape (batch, time) and Unsloth's layout, (batch, ``width``).

    Unsloth moves all padding to the right and keeps the last columns: as many as the completions
    have, plus the padding of the most padded prompt. Where prompts differ in length, a token's
    column is not its position in the completion.
    """

    def __init__(self, prompt_ids: torch.Tensor, completion_ids: torch.Tensor, pad_token: int):
        ids = torch.cat([prompt_ids, completion_ids], 1)
        self.padding = int((prompt_ids == pad_token).sum(1).max())
        self._prompt = prompt_ids.shape[1]
        self.start = self._prompt - self.padding  # the first column that is kept
        self.width = ids.shape[1] - self.start
        self._order = (ids != pad_token).long().argsort(dim=1, descending=True, stable=True)

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of prompt and completion with padding moved to the right; all columns."""
        return values.gather(1, self._order)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of (batch, time) in Unsloth's layout; 0 at tokens of prompts."""
        prompt = values.new_zeros(len(values), self._prompt)
        return self.moved(torch.cat([prompt, values], 1))[:, self.start :]

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Return values in Unsloth's layout as (batch, time)."""
        moved = torch.cat([packed.new_zeros(len(packed), self.start), packed], 1)
        return torch.empty_like(moved).scatter(1, self._order, moved)[:, self._prompt :]


class ShapedAtScoring(Rollouts):
    """Trainer that shapes the reference in the scored batch, and not in TRL's loss."""

    shaped_at_scoring: bool  # this is Unsloth's trainer
    reached_loss: bool  # the guide was seen in the loss

    def _is_packed(self, batch: Batch) -> bool:
        """Return whether Unsloth keeps this batch of training in its layout, as it does for
        texts."""
        return self.shaped_at_scoring and self.model.training and MOST_PADDING in batch

    def _packing(self, batch: Batch) -> Packing:
        return Packing(batch["prompt_ids"], batch["completion_ids"], self._tokenizer.pad_token_id)

    def _counted_by_unsloth(self, batch: Batch) -> torch.Tensor:
        """Return the tokens that Unsloth's loss counts, (batch, time). It leaves out sampled tokens
        with the id of padding, too, and has 0 as their log-probability."""
        not_padding: torch.Tensor = batch["completion_ids"] != self._tokenizer.pad_token_id
        return counted_tokens(batch) * not_padding

    def _unpack(self, batch: Batch) -> None:
        """Bring the log-probabilities into shape (batch, time), which the modules here read."""
        packing = self._packing(batch)
        for key in set(PACKED) & set(batch):
            if batch[key].shape[1] != packing.width:
                raise SageError(
                    f"Unsloth keeps {key} in {batch[key].shape[1]} columns, not {packing.width}: "
                    "use the pinned version, or set compute.backend to trl"
                )
            batch[key] = packing.unpack(batch[key])

    def _pack(self, batch: Batch) -> None:
        """Bring the log-probabilities of the batch's rows back into Unsloth's layout."""
        packing = self._packing(batch)
        for key in set(PACKED) & set(batch):
            batch[key] = packing.pack(batch[key])
        batch[MOST_PADDING] = torch.full_like(batch[MOST_PADDING], packing.padding)

    @torch.no_grad()
    def _shape_scored(self, batch: Batch) -> None:
        """Compute q by a further pass, and put it into the batch's reference log-probabilities."""
        log_anchor = batch["ref_per_token_logps"]
        logps, entropies = self._policy_signals(batch)
        kl_ref = self._mean(k3(log_anchor, logps), self._counted_by_unsloth(batch))
        self._record("kl_ref", kl_ref)
        require_start(self, batch, kl_ref)
        if self.guide is not None:
            log_anchor = log_anchor + self._log_q(batch, logps, entropies)
            batch["ref_per_token_logps"] = log_anchor
        if not self.reached_loss:
            most_ratio, most = UNSLOTHS_CLAMPS
            log_ratio = (log_anchor - logps).clamp(-most_ratio, most_ratio)
            batch[EXPECTED_KL] = k3(log_ratio, torch.zeros_like(log_ratio)).clamp(max=most)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Batch, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Take Unsloth's loss, which is not in ``_compute_loss``, and check the first batch."""
        loss: torch.Tensor = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training and EXPECTED_KL in inputs and not self.reached_loss:
            # As Unsloth logs it: of each completion, then of this process's rows, without padding.
            counted = self._counted_by_unsloth(inputs)
            rows = (inputs[EXPECTED_KL] * counted).sum(1) / counted.sum(1).clamp(min=1)
            expected = rows[counted.sum(1) > 0].mean().item()
            if math.isnan(expected):  # in which no token counts
                return loss
            self.reached_loss = True
            share, least = (HALF_SHARE, START_KL) if self._is_half() else (1e-3, 1e-5)
            require_equal("KL", self._metrics["train"]["kl"][-1], expected, share, least)
        return loss
