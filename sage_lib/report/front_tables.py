"""GRPO's front over beta, and which methods lie outside it.

A point (pass@1, pass@256) of GRPO at one beta is no baseline, since another beta gives another one.
The baseline is the *front*, the line through GRPO's points in the order of beta, which may bend
back. "Raises both" means to lie outside it: beyond what GRPO reaches at any beta.

Everything is exact pass@k of valid work (:mod:`exact_tables`): nothing is sampled, and intervals
are over training seeds and problems. The base and the learning rate are those of one run of SFT and
one choice, and no interval covers them.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import BASE, Method, Profile
from sage_lib.report import exact_tables
from sage_lib.report.result_tables import DIFFERENCES, common_seeds, difference_rows, holds_for

#: What is said of a method that lies neither outside nor inside.
UNTOLD = "not separated from the front"
#: The two axes of the front.
AXES = (1, 256)
#: What two methods are compared in: the metrics of :func:`paired`.
PAIRED = (*(f"pass@{k}" for k in AXES), "rare mass")
#: The families of methods that were tried to choose a setting: they are no arms of a comparison.
TRIED = ("choice", "choice_updates")
#: Points between two neighbours of the front that are tried.
FINENESS = 50
POINTS = ["method", "beta", "anchor", "guide", "seeds", "problems"]
#: Fewer training seeds than this decide nothing.
FEWEST_SEEDS = 3
#: The excess over the front, its interval over seeds and problems, and over seeds alone: where the
#: two say different things, nothing is told.
EXCESS = ("excess", "low", "high", "low over seeds", "high over seeds")
OUTSIDE = [
    *("method", "on_front", "beta", "nearest", "to_base", "seeds", "holds_for"),
    *EXCESS,
    *(
        f"{name} {part}"
        for name in ("pass@1", "pass@256")
        for part in ("difference", "low", "high")
    ),
    "verdict",
]


def beta_of(profile: Profile, method: str) -> float:
    """The beta that a method is trained at; NaN where no anchor is trained (``rft``)."""
    if profile.methods[method].rft is not None:
        return float("nan")
    return float({**profile.rl, **profile.methods[method].rl}["beta"])


def front_methods(profile: Profile, anchor: str = "k3") -> list[str]:
    """Keys of the methods that differ from GRPO in beta alone, by rising beta; at ``anchor``.

    GRPO is the profile's reference, whose other settings count. Without KL no anchor matters, so
    beta 0 belongs to the front of each. The first of several methods of the same beta counts.
    """
    if not profile.methods:
        return []
    plain = _without_beta(profile, profile.reference)
    found: dict[float, str] = {}
    for key, method in profile.methods.items():
        beta = beta_of(profile, key)
        if _without_beta(profile, key) == plain and (method.anchor == anchor or beta == 0):
            found.setdefault(beta, key)
    return [found[beta] for beta in sorted(found)]


def _without_beta(profile: Profile, key: str) -> Method:
    return dataclasses.replace(without(profile, key, "beta"), anchor="")


def without(profile: Profile, key: str, setting: str) -> Method:
    """A method with all its RL settings but one, and without how it is shown: methods that differ
    in that setting alone are equal."""
    method = profile.methods[key]
    rl = {k: v for k, v in {**profile.rl, **method.rl}.items() if k != setting}
    return dataclasses.replace(method, label="", family="", seeds=None, rl=rl)


def points(profile: Profile, ks: Sequence[int] = AXES) -> pd.DataFrame:
    """Exact pass@k of every evaluated method: mean and 95 % interval over seeds and problems.

    Columns :data:`POINTS` and for each k "pass@k", "pass@k low", "pass@k high"; then rare, the mean
    mass of the rare way. Means over data sets. Bounds end at 0 and 1, and those of two seeds are
    NaN: their t interval is wider than what a pass@k can be.
    """
    exact = exact_tables.by_method(profile, ks)
    rows = []
    for method, found in exact.items():
        chosen = profile.methods.get(method)
        row: dict[str, Any] = {
            "method": method,
            "beta": beta_of(profile, method) if chosen else np.nan,
            "anchor": chosen.anchor if chosen and beta_of(profile, method) > 0 else "",
            "guide": str(chosen.guide["name"]) if chosen and chosen.guide else "",
            "seeds": len(found.seeds),
            "problems": found.values.shape[1],
        }
        zero = np.zeros_like(found.values)
        mean, low, high = metrics.paired_difference(found.values, zero, found.sets)
        low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
        if len(found.seeds) == 2:
            low, high = np.full_like(low, np.nan), np.full_like(high, np.nan)
        for column, k in enumerate(ks):
            row |= {f"pass@{k}": mean[column]}
            row |= {f"pass@{k} low": low[column], f"pass@{k} high": high[column]}
        row["rare"] = metrics.mean_over_sets(found.rare.mean(axis=0)[:, None], found.sets)[0]
        rows.append(row)
    return pd.DataFrame(rows)


def outside(profile: Profile, anchor: str = "k3") -> pd.DataFrame:
    """Each method against the nearest point of GRPO's front: columns :data:`OUTSIDE`.

    The front is the line through GRPO's points in the order of beta, whose end is the base (beta
    without end); both axes are scaled by the range that the front spans on them. ``excess`` is the
    additive epsilon indicator of the method's mean point against that line (Zitzler et al. 2003,
    IEEE Transactions on Evolutionary Computation 7, 117-132): the smallest, over the line's points,
    of the larger of the two scaled differences. Above 0 no point of the line is at least as good in
    both. Its interval is over seeds and problems, paired, with the nearest point taken as known:
    along the line the excess does not change, across it both differences count by the line's slope.
    ``nearest`` is that point's beta, between two of GRPO's. "outside" needs an interval above 0,
    "inside" one below it; either needs the t interval over seeds alone (``low over seeds`` and
    ``high over seeds``, :func:`over_seeds`) to say the same, which with few seeds can be the wider
    one, and :data:`FEWEST_SEEDS`.

    GRPO's own points between the ends are there too (``on_front``), each against the front without
    it. A chord between two betas is no GRPO policy: what lies on the front where it bulges is found
    outside the rest. A method that is no farther outside than these has shown nothing.
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
        if method == BASE or profile.methods[method].family in TRIED or method == front[0]:
            continue
        line = [*(exact[one] for one in front if one != method), exact[BASE]]
        if common_seeds_or_none([found, *line]):
            row = _against(profile, found, line)
            rows.append({"method": method, "on_front": method in front, **row})
    return pd.DataFrame(rows, columns=OUTSIDE)


