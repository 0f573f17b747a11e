"""From a method's guide, a profile's guide section, and where it says so the base model's entropies, to a guide."""

from sage_lib.algorithm.guides import (
    BranchGuide,
    IdentityGuide,
    RandomGuide,
    ShuffledGuide,
    TokenGuide,
)
from sage_lib.algorithm.guides import Guide as GuideFunction
from sage_lib.errors import SageError
from sage_lib.experiment.profile import Guide

#: What a method's ``guide`` may be.
GUIDES = ("branch", "random", "token", "token_rank", "token_zscore", "identity", "shuffled_branch")


def resolve_guide(name: str, guide: Guide, entropy: dict) -> GuideFunction:
    """The guide called ``name`` with the profile's clamp; ``entropy`` is the SFT stage's entropy.json."""
    clamp = {"low": guide.low, "high": guide.high}
    makers = {
        "branch": lambda: resolve_branch(guide, entropy),
        "shuffled_branch": lambda: ShuffledGuide(resolve_branch(guide, entropy)),
        "random": lambda: RandomGuide(**clamp),
        "token": lambda: TokenGuide("minmax", **clamp),
        "token_rank": lambda: TokenGuide("rank", **clamp),
        "token_zscore": lambda: TokenGuide("zscore", **clamp),
        "identity": IdentityGuide,
    }
    if name not in makers:
        raise SageError(f"there is no guide {name!r}: choose one of {', '.join(GUIDES)}")
    return makers[name]()


def resolve_branch(guide: Guide, entropy: dict) -> BranchGuide:
    """Eq. 11 with the profile's threshold and ratio, or with those that the base model's entropies give.

    From entropies: the threshold is their quantile ``threshold_quantile``, and the ratio lets q reach the upper clamp
    at the quantile ``clamp_quantile``. ``entropy`` is the SFT stage's entropy.json.
    """
    threshold, ratio = guide.threshold, guide.ratio
    if threshold is None:
        try:
            threshold, top = (
                entropy["quantiles"][str(q)]
                for q in (guide.threshold_quantile, guide.clamp_quantile)
            )
        except KeyError as error:
            raise SageError(
                f"the guide's quantile {error} was not measured: choose from {', '.join(entropy['quantiles'])}"
            ) from None
        if top <= threshold:
            raise SageError(
                "the base model's entropies do not differ between threshold_quantile and clamp_quantile: choose them further apart"
            )
        ratio = (guide.high - 1) / (top - threshold)
    return BranchGuide(threshold=threshold, ratio=ratio, low=guide.low, high=guide.high)
