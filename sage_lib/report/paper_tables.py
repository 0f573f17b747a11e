"""Tables 3 and 6 of the paper, measured: the points of their methods, exactly."""

import pandas as pd

from sage_lib.experiment import runs
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.report import front_tables, reported

#: Family of the methods of Table 3 (losses) and Table 6 (threshold by ratio).
TABLE3, TABLE6 = "losses", "table6"


def table3(profile: Profile) -> pd.DataFrame:
    """Exact pass@1 and pass@256 of the base, the first method and those of Table 3's losses.

    Columns as :func:`front_tables.points`. Empty where none of them was evaluated.
    """
    return _of_family(profile, TABLE3, [BASE, profile.reference])


def table6(profile: Profile) -> pd.DataFrame:
    """The same of Branch by threshold and ratio (both in nats), the columns after method.

    A small vocabulary's entropies are small: the profile names quantiles of the base's instead of
    the paper's 0.8 to 2.0 nats and 0.1 to 0.5 (``guide`` in the profile), which give these.
    """
    found = _of_family(profile, TABLE6, [])
    guides = [runs.guide_of(profile, profile.methods[key].guide or {}) for key in found["method"]]
    for place, name in enumerate(("threshold", "ratio"), 1):
        found.insert(place, name, [float(getattr(guide, name)) for guide in guides])
    return found.sort_values(["threshold", "ratio"], ignore_index=True)


def reported_table6() -> pd.DataFrame:
    """The paper's Table 6: rows thresholds (nats), columns metric and ratio; AMC23 alone."""
    frame = reported.load("sage_table6")
    named = frame["row"].str.extract(r"threshold=(?P<threshold>[\d.]+), ratio=(?P<ratio>[\d.]+)")
    return frame.join(named.astype(float)).pivot(
        index="threshold", columns=["metric", "ratio"], values="mean"
    )


def _of_family(profile: Profile, family: str, beside: list[str]) -> pd.DataFrame:
    points = front_tables.points(profile)
    own = [key for key, method in profile.methods.items() if method.family == family]
    if not set(own) & set(points["method"]):
        return points.iloc[:0].copy()
    return points[points["method"].isin([*beside, *own])].reset_index(drop=True)
