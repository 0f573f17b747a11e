"""Guides: q of shape (batch, time) from signals that the loss's own forward pass gives (eq. 9-12).

A guide is any callable that takes a :class:`GuideInputs` and returns q. q is positive, exactly 1 outside the completion
mask, and clamped to [low, high]. Guides hold no state: their noise comes from the generator they are handed, and the
trainer saves that generator with its checkpoints.
"""

import math
from dataclasses import dataclass, field

import torch

from sage_lib.errors import SageError

#: Clamp of every guide (the authors' code).
LOW, HIGH = 0.6, 1.4


@dataclass(frozen=True)
class GuideInputs:
    """What a guide sees. ``entropies`` (nats, eq. 12), ``logps`` (log pi of the sampled tokens) and ``mask`` (1 on
    completion tokens) have shape (batch, time); ``progress`` in [0, 1] is how far the run is."""

    entropies: torch.Tensor
    logps: torch.Tensor
    mask: torch.Tensor
    progress: float
    generator: torch.Generator


@dataclass(frozen=True)
class _Clamped:
    low: float = field(default=LOW, kw_only=True)
    high: float = field(default=HIGH, kw_only=True)

    def __post_init__(self):
        if not 0 < self.low <= 1 <= self.high:
            raise SageError(f"a guide is clamped around 1: 0 < low <= 1 <= high, not low={self.low}, high={self.high}")

    def _finish(self, q: torch.Tensor, inputs: GuideInputs) -> torch.Tensor:
        """Clamp, and 1 outside the mask. A token whose signal is not a number is left unguided."""
        q = torch.nan_to_num(q, nan=1.0).clamp(self.low, self.high)
        return torch.where(inputs.mask.bool(), q, torch.ones_like(q)).detach()


@dataclass(frozen=True)
class BranchGuide(_Clamped):
    """Eq. 11: q_t = 1 + ratio · max(0, H_t - threshold). Threshold in nats; the paper has 1.2 and 0.3 (Table 8)."""

    threshold: float = 1.2
    ratio: float = 0.3

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        return self._finish(1 + self.ratio * (inputs.entropies - self.threshold).clamp(min=0), inputs)


@dataclass(frozen=True)
class IdentityGuide:
    """q = 1: stock GRPO through the guided path, for controls."""

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        return torch.ones_like(inputs.logps)


@dataclass(frozen=True)
class CosineSchedule:
    """``periods`` cosine periods over a run: value = low + (high - low)(1 + cos(pi t))/2 for t in [0, 1) of a period.

    ``high`` shrinks by ``decay`` at each new period (the authors' code: 8 periods, 0.9), but never below ``low``.
    """

    high: float
    low: float
    periods: int = 8
    decay: float = 0.9

    def __call__(self, progress: float) -> float:
        if not 0 <= progress <= 1:
            raise SageError(f"progress is a share of the run between 0 and 1, not {progress}")
        period = min(int(progress * self.periods), self.periods - 1)
        within = progress * self.periods - period
        high = max(self.high * self.decay**period, self.low)
        return self.low + (high - self.low) * (1 + math.cos(math.pi * within)) / 2
