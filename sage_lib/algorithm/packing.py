"""The layout in which Unsloth's GPU trainer keeps log-probabilities of completions.

It moves all padding of prompt and completion to the right, so that no row begins with any, and
keeps the last columns: as many as the completions have, and one more for each token of padding of
the most padded prompt. Where prompts differ in length, a token's column is then not its place in
the completion.
"""

from __future__ import annotations

import torch


class Packing:
    """Between shape (batch, time) and that layout, (batch, ``width``).

    Args:
        prompt_ids, completion_ids: token ids, padded on the left and on the right; shapes
            (batch, prompt) and (batch, time).
        pad_token: the id of padding, by which Unsloth knows it.
    """

    def __init__(self, prompt_ids: torch.Tensor, completion_ids: torch.Tensor, pad_token: int):
        ids = torch.cat([prompt_ids, completion_ids], 1)
        #: The most tokens of padding that a prompt has.
        self.padding = int((prompt_ids == pad_token).sum(1).max())
        self._prompt = prompt_ids.shape[1]
        #: The first column that is kept.
        self.start = self._prompt - self.padding
        self.width = ids.shape[1] - self.start
        self._order = (ids != pad_token).long().argsort(dim=1, descending=True, stable=True)

    def moved(self, whole: torch.Tensor) -> torch.Tensor:
        """Values of prompt and completion, with those of padding on the right; all columns."""
        return whole.gather(1, self._order)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """From (batch, time) to (batch, ``width``); 0 at tokens of prompts."""
        prompt = values.new_zeros(len(values), self._prompt)
        return self.moved(torch.cat([prompt, values], 1))[:, self.start :]

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """From (batch, ``width``) to (batch, time)."""
        left_out = packed.new_zeros(len(packed), self.start)
        whole = torch.cat([left_out, packed], 1)
        return torch.empty_like(whole).scatter(1, self._order, whole)[:, self._prompt :]
