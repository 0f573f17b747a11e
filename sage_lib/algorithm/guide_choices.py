"""Guides that a profile chooses, by a mapping such as ``{name: token, weight: rank}``.

The name is one of :data:`~sage_lib.algorithm.guides.GUIDES`, or names a class of the user's:
``{name: "my_module:MyGuide", threshold: 1.0}``. To check one of our guides needs no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sage_lib import consent
from sage_lib.algorithm.guides import GUIDES, HIGH, LOW, BranchGuide, Guide, check_guide
from sage_lib.errors import SageError
from sage_lib.validation import make, pick, unknown


def split_choice(choice: object) -> tuple[Any, dict[str, Any]]:
    """Return the name of a choice, and its parameters that are not None. A choice is ``name``, or
    ``{name: ..., parameter: ...}``."""
    section = choice if isinstance(choice, Mapping) else {"name": choice}
    parameters = {k: v for k, v in section.items() if k != "name" and v is not None}
    return section.get("name"), parameters


def guide_class(name: object, where: str = "guide") -> Callable[..., Any]:
    """Return the class of a name of :data:`GUIDES` or of ``module:Class``, or a function that makes
    a guide. This function alone imports a user's guide, after :func:`sage_lib.consent.imported`.

    Without a class or consent it raises a SageError that begins with ``where``.
    """
    if name is None:
        raise SageError(f"{where}: the key name is missing: choose one of {', '.join(GUIDES)}")
    if not isinstance(name, str) or ":" not in name:
        return pick(name, GUIDES, where, "guide")
    try:
        cls: Callable[..., Any] = consent.imported(name, "guide")
    except SageError as error:
        raise SageError(f"{where}: {error}") from error
    return cls


def check_choice(choice: str | Mapping[str, Any], where: str = "guide") -> None:
    """Raise a SageError, which begins with ``where``, for a wrong name, parameter or value."""
    _make(choice, where, None)
    for name, parameters in nested(choice):
        if name == "success" and "policy" not in parameters:
            raise SageError(f"{where}: success reads a policy: give it policy, a method with rft")


def nested(choice: object) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield name and parameters of a choice, and of the guides inside it."""
    name, parameters = split_choice(choice)
    yield name, parameters
    if name in GUIDES and "inner" in parameters:
        yield from nested(parameters["inner"])


def reads_rewards(choice: str | Mapping[str, Any]) -> bool:
    """Return whether the guide of this choice, or its inner guide, needs rewards."""
    return any(getattr(guide_class(name), "reads_rewards", False) for name, _ in nested(choice))


def needs_entropies(choice: Mapping[str, Any]) -> bool:
    """Return whether :func:`build_guide` needs the base model's entropies for this choice."""
    quantiles = set(BranchGuide.quantile_keys)
    return any(
        name == "branch" and parameters.keys() & quantiles for name, parameters in nested(choice)
    )


def build_guide(
    choice: str | Mapping[str, Any], quantiles: Mapping[str, float] | None = None
) -> Guide:
    """Return the guide of a choice ``{name: ..., parameter: ...}``; schedules are mappings, too.

    The branch guide takes threshold and ratio, or threshold_quantile and clamp_quantile: the
    quantiles of the base model's entropies where it begins to act and where q reaches ``high``, or
    with ``reverse: true`` its ``low``. ``quantiles`` are those, str(share) -> nats, as in
    entropy.json.
    """
    if quantiles is None and isinstance(choice, Mapping) and needs_entropies(choice):
        check_choice(choice)
        raise SageError(
            "the guide's threshold is a quantile of the base model's entropies, which are not "
            "there: measure them first, or give threshold and ratio as numbers"
        )
    return _make(choice, "guide", quantiles)


def _make(choice: object, where: str, quantiles: Mapping[str, float] | None) -> Guide:
    name, parameters = split_choice(choice)
    cls = guide_class(name, where)
    if name not in GUIDES:
        return _make_imported(cls, parameters, where)
    if "inner" in parameters:
        parameters["inner"] = _make(parameters["inner"], f"{where}.inner", quantiles)
    if cls is BranchGuide:
        parameters = _with_threshold(parameters, where, quantiles)
    guide: Guide = make(GUIDES[name], parameters, where)
    return guide


def _make_imported(cls: Callable[..., Any], parameters: dict[str, Any], where: str) -> Guide:
    """Make a guide of the user's. SageError where the class refuses its parameters."""
    known = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for key in parameters:
        if key not in known and not takes_any:
            raise unknown(where, key, known)
    try:
        guide: Guide = cls(**parameters)
        check_guide(guide)
    except Exception as error:
        raise SageError(f"{where}: {error}") from error
    return guide


def _with_threshold(
    parameters: dict[str, Any], where: str, quantiles: Mapping[str, float] | None
) -> dict[str, Any]:
    """Replace the quantiles of a choice by threshold and ratio. Without ``quantiles`` the guide has
    its defaults, with which a check reads all other parameters."""
    numbers = parameters.keys() & {"threshold", "ratio"}
    reverse = parameters.pop("reverse", False)
    if not isinstance(reverse, bool) or (reverse and numbers):
        raise SageError(f"{where}: reverse: true goes with quantiles; a ratio may be below 0")
    shares = [parameters.pop(name) for name in BranchGuide.quantile_keys if name in parameters]
    if (len(numbers), len(shares)) not in ((2, 0), (0, 2)):
        remedy = "set the other two to null" if numbers and shares else "give both of one pair"
        raise SageError(
            f"{where}: the guide takes either threshold and ratio (the paper's: 1.2 and 0.3), or "
            f"threshold_quantile and clamp_quantile: {remedy}"
        )
    if numbers:
        return parameters
    numeric = all(isinstance(s, (int, float)) and not isinstance(s, bool) for s in shares)
    if not (numeric and 0 <= shares[0] < shares[1] <= 1):
        raise SageError(
            f"{where}: threshold_quantile must lie below clamp_quantile, and both between 0 and 1, "
            f"not {shares[0]!r} and {shares[1]!r}"
        )
    if quantiles is None:
        return parameters
    low, high = map(float, shares)
    if not {str(low), str(high)} <= quantiles.keys():
        raise SageError(
            f"{where}: choose its quantiles from those that are measured, {', '.join(quantiles)}"
        )
    threshold, bound = quantiles[str(low)], quantiles[str(high)]  # nats
    if bound <= threshold:
        raise SageError(
            "the base model's entropies do not differ between threshold_quantile and "
            "clamp_quantile: choose them further apart"
        )
    q_at_bound = parameters.get("low", LOW) if reverse else parameters.get("high", HIGH)
    ratio = (q_at_bound - 1) / (bound - threshold)
    return {**parameters, "threshold": threshold, "ratio": ratio}