def excess_of(profile: Profile, method: str, anchor: str = "k3") -> float:
    """The excess of one method over GRPO's front, as :func:`outside` has it, at the seeds that they
    share; NaN without such seeds, or without a front."""
    exact = exact_tables.by_method(profile, AXES)
    front = [exact[one] for one in front_methods(profile, anchor) if one in exact]
    if method not in exact or len(front) < 2:
        return float("nan")
    line = [*front, exact[BASE]]
    if not common_seeds_or_none([exact[method], *line]):
        return float("nan")
    return float(_against(profile, exact[method], line)["excess"])


def common_seeds_or_none(found: list[exact_tables.Exact]) -> bool:
    """Whether there is a seed that all trained methods have."""
    trained = [set(one.seeds) for one in found if one.seeds != [None]]
    return bool(trained) and bool(set.intersection(*trained))


def _against(
    profile: Profile, found: exact_tables.Exact, line: list[exact_tables.Exact]
) -> dict[str, Any]:
    """A row of :func:`outside`: ``found`` against the line through ``line``."""
    values, seeds = common_seeds([(one.values, one.seeds) for one in (found, *line)])
    means = [metrics.mean_over_sets(one.mean(axis=0), found.sets) for one in values]
    ours, corners = means[0], np.array(means[1:])
    scale = np.ptp(corners, axis=0)
    shares = np.linspace(0, 1, FINENESS + 1)
    best = (np.inf, 0, 0.0)
    for left in range(len(corners) - 1):
        points_of = np.outer(1 - shares, corners[left]) + np.outer(shares, corners[left + 1])
        larger = ((ours - points_of) / scale).max(axis=1)
        at = int(larger.argmin())
        best = min(best, (float(larger[at]), left, float(shares[at])))
    _, left, share = best
    nearest = (1 - share) * values[1 + left] + share * values[2 + left]
    apart = (ours - (1 - share) * corners[left] - share * corners[left + 1]) / scale
    step = (corners[left + 1] - corners[left]) / scale
    if 0 < share < 1 and step[0] * step[1] < 0:
        weights = np.abs(step[::-1]) / np.abs(step).sum()
    else:  # at a corner the larger difference alone counts
        weights = (apart == apart.max()).astype(float)
    across = ((values[0] - nearest) / scale) @ weights
    excess = metrics.paired_difference(across[..., None], 0 * across[..., None], found.sets)
    of_seeds = [float(metrics.mean_over_sets(one[:, None], found.sets)[0]) for one in across]
    mean, low, high = metrics.paired_difference(values[0], nearest, found.sets)
    betas = [beta_of(profile, one.method) if one.method != BASE else np.inf for one in line]
    between = betas[left] if share == 0 else betas[left + 1]
    if 0 < share < 1 and np.isfinite(betas[left + 1]):
        between = (1 - share) * betas[left] + share * betas[left + 1]
    elif 0 < share < 1:
        between = betas[left]  # and the base, by a share that has no beta
    row: dict[str, Any] = {
        "beta": beta_of(profile, found.method),
        "nearest": between,
        "to_base": share if not np.isfinite(betas[left + 1]) else 0.0,
        "seeds": len(seeds),
        "holds_for": holds_for(len(seeds)),
        "excess": float(excess[0][0]),
        "low": float(excess[1][0]),
        "high": float(excess[2][0]),
    }
    for column, k in enumerate(AXES):
        row[f"pass@{k} difference"] = mean[column]
        row |= {f"pass@{k} low": low[column], f"pass@{k} high": high[column]}
    judged = _verdict(row["low"], row["high"], len(seeds))
    alone = over_seeds(of_seeds)
    row["low over seeds"], row["high over seeds"] = alone
    same = _verdict(*alone, len(seeds)) == judged
    return {**row, "verdict": judged if same else UNTOLD}


