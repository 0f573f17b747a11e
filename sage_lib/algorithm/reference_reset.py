"""ProRL's reference reset (Liu et al. 2025, arXiv 2505.24864) for a policy that is an adapter.

TRL's ``sync_ref_model`` moves a reference that is a model of its own, and refuses adapters, whose
reference is a second adapter, "ref", in the same model. Checkpoints hold that adapter, so a resume
finds the reference where it was.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class ReferenceReset(TrainerCallback):  # type: ignore[misc]
    """Every ``steps`` steps: the adapter "ref" becomes the trained one, and the optimiser's moments
    are forgotten. Batches that were scored before keep the reference that scored them."""

    def __init__(self, steps: int):
        self.steps = steps

    @torch.no_grad()
    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if state.global_step % self.steps != 0:
            return
        weights = dict(kwargs["model"].named_parameters())
        for name, reference in weights.items():
            if ".ref." in name:
                reference.copy_(weights[name.replace(".ref.", ".default.")])
        kwargs["optimizer"].state.clear()
