"""Guides: q of shape (batch, time) from signals of the loss's own forward pass (eq. 9-12).

A guide is any callable from :class:`GuideInputs` to positive values q, which count as 1 outside the
completion mask. The guides here clamp q and hold no state. :mod:`sage_lib.algorithm.guide_choices`
makes them from a profile. This module loads without torch.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from sage_lib.errors import SageError

if TYPE_CHECKING:
    import torch

#: Clamp of every guide (the authors' code).
LOW, HIGH = 0.6, 1.4
#: An unknown parameter is refused.
FORBID_EXTRA = ConfigDict(extra="forbid")
#: A parameter: neither text nor a truth value is read as a number.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclasses.dataclass(frozen=True)
class GuideInputs:
    """The inputs of a guide for a batch of completions; tensors have shape (batch, time), except
    ``rewards`` and ``best_logps``, which have shape (batch,)."""

    entropies: torch.Tensor  # of pi before each token, nats, at the sampling temperature (eq. 12)
    logps: torch.Tensor  # log pi of the sampled tokens
    mask: torch.Tensor  # 1 on completion tokens, else 0
    progress: float  # how far the run is, in [0, 1]
    generator: torch.Generator  # the only source of noise, on the CPU
    ids: torch.Tensor  # the sampled tokens
    # In training alone, for a guide that reads rewards:
    ref_logps: torch.Tensor | None = None  # log pi_ref of the sampled tokens
    rewards: torch.Tensor | None = None  # of the completions; NaN where no function gave one
    #: log pi_ref of the likeliest right completion of each row's group, -inf where none is right.
    best_logps: torch.Tensor | None = None
    guide_logps: torch.Tensor | None = None  # log of the sampled tokens under the guide_model

    @property
    def reference(self) -> torch.Tensor | None:
        """The former name of ``ref_logps``, until the next release."""
        warnings.warn("GuideInputs.reference is called ref_logps", FutureWarning, stacklevel=2)
        return self.ref_logps


#: Any callable from GuideInputs to q.
Guide = Callable[[GuideInputs], "torch.Tensor"]


@dataclass(frozen=True, config=FORBID_EXTRA)
class CosineSchedule:
    """``periods`` cosine periods over a run, each from ``high`` down to ``low``.

    value = low + (high - low)(1 + cos(pi t))/2 for t in [0, 1) of a period. ``high`` shrinks by
    ``decay`` at each new period, but never below ``low`` (the authors' code: 8 periods, 0.9).
    """

    high: Number
    low: Number
    periods: Annotated[int, Field(strict=True, ge=1)] = 8
    decay: Number = 0.9

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise SageError(f"a schedule runs from high down to low, not {self.high} to {self.low}")

    def __call__(self, progress: float) -> float:
        period = min(int(progress * self.periods), self.periods - 1)
        within = progress * self.periods - period
        high = max(self.high * self.decay**period, self.low)
        return self.low + (high - self.low) * (1 + math.cos(math.pi * within)) / 2


@dataclass(frozen=True, config=FORBID_EXTRA)
class _Clamped:
    low: Number = field(default=LOW, kw_only=True)  # the least q
    high: Number = field(default=HIGH, kw_only=True)  # the largest q

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1 <= self.high:
            raise SageError(
                f"a guide is clamped around 1: 0 < low <= 1 <= high, "
                f"not low={self.low}, high={self.high}"
            )

    def _finish(self, q: torch.Tensor, inputs: GuideInputs) -> torch.Tensor:
        """Clamp q, and put 1 outside the mask and where a signal is not a number."""
        clamped = q.nan_to_num(nan=1.0).clamp(self.low, self.high)
        return clamped.where(inputs.mask.bool(), 1.0).detach()


@dataclass(frozen=True, config=FORBID_EXTRA)
class BranchGuide(_Clamped):
    """Eq. 11: q_t = 1 + ratio · max(0, H_t - threshold). Threshold in nats; Table 8: 1.2, 0.3.

    A negative ratio weakens the KL where the policy is unsure, as Archer does (Wang et al. 2025,
    arXiv 2507.15778): it has none on the fifth of a completion's tokens with the highest entropy.
    """

    threshold: Number = 1.2
    ratio: Number = 0.3

    #: Keys of a choice in the place of threshold and ratio, with which it may have ``reverse``: see
    #: :func:`build_guide`.
    quantile_keys: ClassVar[tuple[str, str]] = ("threshold_quantile", "clamp_quantile")

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        excess = (inputs.entropies - self.threshold).clamp(min=0)
        return self._finish(1 + self.ratio * excess, inputs)


@dataclass(frozen=True, config=FORBID_EXTRA)
class RandomGuide(_Clamped):
    """Eq. 9: with probability e, q_t = 1 + s·z with z ~ N(0, 1); otherwise 1.

    Schedules of e and s as in the authors' code.
    """

    probability: CosineSchedule = CosineSchedule(high=0.1, low=0.0)
    scale: CosineSchedule = CosineSchedule(high=0.15, low=0.05)

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.probability.low, self.probability.high
        if not 0 <= low <= high <= 1:
            raise SageError(f"probabilities lie between 0 and 1, not from {low} to {high}")

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        acts = _noise(inputs, "rand") < self.probability(inputs.progress)
        q = 1 + self.scale(inputs.progress) * _noise(inputs, "randn")
        return self._finish(q.where(acts, 1.0), inputs)


@dataclass(frozen=True, config=FORBID_EXTRA)
class TokenGuide(_Clamped):
    """Eq. 10: q_t = 1 + a·w_t + s·w_t·z, w_t in [0, 1] from the surprisal -log pi(y_t).

    ``weight`` says how w_t is made within each sequence. "minmax" (the authors' default) clips the
    surprisal to its 5 % and 95 % quantiles and scales it to [0, 1]. "rank" takes its rank. "zscore"
    puts its z-score through a sigmoid. Where the surprisal does not vary, w is 0.
    """

    weight: Literal["minmax", "rank", "zscore"] = "minmax"
    amplitude: CosineSchedule = CosineSchedule(high=0.3, low=0.1)
    scale: CosineSchedule = CosineSchedule(high=0.25, low=0.1)

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        from sage_lib.algorithm import token_weights

        counted = inputs.mask.bool() & inputs.logps.isfinite()
        w = getattr(token_weights, self.weight)(-inputs.logps, counted)
        amplitude, scale = self.amplitude(inputs.progress), self.scale(inputs.progress)
        return self._finish(1 + amplitude * w + scale * w * _noise(inputs, "randn"), inputs)


@dataclass(frozen=True, config=FORBID_EXTRA)
class RewardGuide(_Clamped):
    """RAPO's reference (Deng et al. 2025, arXiv 2510.03865) as a guide: pi_ref to the ``power`` phi
    where the reward is 0, so q_t = pi_ref(y_t)^(phi - 1); q = 1 on the other completions.

    RAPO has the forward KL to it, normalises it and does not clamp. Its phi was not verified.
    """

    power: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.5

    reads_rewards: ClassVar[bool] = True

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        if inputs.ref_logps is None or inputs.rewards is None:
            raise SageError("the guide 'reward' reads rewards: it works in RL training alone")
        wrong = (inputs.rewards == 0).unsqueeze(1)
        q = ((self.power - 1) * inputs.ref_logps).exp()
        return self._finish(q.where(wrong, 1.0), inputs)


@dataclass(frozen=True, config=FORBID_EXTRA)
class LikeliestGuide(_Clamped):
    """MARA's reward (GX-Chen et al. 2025, arXiv 2510.20817) as a guide of right completions.

    MARA puts R(z) + beta·(log pi_ref(z) - log pi_ref(y)) for the reward of a right y; z is the
    likeliest right completion of its group. q(y) = pi_ref(z)/pi_ref(y) gives the same optimum, in
    which all right completions are equally likely. The clamped tokens of y share log q(y) equally.
    """

    reads_rewards: ClassVar[bool] = True

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        if inputs.ref_logps is None or inputs.rewards is None or inputs.best_logps is None:
            raise SageError("the guide 'likeliest' reads rewards of whole groups in RL training")
        logp = (inputs.ref_logps * inputs.mask).sum(1)
        log_q = (inputs.best_logps - logp) / inputs.mask.sum(1).clamp(min=1)
        q = log_q.exp().where(inputs.rewards > 0, 1.0)
        return self._finish(q.unsqueeze(1).expand_as(inputs.logps), inputs)


@dataclass(frozen=True, config=FORBID_EXTRA)
class SuccessGuide(_Clamped):
    """q_t = (pi_s(y_t)/pi_ref(y_t))^``alpha``: the anchor leans to where the base succeeds.

    pi_s is the ``guide_model`` of SageTrainer: the base after SFT on right samples of its own. In a
    profile it is the first seed's policy of the method ``policy``, which has ``rft``.
    """

    alpha: Number = 1.0
    policy: str | None = None

    reads_rewards: ClassVar[bool] = True  # as what trained pi_s did

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        if inputs.ref_logps is None or inputs.guide_logps is None:
            raise SageError("the guide 'success' needs a guide_model, in RL training alone")
        q = (self.alpha * (inputs.guide_logps - inputs.ref_logps)).exp()
        return self._finish(q, inputs)


@dataclass(frozen=True, config=FORBID_EXTRA)
class IdentityGuide:
    """q = 1, for controls: stock GRPO with the same anchor, through the guided path."""

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        return inputs.logps.new_ones(inputs.logps.shape)


@dataclass(frozen=True, config=FORBID_EXTRA)
class ShuffledGuide:
    """Control: the values of the guide ``inner``, permuted within each sequence's tokens."""

    inner: Any

    def __post_init__(self) -> None:
        check_guide(self.inner)

    def state_dict(self) -> dict[str, Any]:
        return _states([self.inner])

    def load_state_dict(self, states: dict[str, Any]) -> None:
        _load_states([self.inner], states)

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        import torch

        q = check_q(self.inner(inputs), inputs)
        mask = inputs.mask.bool()
        position = torch.arange(q.shape[1], device=q.device).expand_as(q)
        # Completion tokens first, once in their order and once in a random one.
        ordered = torch.where(mask, position, position + q.shape[1]).argsort(dim=1)
        shuffled = _noise(inputs, "rand").where(mask, 2.0).argsort(dim=1)
        moved = torch.ones_like(q).scatter(1, ordered, q.gather(1, shuffled))
        return moved.where(mask, 1.0)


def compose(*guides: Guide, low: float = LOW, high: float = HIGH) -> Guide:
    """Return the guide whose q is the product of several guides, clamped once more to [low, high].

    SageError where a part is no guide, or the clamp does not hold 1.
    """
    for guide in guides:
        check_guide(guide)
    return _Product(guides, _Clamped(low=low, high=high))


@dataclasses.dataclass(frozen=True)
class _Product:
    """See :func:`compose`."""

    guides: tuple[Guide, ...]
    clamp: _Clamped

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        q = inputs.logps.new_ones(inputs.logps.shape)
        for guide in self.guides:
            q = q * check_q(guide(inputs), inputs)
        return self.clamp._finish(q, inputs)

    def state_dict(self) -> dict[str, Any]:
        return _states(self.guides)

    def load_state_dict(self, states: dict[str, Any]) -> None:
        _load_states(self.guides, states)


def _states(guides: Sequence[Any]) -> dict[str, Any]:
    """Return the state of each guide that has one, by its number: a checkpoint keeps it."""
    return {str(n): g.state_dict() for n, g in enumerate(guides) if hasattr(g, "state_dict")}


def _load_states(guides: Sequence[Any], states: dict[str, Any]) -> None:
    for number, state in states.items():
        guides[int(number)].load_state_dict(state)


def _noise(inputs: GuideInputs, function: Literal["rand", "randn"]) -> torch.Tensor:
    """Draw uniform or standard normal noise at all positions: no mask shifts the stream."""
    import torch

    x, draw = inputs.logps, torch.rand if function == "rand" else torch.randn
    return draw(x.shape, generator=inputs.generator, dtype=torch.float32).to(x)


# -- checks of a guide and of its q ----------------------------------------------------------------


def check_guide(guide: object) -> None:
    """Raise a SageError where ``guide`` cannot be called with a GuideInputs."""
    if isinstance(guide, type) or not callable(guide):
        raise SageError(
            f"a guide is called with a GuideInputs and returns q: hand over an instance, such as "
            f"BranchGuide(), or build_guide(...) of a choice, not {guide!r}"
        )


def check_q(q: Any, inputs: GuideInputs) -> torch.Tensor:
    """Return q of a guide with 1 outside the mask. SageError where eq. 7 has no use for q."""
    import torch

    shape = inputs.logps.shape
    rule = f"the guide must return positive finite values of shape {tuple(shape)}, one per token"
    if not isinstance(q, torch.Tensor):
        raise SageError(f"{rule}, as a torch tensor, not a {type(q).__name__}")
    if q.shape != shape:
        raise SageError(f"{rule}, not of shape {tuple(q.shape)}")
    if not q.is_floating_point():
        raise SageError(f"{rule}, not of {q.dtype}: return q itself, as torch.where does")
    weights: torch.Tensor = q.where(inputs.mask.bool(), 1.0)
    wrong = ~weights.isfinite() | (weights <= 0)
    if wrong.any():
        numbers = q[inputs.mask.bool() & q.isfinite()]
        smallest = f"{numbers.min().item():.3g}" if len(numbers) else "none"
        raise SageError(
            f"{rule}, and {int(wrong.sum())} of {int(inputs.mask.sum())} are not "
            f"(smallest finite value {smallest})"
        )
    return weights


#: Each guide by its name in a profile's ``guide: {name: ...}``.
GUIDES: dict[str, type[Any]] = {
    "branch": BranchGuide,
    "random": RandomGuide,
    "token": TokenGuide,
    "reward": RewardGuide,
    "likeliest": LikeliestGuide,
    "success": SuccessGuide,
    "identity": IdentityGuide,
    "shuffled": ShuffledGuide,
}
