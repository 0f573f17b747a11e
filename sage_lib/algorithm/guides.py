"""Guides: q of shape (batch, time) from signals that the loss's own forward pass gives (eq. 9-12).

A guide is any callable that takes a :class:`GuideInputs` and returns q. q is positive; outside the
completion mask it counts as 1, whatever a guide returns there. Those here clamp it to [low, high].
Guides hold no state: their noise comes from the generator they are handed, and the trainer saves
that generator with its checkpoints.

Profiles choose a guide by a mapping, ``{name: token, weight: rank}``: a name of :data:`GUIDES` and
parameters of that class. This module loads without torch, so that a choice can be checked, and its
parameters drawn, where nothing is trained.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sage_lib.errors import SageError

if TYPE_CHECKING:
    import torch

#: Clamp of every guide (the authors' code).
LOW, HIGH = 0.6, 1.4


class NoSuchInput(SageError, AttributeError):
    """A guide asked for what :class:`GuideInputs` does not have."""


@dataclass(frozen=True)
class GuideInputs:
    """What a guide sees of a batch of completions; every tensor has shape (batch, time).

    Attributes:
        entropies: of the next token's distribution before each token, nats, at the sampling
            temperature (eq. 12).
        logps: log pi of the sampled tokens.
        mask: 1 on completion tokens, else 0.
        progress: how far the run is, in [0, 1].
        generator: the only source of noise, on the CPU.
        ids: the sampled tokens.
    """

    entropies: torch.Tensor
    logps: torch.Tensor
    mask: torch.Tensor
    progress: float
    generator: torch.Generator
    ids: torch.Tensor

    if not TYPE_CHECKING:  # a checker that sees it lets every name pass

        def __getattr__(self, name: str) -> object:
            if name.startswith("__"):  # what copy and pickle ask every object for
                raise AttributeError(name)
            known = ", ".join(f.name for f in dataclasses.fields(GuideInputs))
            raise NoSuchInput(f"a guide's inputs have no {name!r}: there are {known}")


#: Any callable from GuideInputs to q.
Guide = Callable[[GuideInputs], "torch.Tensor"]


@dataclass(frozen=True)
class CosineSchedule:
    """``periods`` cosine periods over a run, each from ``high`` down to ``low``.

    value = low + (high - low)(1 + cos(pi t))/2 for t in [0, 1) of a period. ``high`` shrinks by
    ``decay`` at each new period (the authors' code: 8 periods, 0.9), but never below ``low``.
    """

    high: float
    low: float
    periods: int = 8
    decay: float = 0.9

    def __post_init__(self) -> None:
        if self.periods < 1 or self.high < self.low:
            raise SageError(
                f"a schedule runs from high down to low in 1 or more periods, "
                f"not from {self.high} to {self.low} in {self.periods}"
            )

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

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1 <= self.high:
            raise SageError(
                f"a guide is clamped around 1: 0 < low <= 1 <= high, "
                f"not low={self.low}, high={self.high}"
            )

    def _finish(self, q: torch.Tensor, inputs: GuideInputs) -> torch.Tensor:
        """Clamp, and 1 outside the mask. A token whose signal is not a number is unguided."""
        clamped = q.nan_to_num(nan=1.0).clamp(self.low, self.high)
        return clamped.where(inputs.mask.bool(), 1.0).detach()


@dataclass(frozen=True)
class BranchGuide(_Clamped):
    """Eq. 11: q_t = 1 + ratio · max(0, H_t - threshold).

    The threshold is in nats; the paper has 1.2 and 0.3 (Table 8).
    """

    threshold: float = 1.2
    ratio: float = 0.3

    #: What a choice gives: these two as numbers, or instead the arguments of from_entropies.
    fixed = ("threshold", "ratio")
    measured = ("threshold_quantile", "clamp_quantile")

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        excess = (inputs.entropies - self.threshold).clamp(min=0)
        return self._finish(1 + self.ratio * excess, inputs)

    @classmethod
    def from_entropies(
        cls,
        quantiles: Mapping[str, float],
        threshold_quantile: float,
        clamp_quantile: float,
        low: float = LOW,
        high: float = HIGH,
    ) -> BranchGuide:
        """The guide whose threshold and ratio the base model's token entropies give.

        The threshold is their quantile ``threshold_quantile``, and the ratio lets q reach ``high``
        at the quantile ``clamp_quantile``.

        Args:
            quantiles: from str(share) to nats, as entropy.json has them.

        Raises:
            SageError: where a quantile was not measured, or both are the same entropy.
        """
        found = []
        for share in (threshold_quantile, clamp_quantile):
            if str(share) not in quantiles:
                raise SageError(
                    f"the guide's quantile {str(share)!r} was not measured: "
                    f"choose from {', '.join(quantiles)}"
                )
            found.append(quantiles[str(share)])
        threshold, top = found
        if top <= threshold:
            raise SageError(
                "the base model's entropies do not differ between threshold_quantile and "
                "clamp_quantile: choose them further apart"
            )
        ratio = (high - 1) / (top - threshold)
        return cls(threshold=threshold, ratio=ratio, low=low, high=high)


@dataclass(frozen=True)
class RandomGuide(_Clamped):
    """Eq. 9: with probability e, q_t = 1 + s·z with z ~ N(0, 1); otherwise 1.

    Schedules of e and s as in the authors' code.
    """

    probability: CosineSchedule = CosineSchedule(high=0.1, low=0.0)
    scale: CosineSchedule = CosineSchedule(high=0.15, low=0.05)

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        chosen = _uniform(inputs) < self.probability(inputs.progress)
        q = 1 + self.scale(inputs.progress) * _normal(inputs)
        return self._finish(q.where(chosen, 1.0), inputs)


@dataclass(frozen=True)
class TokenGuide(_Clamped):
    """Eq. 10: q_t = 1 + a·w_t + s·w_t·z, w_t in [0, 1] from the surprisal -log pi(y_t).

    ``weight`` says how w_t is made, within each sequence: "minmax" (the authors' default) clips the
    surprisal to the sequence's 5 % and 95 % quantiles and scales it to [0, 1]; "rank" takes its
    rank; "zscore" puts its z-score through a sigmoid. Where a sequence's surprisal does not vary (a
    single token, a constant), w is 0: nothing stands out.
    """

    weight: str = "minmax"
    amplitude: CosineSchedule = CosineSchedule(high=0.3, low=0.1)
    scale: CosineSchedule = CosineSchedule(high=0.25, low=0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight not in _WEIGHTS:
            raise SageError(
                f"the token guide's weight is one of {', '.join(_WEIGHTS)}, not {self.weight!r}"
            )

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        counted = inputs.mask.bool() & inputs.logps.isfinite()
        w = _WEIGHTS[self.weight](-inputs.logps, counted)
        amplitude, scale = self.amplitude(inputs.progress), self.scale(inputs.progress)
        return self._finish(1 + amplitude * w + scale * w * _normal(inputs), inputs)


@dataclass(frozen=True)
class IdentityGuide:
    """q = 1, for controls: stock GRPO with the same anchor, through the guided path."""

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        return inputs.logps.new_ones(inputs.logps.shape)


@dataclass(frozen=True)
class ShuffledGuide:
    """Control: the values of ``inner``, permuted at random within each sequence's tokens.

    The distribution of q stays, its place is lost: what a guide owes to where it acts is the
    difference to this one.
    """

    inner: Guide

    def __post_init__(self) -> None:
        check_guide(self.inner)

    def __call__(self, inputs: GuideInputs) -> torch.Tensor:
        import torch

        q = check_q(self.inner(inputs), inputs)
        mask = inputs.mask.bool()
        position = torch.arange(q.shape[1], device=q.device).expand_as(q)
        # Completion tokens first, once in their order and once in a random one.
        ordered = torch.where(mask, position, position + q.shape[1]).argsort(dim=1)
        shuffled = _uniform(inputs).where(mask, 2.0).argsort(dim=1)
        moved = torch.ones_like(q).scatter(1, ordered, q.gather(1, shuffled))
        return moved.where(mask, 1.0)


def compose(*guides: Guide, low: float = LOW, high: float = HIGH) -> Guide:
    """The product of several guides (eq. 7 is a product already), clamped once more."""
    if not guides:
        raise SageError("compose needs at least one guide")
    for guide in guides:
        check_guide(guide)
    clamp = _Clamped(low=low, high=high)

    def product(inputs: GuideInputs) -> torch.Tensor:
        q = check_q(guides[0](inputs), inputs)
        for guide in guides[1:]:
            q = q * check_q(guide(inputs), inputs)
        return clamp._finish(q, inputs)

    return product


# -- weights of the token guide --------------------------------------------------------------------


def _normal(inputs: GuideInputs) -> torch.Tensor:
    """Standard normal noise, a draw for every position: the mask never shifts the stream."""
    import torch

    shape, generator = inputs.logps.shape, inputs.generator
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(inputs.logps)


def _uniform(inputs: GuideInputs) -> torch.Tensor:
    """Noise between 0 and 1, a draw for every position."""
    import torch

    shape, generator = inputs.logps.shape, inputs.generator
    return torch.rand(shape, generator=generator, dtype=torch.float32).to(inputs.logps)


def _minmax(surprisal: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    import torch

    values = surprisal.where(on, torch.nan)
    ends = torch.tensor([0.05, 0.95], dtype=values.dtype, device=values.device)
    low, high = torch.nanquantile(values, ends, dim=1, keepdim=True)
    return _scaled(values.clamp(low, high) - low, high - low, on)


def _rank(surprisal: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """Ranks 0..n-1 over n-1; equal values share their mean rank."""
    import torch

    values = surprisal.where(on, torch.inf)
    ascending = values.sort(dim=1).values
    first = torch.searchsorted(ascending, values)
    last = torch.searchsorted(ascending, values, right=True)
    rank = (first + last - 1) / 2 * on
    largest_rank = on.sum(1, keepdim=True) - 1
    lowest = ascending[:, :1]
    highest = surprisal.where(on, -torch.inf).amax(1, keepdim=True)
    return _scaled(rank.to(surprisal), largest_rank.to(surprisal), on & (lowest < highest))


def _zscore(surprisal: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    n = on.sum(1, keepdim=True).clamp(min=1)
    values = surprisal.where(on, 0.0)
    centred = values - values.sum(1, keepdim=True) / n
    spread = ((centred**2 * on).sum(1, keepdim=True) / n).sqrt()
    weight = (centred / spread.clamp(min=1e-12)).sigmoid()
    return weight.where(on & (spread > 1e-12), 0.0)


def _scaled(value: torch.Tensor, width: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """value / width where the width is not zero and the token counts, else 0."""
    import torch

    smallest = torch.finfo(value.dtype).tiny
    return (value / width.clamp(min=smallest)).where(on & (width > 0), 0.0)


_WEIGHTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "minmax": _minmax,
    "rank": _rank,
    "zscore": _zscore,
}


# -- checks of what a trainer is handed ------------------------------------------------------------


def check_guide(guide: object) -> None:
    """Raise a SageError where ``guide`` is not something to call with a GuideInputs."""
    if isinstance(guide, type):
        raise SageError(
            f"the guide is the class {guide.__name__}, not an instance: write {guide.__name__}()"
        )
    if isinstance(guide, str | Mapping):
        choice = {"name": guide} if isinstance(guide, str) else dict(guide)
        raise SageError(
            f"the guide {guide!r} is a choice and not yet a guide: "
            f"hand over build_guide({choice!r})"
        )
    if not callable(guide):
        raise SageError(
            f"a guide is called with a GuideInputs and returns q, one value for each token: "
            f"{guide!r} cannot be called"
        )
    try:
        signature = inspect.signature(guide)
    except ValueError:  # a callable that does not say what it takes
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise SageError(
            f"a guide is called with one GuideInputs, and {guide!r} takes something else: {error}"
        ) from None


def try_guide(guide: Guide) -> None:
    """Call a guide on six tokens. SageError where it asks for an input that there is not, or
    returns no value for each token: else that would come to light after the first generation.

    Another error is none of this: what a guide brings along may lie on another device.
    """
    import torch

    tokens = torch.arange(6).view(2, 3)
    inputs = GuideInputs(
        entropies=0.5 + 0.3 * tokens,
        logps=-0.1 - 0.4 * tokens,
        mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        progress=0.0,
        generator=torch.Generator().manual_seed(0),
        ids=tokens,
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            q = guide(inputs)
        except NoSuchInput:
            raise
        except Exception:
            return
    if not isinstance(q, torch.Tensor) or q.shape != tokens.shape:
        check_q(q, inputs)


def check_q(q: object, inputs: GuideInputs) -> torch.Tensor:
    """``q`` as a guide returned it, 1 outside the mask, if it is what eq. 7 needs; otherwise a
    SageError."""
    import torch

    wanted = (
        f"the guide must return positive finite values of shape {tuple(inputs.logps.shape)}, "
        f"one for each token"
    )
    if not isinstance(q, torch.Tensor):
        raise SageError(f"{wanted}, not {q!r} of type {type(q).__name__}")
    if q.shape != inputs.logps.shape:
        raise SageError(f"{wanted}, not a tensor of shape {tuple(q.shape)}")
    q = q.where(inputs.mask.bool(), 1.0)
    if not q.isfinite().all() or (q <= 0).any():
        raise SageError(f"{wanted}, and some are not")
    return q


# -- choices ---------------------------------------------------------------------------------------

#: What a profile's ``guide: {name: ...}`` may name.
GUIDES: dict[str, type[Any]] = {
    "branch": BranchGuide,
    "random": RandomGuide,
    "token": TokenGuide,
    "identity": IdentityGuide,
    "shuffled": ShuffledGuide,
}


def check_choice(choice: Mapping[str, Any], where: str = "guide") -> None:
    """Raise a SageError for an unknown name or parameter, or a value that the guide cannot have.

    Args:
        choice: ``{name: token, weight: rank}``: a name of GUIDES and parameters of its class.
            Schedules are mappings ``{high, low, periods, decay}``. The branch guide takes threshold
            and ratio, or instead threshold_quantile and clamp_quantile, quantiles of the base
            model's token entropies. A parameter of None counts as not given.
        where: what the sentence begins with, such as "profile laptop: methods.grpo_token.guide".
    """
    _make(choice, where, None)


def needs_entropies(choice: Mapping[str, Any]) -> bool:
    """Whether :func:`build_guide` needs the base model's entropies for this choice."""
    measured = getattr(_class_of(choice, "guide"), "measured", ())
    if any(choice.get(name) is not None for name in measured):
        return True
    inner = [value for value in choice.values() if isinstance(value, Mapping) and "name" in value]
    return any(needs_entropies(value) for value in inner)


def build_guide(choice: Mapping[str, Any], quantiles: Mapping[str, float] | None = None) -> Guide:
    """The guide of a choice, see :func:`check_choice`.

    Args:
        quantiles: the base model's token entropies, str(share) -> nats, as "quantiles" in
            entropy.json; needed where :func:`needs_entropies`.
    """
    check_choice(choice)
    if quantiles is None and needs_entropies(choice):
        raise SageError(
            "the guide's threshold is a quantile of the base model's entropies, which are not "
            "there: measure them first, or give threshold and ratio as numbers"
        )
    return _make(choice, "guide", quantiles)


def _class_of(choice: object, where: str) -> type[Any]:
    if not isinstance(choice, Mapping) or "name" not in choice:
        raise SageError(
            f"{where}: a guide is chosen by its name and parameters, such as "
            f"{{name: token, weight: rank}}, not by {choice!r}"
        )
    name = choice["name"]
    if not isinstance(name, str) or name not in GUIDES:
        raise SageError(f"{where}: there is no guide {name!r}: choose one of {', '.join(GUIDES)}")
    return GUIDES[name]


def _make(choice: Mapping[str, Any], where: str, quantiles: Mapping[str, float] | None) -> Guide:
    """The guide of a choice. Without ``quantiles`` the class's defaults stand in for what they
    would give: enough to check everything else."""
    cls = _class_of(choice, where)
    given = {name: value for name, value in choice.items() if name != "name"}
    measured = _take_measured(cls, given, where)
    arguments = read_parameters(cls, given, where, quantiles, also=getattr(cls, "measured", ()))
    try:
        if measured and quantiles is not None:
            guide: Guide = cls.from_entropies(quantiles, **measured, **arguments)
        else:
            guide = cls(**arguments)
    except SageError as error:
        raise SageError(f"{where}: {error}") from None
    return guide


def _take_measured(cls: type[Any], given: dict[str, Any], where: str) -> dict[str, float]:
    """Takes the quantiles out of ``given``; they stand instead of the numbers they give."""
    names: tuple[str, ...] = getattr(cls, "measured", ())
    if not names:
        return {}
    fixed = [name for name in cls.fixed if given.get(name) is not None]
    measured = [name for name in names if given.get(name) is not None]
    whole = (len(fixed), len(measured)) in ((len(cls.fixed), 0), (0, len(names)))
    if not whole:
        raise SageError(
            f"{where}: the guide takes either {' and '.join(cls.fixed)}, or {' and '.join(names)}"
        )
    shares = {name: _number(given.pop(name), f"{where}.{name}") for name in measured}
    for name in names:  # what is left is None
        given.pop(name, None)
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise SageError(f"{where}.{name} is a quantile, a share between 0 and 1, not {share}")
    ordered = list(shares.values())
    if ordered != sorted(set(ordered)):
        raise SageError(f"{where}: {' must lie below '.join(names)}")
    return shares


def read_parameters(
    cls: type[Any],
    given: Mapping[str, Any],
    where: str,
    quantiles: Mapping[str, float] | None = None,
    also: tuple[str, ...] = (),
) -> dict[str, Any]:
    """``given`` as keywords of the dataclass ``cls``, each read as its field's type.

    Raises a SageError for an unknown or missing parameter and for a value of another type;
    ``where`` is what its sentence begins with, ``also`` what else may stand there.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    given = {name: value for name, value in given.items() if value is not None}
    arguments = {}
    for name, value in given.items():
        if name not in fields:
            known = ", ".join((*fields, *also)) or "none"
            raise SageError(f"{where}: there is no parameter {name!r}; known ones are {known}")
        arguments[name] = _read(fields[name], value, f"{where}.{name}", quantiles)
    for name, f in fields.items():
        if f.default is dataclasses.MISSING and name not in given:
            raise SageError(f"{where}: the parameter {name!r} is missing")
    return arguments


def _read(
    f: dataclasses.Field[Any], value: Any, where: str, quantiles: Mapping[str, float] | None
) -> Any:
    kind = f.type if isinstance(f.type, str) else f.type.__name__
    if kind == "float":
        return _number(value, where)
    if kind == "Guide":
        return _make(value, where, quantiles)
    if kind == "CosineSchedule":
        return _schedule(value, where)
    if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
        raise SageError(f"{where} is a whole number, not {value!r}")
    if kind == "bool" and not isinstance(value, bool):
        raise SageError(f"{where} is true or false, not {value!r}")
    if kind == "str" and not isinstance(value, str):
        raise SageError(f"{where} is a word, not {value!r}")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SageError(f"{where} is a number, not {value!r}")
    return float(value)


def _schedule(value: object, where: str) -> CosineSchedule:
    if isinstance(value, CosineSchedule):
        return value
    if not isinstance(value, Mapping):
        raise SageError(
            f"{where} is a schedule over the run, such as "
            f"{{high: 0.3, low: 0.1, periods: 8, decay: 0.9}}, not {value!r}"
        )
    arguments = read_parameters(CosineSchedule, value, where)
    try:
        return CosineSchedule(**arguments)
    except SageError as error:
        raise SageError(f"{where}: {error}") from None
