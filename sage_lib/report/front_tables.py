"""GRPO's front over beta, and which methods lie outside it.

A point (pass@1, pass@256) of GRPO at one beta is no baseline: beta trades one for the other. The
baseline is the *front*, the line through GRPO's points in the order of beta. "Raises both" means to
lie outside it: above what GRPO reaches at any beta.

Everything is exact pass@k of valid work (:mod:`exact_tables`), so training seeds and problems are
the only noise.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import BASE, Method, Profile
from sage_lib.report import exact_tables
from sage_lib.report.result_tables import DIFFERENCES, common_seeds, difference_rows, holds_for

#: The two axes of the front.
AXES = (1, 256)
#: The family of methods that were tried to choose a setting: they are no arms of a comparison.
TRIED = "choice"
#: Points between two neighbours of the front that are tried.
FINENESS = 50
POINTS = ["method", "beta", "anchor", "guide", "seeds", "problems"]
OUTSIDE = [
    *("method", "beta", "nearest", "seeds", "holds_for", "excess"),
    *(
        f"{name} {part}"
        for name in ("pass@1", "pass@256")
        for part in ("difference", "low", "high")
    ),
    "verdict",
]


def beta_of(profile: Profile, method: str) -> float:
    """The beta that a method is trained at."""
    return float({**profile.rl, **profile.methods[method].rl}["beta"])


def front_methods(profile: Profile, anchor: str = "k3") -> list[str]:
    """Keys of the methods that differ from GRPO in beta alone, by rising beta; at ``anchor``.

    Without KL no anchor matters, so beta 0 belongs to the front of each. The first of several
    methods of the same beta counts.
    """
    plain = Method("")
    found: dict[float, str] = {}
    for key, method in profile.methods.items():
        rl = {k: v for k, v in method.rl.items() if k != "beta"}
        rest = dataclasses.replace(
            method, label="", family=plain.family, seeds=None, rl=rl, anchor=plain.anchor
        )
        beta = beta_of(profile, key)
        if rest == plain and (method.anchor == anchor or beta == 0):
            found.setdefault(beta, key)
    return [found[beta] for beta in sorted(found)]


def points(profile: Profile, ks: Sequence[int] = AXES) -> pd.DataFrame:
    """Exact pass@k of every evaluated method: mean and 95 % interval over seeds and problems.

    Columns :data:`POINTS` and for each k "pass@k", "pass@k low", "pass@k high"; then rare, the mean
    mass of the rare way. Means over data sets.
    """
    exact = exact_tables.by_method(profile, ks)
    rows = []
    for method, found in exact.items():
        chosen = profile.methods.get(method)
        row: dict[str, Any] = {
            "method": method,
            "beta": beta_of(profile, method) if chosen else np.nan,
            "anchor": chosen.anchor if chosen and beta_of(profile, method) else "",
            "guide": str(chosen.guide["name"]) if chosen and chosen.guide else "",
            "seeds": len(found.seeds),
            "problems": found.values.shape[1],
        }
        zero = np.zeros_like(found.values)
        mean, low, high = metrics.paired_difference(found.values, zero, found.sets)
        for column, k in enumerate(ks):
            row |= {f"pass@{k}": mean[column]}
            row |= {f"pass@{k} low": low[column], f"pass@{k} high": high[column]}
        row["rare"] = metrics.mean_over_sets(found.rare.mean(axis=0)[:, None], found.sets)[0]
        rows.append(row)
    return pd.DataFrame(rows)


def outside(profile: Profile, anchor: str = "k3") -> pd.DataFrame:
    """Each method against the nearest point of GRPO's front: columns :data:`OUTSIDE`.

    ``excess`` is the additive epsilon indicator of the method's mean point against the front
    (Zitzler et al. 2003, IEEE Transactions on Evolutionary Computation 7, 117-132): the smallest,
    over the front's points, of the larger of the two differences. Above 0 the point lies outside:
    no GRPO reaches both its pass@1 and its pass@256. ``nearest`` is the front's point where it is
    attained, between two betas; the differences to that point, paired by seed and problem, have
    95 % intervals. "outside" needs both above 0, "inside" both below 0.

    The nearest point is chosen by the means and then taken as known, so that intervals are a little
    too narrow where the front is strongly bent.
    """
    exact = exact_tables.by_method(profile, AXES)
    front = [method for method in front_methods(profile, anchor) if method in exact]
    if len(front) < 2:
        raise SageError(
            f"profile {profile.name} has {len(front)} evaluated points of GRPO's front at the "
            f"anchor {anchor}: a front needs two or more values of beta"
        )
    rows = []
    for method, found in exact.items():
        if method == BASE or method in front or profile.methods[method].family == TRIED:
            continue
        rows.append(
            {"method": method, **_against(profile, found, [exact[m] for m in front], front)}
        )
    return pd.DataFrame(rows, columns=OUTSIDE)


def _against(
    profile: Profile,
    found: exact_tables.Exact,
    of_front: list[exact_tables.Exact],
    front: list[str],
) -> dict[str, Any]:
    """A row of :func:`outside`."""
    ours = metrics.mean_over_sets(found.values.mean(axis=0), found.sets)
    theirs = [metrics.mean_over_sets(one.values.mean(axis=0), one.sets) for one in of_front]
    shares = np.linspace(0, 1, FINENESS + 1)
    best = (np.inf, 0, 0.0)
    for left in range(len(front) - 1):
        line = np.outer(1 - shares, theirs[left]) + np.outer(shares, theirs[left + 1])
        larger = (ours - line).max(axis=1)
        at = int(larger.argmin())
        best = min(best, (float(larger[at]), left, float(shares[at])))
    excess, left, share = best
    betas = [beta_of(profile, front[left + side]) for side in (0, 1)]
    sides = found, of_front[left], of_front[left + 1]
    one, low_side, high_side = common_seeds([(side.values, side.seeds) for side in sides])[0]
    nearest = (1 - share) * low_side + share * high_side
    mean, low, high = metrics.paired_difference(one, nearest, found.sets)
    row: dict[str, Any] = {
        "beta": beta_of(profile, found.method),
        "nearest": (1 - share) * betas[0] + share * betas[1],
        "seeds": len(one),
        "holds_for": holds_for(len(one)),
        "excess": excess,
    }
    for column, k in enumerate(AXES):
        row[f"pass@{k} difference"] = mean[column]
        row |= {f"pass@{k} low": low[column], f"pass@{k} high": high[column]}
    return {**row, "verdict": _verdict(low, high)}


def _verdict(low: np.ndarray, high: np.ndarray) -> str:
    if (low > 0).all():
        return "outside"
    return "inside" if (high < 0).all() else "not separated from the front"


def paired(
    profile: Profile, reference: str, methods: Sequence[str], ood: bool = False
) -> pd.DataFrame:
    """Exact pass@1, pass@256 and mass of the rare way of ``methods`` minus those of ``reference``.

    Columns :data:`result_tables.DIFFERENCES` and detectable, the smallest true difference that as
    many seeds and problems would find with 80 % power. Methods that were not evaluated are left
    out.
    """
    exact = exact_tables.by_method(profile, AXES, ood)
    if reference not in exact:
        known = ", ".join(exact)
        raise SageError(f"{reference!r} has no exact evaluation: choose one of {known}")
    names = [*(f"pass@{k}" for k in AXES), "rare mass"]
    rows = []
    for method in methods:
        if method not in exact or method == reference:
            continue
        arms = [(_with_rare(exact[key]), exact[key].seeds) for key in (method, reference)]
        (ours, theirs), _ = common_seeds(arms)
        sets = exact[method].sets
        effects = metrics.minimum_detectable_effect(ours - theirs, sets)
        found = difference_rows(ours, theirs, names, sets)
        for row, effect in zip(found, effects, strict=True):
            rows.append({"method": method, "against": reference, **row, "detectable": effect})
    return pd.DataFrame(rows, columns=[*DIFFERENCES, "detectable"])


def _with_rare(found: exact_tables.Exact) -> np.ndarray:
    """pass@k and the rare way's mass as columns: (seeds, problems, ks + 1)."""
    return np.concatenate([found.values, found.rare[..., None]], axis=-1)
