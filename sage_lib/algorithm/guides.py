"""Guides: q of shape (batch, time) from signals that the loss's own forward pass gives (eq. 9-12).

A guide is any callable that takes a :class:`GuideInputs` and returns q. q is positive, exactly 1 outside the completion
mask, and clamped to [low, high]. Guides hold no state: their noise comes from the generator they are handed, and the
trainer saves that generator with its checkpoints.
"""

import math
from collections.abc import Callable
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


@dataclass(frozen=True)
class _Clamped:
    low: float = field(default=LOW, kw_only=True)
    high: float = field(default=HIGH, kw_only=True)

    def __post_init__(self):
        if not 0 < self.low <= 1 <= self.high:
            raise SageError(
                f"a guide is clamped around 1: 0 < low <= 1 <= high, not low={self.low}, high={self.high}"
            )

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
        return self._finish(
            1 + self.ratio * (inputs.entropies - self.threshold).clamp(min=0), inputs
        )


@dataclass(frozen=True)
class RandomGuide(_Clamped):
    """Eq. 9: with probability e, q_t = 1 + s·z with z ~ N(0, 1); otherwise 1. Schedules of the authors' code."""

    probability: CosineSchedule = CosineSchedule(high=0.1, low=0.0)
    scale: CosineSchedule = CosineSchedule(high=0.15, low=0.05)

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        chosen = _uniform(inputs) < self.probability(inputs.progress)
        q = 1 + self.scale(inputs.progress) * _normal(inputs)
        return self._finish(torch.where(chosen, q, torch.ones_like(q)), inputs)


@dataclass(frozen=True)
class TokenGuide(_Clamped):
    """Eq. 10: q_t = 1 + a·w_t + s·w_t·z, w_t in [0, 1] from the surprisal -log pi(y_t) of the sampled token.

    ``weight`` says how w_t is made, within each sequence: "minmax" (the authors' default) clips the surprisal to the
    sequence's 5 % and 95 % quantiles and scales it to [0, 1]; "rank" takes its rank; "zscore" puts its z-score through a
    sigmoid. Where a sequence's surprisal does not vary (a single token, a constant), w is 0: nothing stands out.
    """

    weight: str = "minmax"
    amplitude: CosineSchedule = CosineSchedule(high=0.3, low=0.1)
    scale: CosineSchedule = CosineSchedule(high=0.25, low=0.1)

    def __post_init__(self):
        super().__post_init__()
        if self.weight not in _WEIGHTS:
            raise SageError(
                f"the token guide's weight is one of {', '.join(_WEIGHTS)}, not {self.weight!r}"
            )

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        w = _WEIGHTS[self.weight](-inputs.logps, inputs.mask.bool() & torch.isfinite(inputs.logps))
        q = (
            1
            + self.amplitude(inputs.progress) * w
            + self.scale(inputs.progress) * w * _normal(inputs)
        )
        return self._finish(q, inputs)


@dataclass(frozen=True)
class IdentityGuide:
    """q = 1: stock GRPO through the guided path, for controls."""

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        return torch.ones_like(inputs.logps)


@dataclass(frozen=True)
class ShuffledGuide:
    """Control: the values of ``inner``, permuted at random within each sequence's completion tokens.

    The distribution of q stays, its place is lost: what a guide owes to where it acts is the difference to this one.
    """

    inner: "Guide"

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        q, mask = self.inner(inputs), inputs.mask.bool()
        position = torch.arange(q.shape[1], device=q.device).expand_as(q)
        # Completion tokens first, once in their order and once in a random one.
        ordered = torch.where(mask, position, position + q.shape[1]).argsort(dim=1)
        shuffled = torch.where(mask, _uniform(inputs), 2.0).argsort(dim=1)
        moved = torch.ones_like(q).scatter(1, ordered, q.gather(1, shuffled))
        return torch.where(mask, moved, torch.ones_like(q))


def compose(*guides: "Guide", low: float = LOW, high: float = HIGH) -> "Guide":
    """The product of several guides (eq. 7 is a product already), clamped once more."""
    if not guides:
        raise SageError("compose needs at least one guide")
    clamp = _Clamped(low=low, high=high)

    def product(inputs: GuideInputs) -> torch.Tensor:
        q = guides[0](inputs)
        for guide in guides[1:]:
            q = q * guide(inputs)
        return clamp._finish(q, inputs)

    return product


def _normal(inputs: GuideInputs) -> torch.Tensor:
    """Standard normal noise like ``logps``, a draw for every position, so that the mask never shifts the stream."""
    return torch.randn(inputs.logps.shape, generator=inputs.generator, dtype=torch.float32).to(
        inputs.logps
    )


def _uniform(inputs: GuideInputs) -> torch.Tensor:
    return torch.rand(inputs.logps.shape, generator=inputs.generator, dtype=torch.float32).to(
        inputs.logps
    )


def _minmax(surprisal: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    values = torch.where(on, surprisal, torch.nan)
    low, high = torch.nanquantile(
        values,
        torch.tensor([0.05, 0.95], dtype=values.dtype, device=values.device),
        dim=1,
        keepdim=True,
    )
    return _scaled(values.clamp(low, high) - low, high - low, on)


def _rank(surprisal: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """Ranks 0..n-1 over n-1; equal values share their mean rank."""
    values = torch.where(on, surprisal, torch.inf)
    ascending = values.sort(dim=1).values
    first, last = (
        torch.searchsorted(ascending, values),
        torch.searchsorted(ascending, values, right=True),
    )
    return _scaled(
        ((first + last - 1) / 2 * on).to(surprisal),
        (on.sum(1, keepdim=True) - 1).to(surprisal),
        on & (ascending[:, :1] < torch.where(on, surprisal, -torch.inf).amax(1, keepdim=True)),
    )


def _zscore(surprisal: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    n = on.sum(1, keepdim=True).clamp(min=1)
    values = torch.where(on, surprisal, 0.0)
    centred = values - values.sum(1, keepdim=True) / n
    spread = ((centred**2 * on).sum(1, keepdim=True) / n).sqrt()
    standing_out = on & (spread > 1e-12)
    return torch.where(
        standing_out, torch.sigmoid(centred / spread.clamp(min=1e-12)), torch.zeros_like(centred)
    )


def _scaled(value: torch.Tensor, width: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """value / width where the width is not zero and the token counts, else 0."""
    return torch.where(
        on & (width > 0),
        value / width.clamp(min=torch.finfo(value.dtype).tiny),
        torch.zeros_like(value),
    )


_WEIGHTS = {"minmax": _minmax, "rank": _rank, "zscore": _zscore}

#: Any callable from GuideInputs to q.
Guide = Callable[[GuideInputs], torch.Tensor]
