"""From a profile's guide section, and where it says so the base model's entropies, to the guide of eq. 11."""

from sage_lib.config import Guide
from sage_lib.errors import SageError
from sage_lib.guides import BranchGuide


def resolve_guide(guide: Guide, entropy: dict) -> BranchGuide:
    """Eq. 11 with the profile's threshold and ratio, or with those that the base model's entropies give.

    From entropies: the threshold is their quantile ``threshold_quantile``, and the ratio lets q reach the upper clamp
    at the quantile ``clamp_quantile``. ``entropy`` is the SFT stage's entropy.json.
    """
    threshold, ratio = guide.threshold, guide.ratio
    if threshold is None:
        try:
            threshold, top = (entropy["quantiles"][str(q)] for q in (guide.threshold_quantile, guide.clamp_quantile))
        except KeyError as error:
            raise SageError(f"the guide's quantile {error} was not measured: choose from {', '.join(entropy['quantiles'])}") from None
        if top <= threshold:
            raise SageError("the base model's entropies do not differ between threshold_quantile and clamp_quantile: choose them further apart")
        ratio = (guide.high - 1) / (top - threshold)
    return BranchGuide(threshold=threshold, ratio=ratio, low=guide.low, high=guide.high)
