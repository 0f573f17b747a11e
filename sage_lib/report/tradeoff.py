"""GRPO's front over beta, and which methods lie outside it.

GRPO at one beta is no baseline, since another beta has another (pass@1, pass@256). The baseline is
the *front*: the line through GRPO's points in the order of beta, which may bend back. It ends at
the base, where beta has no end. All but :func:`points` is exact pass@k of valid work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from sage_lib.errors import SageError
from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import BASE, Method, Profile
from sage_lib.experiment.results import Results
from sage_lib.report import inference, passk
from sage_lib.report.inference import FEWEST_SEEDS, Values
from sage_lib.report.passk import AXES

OUTSIDE, INSIDE, NOT_SEPARATED = "outside", "inside", "not separated from the curve"
#: Beyond the line by more than chance, and no further than GRPO itself lies from its own line.
AS_GRPO = "no further out than GRPO's own points"
OUTCOMES = {inference.AGREES: OUTSIDE, inference.DISAGREES: INSIDE}
#: Points between two neighbours of the front that are tried.
FINENESS = 50


def beta_of(profile: Profile, method: str) -> float:
    """The beta that a method is trained at; NaN for the base and for rejection sampling."""
    own = profile.methods.get(method)
    return np.nan if own is None or own.rft is not None else float(profile.rl_of(method)["beta"])


def curve_methods(
    profile: Profile, present: Iterable[str] | None = None, anchor: str = "k3"
) -> list[str]:
    """Methods that differ from the first one, GRPO, in beta alone, by rising beta.

    Of `present` (None: all) and with this anchor; at beta 0 no anchor matters. Of several methods
    with one beta the first counts.
    """

    def without_beta(key: str) -> Method:
        rl = {name: value for name, value in profile.rl_of(key).items() if name != "beta"}
        method = profile.methods[key]
        return replace(method, label="", family="", seeds=None, rl=rl, anchor="")

    among = profile.methods if present is None else set(present)
    found: dict[float, str] = {}
    for key in (one for one in profile.methods if one in among):
        beta, own = beta_of(profile, key), profile.methods[key].anchor
        anchored = own == anchor or beta == 0
        if anchored and without_beta(key) == without_beta(profile.baseline):
            found.setdefault(beta, key)
    return [found[beta] for beta in sorted(found)]


def points(results: Results, ks: Sequence[int] | None = None) -> pd.DataFrame:
    """Return pass@k of every evaluated method: a row each, with its beta, anchor and guide.

    Of each k "pass@k", "pass@k low" and "pass@k high" (95 % over seeds and problems; none for two
    seeds); where pass@k is exact, rare is the mean mass of the rare way.
    """
    ks, rows = passk.axes(results.profile) if ks is None else ks, []
    for name, group in passk.levels(passk.exact_or_sampled(results, ks)).groupby(
        "method", sort=False
    ):
        method, by_metric = str(name), group.set_index("metric")
        own, beta = results.profile.methods.get(method), beta_of(results.profile, method)
        row: dict[str, Any] = {"method": method, "beta": beta}
        row["anchor"] = own.anchor if own is not None and beta > 0 else ""
        row["guide"] = own.guide["name"] if own is not None and own.guide else ""
        row |= {size: int(group[size].iloc[0]) for size in ("seeds", "problems")}
        for k in (f"pass@{k}" for k in ks):
            at = by_metric.loc[k]
            row |= {k: at["mean"], f"{k} low": at["low"], f"{k} high": at["high"]}
        if "rare mass" in by_metric.index:
            row["rare"] = by_metric.loc["rare mass", "mean"]
        rows.append(row)
    return pd.DataFrame(rows)


def positions(
    results: Results,
    methods: Iterable[str] | None = None,
    anchor: str = "k3",
    ks: Sequence[int] = AXES,
) -> pd.DataFrame:
    """Each method (None: all) against GRPO's front in the two `ks` of pass@k: a row each.

    excess: the additive epsilon indicator of its mean point against the line, both axes scaled by
    the line's range (Zitzler et al. 2003, IEEE Trans. Evol. Comput. 7, 117-132). Above 0 no point
    of the line is as good in both. low, high: 95 % over seeds and problems, paired, the nearest
    point taken as known; low_seeds, high_seeds: over seeds alone. nearest: beta of the nearest
    point (inf: the base); to_base: how far it lies along the last stretch, which has no beta.

    GRPO's own points (on_front) stand against the line without them, as any method would that has
    a beta of its own. So these rows, judged with a bound of 0, show how often GRPO itself counts as
    outside. bound of the others: the largest excess of these rows (of three seeds or more), at
    least 0. One more GRPO would exceed the largest of n with probability 1 / (n + 1). "outside"
    needs both intervals above 0, three seeds, and an excess of at least the bound; "inside" needs
    both intervals below 0.

    Points of the line that lack a seed that others share with the method are left out. SageError
    for a front of fewer than two points.
    """
    profile, values = results.profile, passk.exact(results, ks)
    front = curve_methods(profile, values, anchor)
    if len(front) < 2:
        raise SageError(
            f"profile {results.name} has {len(front)} evaluated points of GRPO's front at the "
            f"anchor {anchor}: a front needs two or more values of beta"
        )

    def against_line(method: str, bound: float = 0.0) -> dict[str, Any]:
        others = [one for one in front if one != method]
        seeds = max((set(values[method].seeds) & set(values[one].seeds) for one in others), key=len)
        whole = [one for one in others if seeds <= set(values[one].seeds)]
        if not seeds:
            return {}
        betas = [beta_of(profile, one) for one in whole]
        line = [values[one] for one in (*whole, BASE)]
        row = {"method": method, "on_front": method in front, "beta": beta_of(profile, method)}
        return row | position(values[method], line, betas, bound)

    # No line without the point at the smallest beta goes past it.
    rows = {method: against_line(method) for method in front[1:]}
    enough = [row for row in rows.values() if row and row["seeds"] >= FEWEST_SEEDS]
    bound = max([0.0, *(row["excess"] for row in enough)])
    methods = [
        one for one in (values if methods is None else methods) if one not in (BASE, front[0])
    ]
    found = [rows[one] if one in rows else against_line(one, bound) for one in methods]
    return pd.DataFrame([row for row in found if row])


def position(
    ours: Values, line: Sequence[Values], betas: Sequence[float], bound: float = 0.0
) -> dict[str, Any]:
    """Return one row of :func:`positions`, of a method against a line that ends at the base.

    Of the values the first two columns count. bound: see :func:`positions`.
    """
    values, seeds = inference.at_common_seeds(ours, *line)
    values, sets = [one[..., :2] for one in values], ours.sets
    means = np.array([metrics.mean_over_sets(one.mean(axis=0), sets) for one in values])
    scale = np.ptp(means[1:], axis=0)
    _, left, share, weights = nearest_point(means[0] / scale, means[1:] / scale)
    nearest = (1 - share) * values[1 + left] + share * values[2 + left]
    across = (((values[0] - nearest) / scale) @ weights)[..., None]
    mean, low, high = (one.item() for one in metrics.paired_difference(across, 0 * across, sets))
    alone = inference.over_seeds([metrics.mean_over_sets(one, sets).item() for one in across])
    row: dict[str, Any] = {"nearest": np.inf if share == 1 else betas[left], "to_base": share}
    if left < len(betas) - 1:  # not the stretch that ends at the base
        beta = (1 - share) * betas[left] + share * betas[left + 1]
        row = {"nearest": beta, "to_base": 0.0}
    row["seeds"] = len(seeds)
    row |= {"excess": mean, "low": low, "high": high, "low_seeds": alone[0], "high_seeds": alone[1]}
    apart = np.stack(metrics.paired_difference(values[0], nearest, sets))
    for axis, of_axis in zip(ours.columns, apart.T, strict=False):
        parts = zip(("difference", "low", "high"), of_axis, strict=True)
        row |= {f"{axis} {name}": value for name, value in parts}
    row["bound"] = bound
    told = OUTCOMES.get(inference.row_outcome("above", row, 0.0), NOT_SEPARATED)
    if told == OUTSIDE and mean < bound:
        told = AS_GRPO
    return {**row, "verdict": told if len(seeds) >= FEWEST_SEEDS else "too few seeds"}


def nearest_point(point: np.ndarray, corners: np.ndarray) -> tuple[float, int, float, np.ndarray]:
    """The point of a line for which the larger of the differences `point` - it is smallest.

    `point` (2,) and the line's `corners` (n, 2), scaled. Gives that difference, the corner to the
    left, the share of the way to the next corner, and how much a difference on each axis counts in
    the excess: along a falling line nothing changes it, so each axis has the other one's slope. At
    a corner, and on a rising line, the larger difference alone counts.
    """
    shares = np.linspace(0, 1, FINENESS + 1)[:, None]
    found = []
    for left in range(len(corners) - 1):
        apart = point - (1 - shares) * corners[left] - shares * corners[left + 1]
        larger = apart.max(axis=1)
        at = int(larger.argmin())
        found.append((float(larger[at]), left, float(shares[at, 0]), apart[at]))
    excess, left, share, apart = min(found, key=lambda one: one[:3])
    step = corners[left + 1] - corners[left]
    if 0 < share < 1 and step[0] * step[1] < 0:
        return excess, left, share, np.abs(step[::-1]) / np.abs(step).sum()
    return excess, left, share, (apart == apart.max()).astype(float)
