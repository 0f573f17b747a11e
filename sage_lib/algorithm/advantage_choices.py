"""Advantages that a profile chooses, by a mapping such as ``{name: pass_at_k, k: 4}``. To check a
choice needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sage_lib.algorithm.advantages import (
    AdvantageShaper,
    BetaNormalised,
    ClipCov,
    EntropyBonus,
    KLCov,
    MaxRL,
    NegativeSamples,
    PassAtK,
    PerplexityAdvantage,
    PositionBonus,
    RepoR,
)
from sage_lib.algorithm.guide_choices import split_choice
from sage_lib.validation import make, pick

#: Each shaper by its name in a profile's ``advantage: {name: ...}``.
ADVANTAGES: dict[str, type[Any]] = {
    "perplexity": PerplexityAdvantage,
    "position": PositionBonus,
    "negative_samples": NegativeSamples,
    "beta_normalised": BetaNormalised,
    "pass_at_k": PassAtK,
    "maxrl": MaxRL,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "entropy": EntropyBonus,
    "repo_r": RepoR,
}


def build_advantage(
    choice: str | Mapping[str, Any] | AdvantageShaper, where: str = "advantage"
) -> AdvantageShaper:
    """Return the shaper of a choice ``{name: ..., parameter: ...}``. An instance is returned.

    For a wrong name, parameter or value it raises a SageError that begins with ``where``.
    """
    if isinstance(choice, AdvantageShaper):
        return choice
    name, parameters = split_choice(choice)
    shaper: AdvantageShaper = make(pick(name, ADVANTAGES, where, "advantage"), parameters, where)
    return shaper
