"""Advantages that a profile chooses, by a mapping such as ``{name: pass_at_k, k: 4}``. To check a
choice needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sage_lib.algorithm import advantages
from sage_lib.algorithm.guide_choices import split_choice
from sage_lib.validation import make, pick

#: Each shaper by its name in a profile's ``advantage: {name: ...}``.
ADVANTAGES: dict[str, type[Any]] = {
    "perplexity": advantages.PerplexityAdvantage,
    "position": advantages.PositionBonus,
    "negative_samples": advantages.NegativeSamples,
    "beta_normalised": advantages.BetaNormalised,
    "pass_at_k": advantages.PassAtK,
    "maxrl": advantages.MaxRL,
    "clip_cov": advantages.ClipCov,
    "kl_cov": advantages.KLCov,
    "entropy": advantages.EntropyBonus,
    "repo_r": advantages.RepoR,
}


def build_advantage(
    choice: str | Mapping[str, Any] | advantages.AdvantageShaper, where: str = "advantage"
) -> advantages.AdvantageShaper:
    """Return the shaper of a choice ``{name: ..., parameter: ...}``. An instance is returned.

    For a wrong name, parameter or value it raises a SageError that begins with ``where``.
    """
    if isinstance(choice, advantages.AdvantageShaper):
        return choice
    name, parameters = split_choice(choice)
    shaper: advantages.AdvantageShaper = make(
        pick(name, ADVANTAGES, where, "advantage"), parameters, where
    )
    return shaper