def over_seeds(means: Sequence[float]) -> tuple[float, float]:
    """The 95 % t interval of the mean over seeds alone, from each seed's value; NaN for one seed.

    It holds what seeds differ by, and of the problems what they happen to be: the same for all.
    """
    if len(means) < 2:
        return np.nan, np.nan
    half = t.ppf(0.975, len(means) - 1) * np.std(means, ddof=1) / np.sqrt(len(means))
    return float(np.mean(means) - half), float(np.mean(means) + half)


def _verdict(low: float, high: float, seeds: int) -> str:
    if seeds < FEWEST_SEEDS:
        return "too few seeds"
    if low > 0:
        return "outside"
    return "inside" if high < 0 else UNTOLD


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
    rows = []
    for method in methods:
        if method in exact and method != reference:
            arms = pair(exact[method], exact[reference])
            found = pair_rows(*arms, exact[method].sets)
            rows += [{"method": method, "against": reference, **row} for row in found]
    return pd.DataFrame(rows, columns=[*DIFFERENCES, "detectable"])


def pair(method: exact_tables.Exact, against: exact_tables.Exact) -> tuple[np.ndarray, np.ndarray]:
    """The columns :data:`PAIRED` of two methods, of the seeds that both have: (seeds, problems, 3)
    each, of the base one seed."""
    arms = [(with_rare(one), one.seeds) for one in (method, against)]
    (ours, theirs), _ = common_seeds(arms)
    return ours, theirs


def pair_rows(
    ours: np.ndarray, theirs: np.ndarray, sets: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Rows of :func:`paired` without the methods, of what :func:`pair` gives."""
    effects = metrics.minimum_detectable_effect(ours - theirs, sets)
    if len(ours) == len(theirs) == 1:  # how far seeds lie apart is not known
        effects = np.full(len(PAIRED), np.nan)
    rows = difference_rows(ours, theirs, PAIRED, sets)
    for row, effect in zip(rows, effects, strict=True):
        yield {**row, "detectable": effect}


def with_rare(found: exact_tables.Exact) -> np.ndarray:
    """pass@k and the rare way's mass as columns: (seeds, problems, ks + 1)."""
    return np.concatenate([found.values, found.rare[..., None]], axis=-1)
