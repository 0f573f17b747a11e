"""GRPO's trade-off curve over beta, and the methods outside it.

GRPO at a single beta is no baseline: another beta has another (pass@1, pass@256). The baseline is
the *curve*: the line through GRPO's points in the order of beta, which may bend back. It ends at
the base, the limit of large beta. Except in :func:`points`, pass@k is exact, of valid work.
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
#: Beyond the line by more than chance, but no further than GRPO's points from a line without them.
AS_GRPO = "no further out than GRPO's own points"
OUTCOMES = {inference.AGREES: OUTSIDE, inference.DISAGREES: INSIDE}
#: Points that are tried between two neighbours of the curve.
FINENESS = 50


def beta_of(profile: Profile, method: str) -> float:
    """Return the beta of a method's training; NaN for the base and for rejection sampling."""
    by_rl = method in profile.methods and profile.methods[method].rft is None
    return float(profile.rl_of(method)["beta"]) if by_rl else np.nan


def curve_methods(
    profile: Profile, present: Iterable[str] | None = None, kl_form: str = "k3"
) -> list[str]:
    """Return the methods that differ from the baseline, GRPO, in beta alone, by rising beta.

    They are selected from ``present`` (None: all methods) and have one form of the KL; at beta 0
    any form counts. Of several methods with the same beta it takes the first.
    """

    def without_beta(key: str) -> Method:
        rl = {name: value for name, value in profile.rl_of(key).items() if name != "beta"}
        method = profile.methods[key]
        return replace(method, label="", family="", seeds=None, rl=rl, kl_form="")

    selected = profile.methods if present is None else set(present)
    by_beta: dict[float, str] = {}
    for key in (key for key in profile.methods if key in selected):
        beta = beta_of(profile, key)
        same_form = profile.methods[key].kl_form == kl_form or beta == 0
        if same_form and without_beta(key) == without_beta(profile.baseline):
            by_beta.setdefault(beta, key)
    return [by_beta[beta] for beta in sorted(by_beta)]


def points(results: Results) -> pd.DataFrame:
    """Return pass@k of every evaluated method with 95 % bounds ("pass@k low", "pass@k high"), its
    beta, anchor and guide: a row each. Where pass@k is exact, rare is the mean probability of the
    rare way."""
    ks, rows = passk.axes(results.profile), []
    levels = passk.levels(passk.exact_or_sampled(results, ks))
    for name, group in levels.groupby("method", sort=False):
        method, by_metric = str(name), group.set_index("metric")
        of_profile, beta = results.profile.methods.get(method), beta_of(results.profile, method)
        row: dict[str, Any] = {"method": method, "beta": beta}
        row["anchor"] = of_profile.kl_form if of_profile is not None and beta > 0 else ""
        row["guide"] = of_profile.guide["name"] if of_profile and of_profile.guide else ""
        row |= {size: int(group[size].iloc[0]) for size in ("seeds", "problems")}
        for k in (f"pass@{k}" for k in ks):
            at = by_metric.loc[k]
            row |= {k: at["mean"], f"{k} low": at["low"], f"{k} high": at["high"]}
        if "rare mass" in by_metric.index:
            row["rare"] = by_metric.loc["rare mass", "mean"]
        rows.append(row)
    return pd.DataFrame(rows)


def positions(results: Results, methods: Iterable[str] | None = None) -> pd.DataFrame:
    """Return the position of methods relative to GRPO's curve in pass@1 and pass@256: a row each.

    Each of GRPO's points (on_front) is compared with the line without it, like any other method,
    and with a bound of 0. So these rows show how often GRPO itself is outside. The bound of the
    other methods is the largest excess of these rows (with three seeds or more), and at least 0.
    A further GRPO would exceed the largest of n with probability 1 / (n + 1).

    A point of the line is left out if it lacks a seed that others share with the method.

    Columns (SageError for a curve of fewer than two points; None for ``methods`` takes all):

    - excess: the additive epsilon indicator of its mean point against the line, both axes scaled by
      the line's range (Zitzler et al. 2003, IEEE Trans. Evol. Comput. 7, 117-132). Above 0 no point
      of the line is as good in both.
    - low, high: 95 % over seeds and problems, paired, with the nearest point as known; low_seeds,
      high_seeds: over seeds alone.
    - nearest: beta of the nearest point (inf: the base); to_base: its place on the last stretch,
      which has no beta, as a share.
    - verdict: "outside" needs both intervals above 0, three seeds, and an excess of at least the
      bound; "inside" needs both intervals below 0.
    """
    return positions_of(results.profile, passk.exact(results, AXES), methods)


def positions_of(
    profile: Profile,
    values: dict[str, Values],
    methods: Iterable[str] | None = None,
    kl_form: str = "k3",
) -> pd.DataFrame:
    """Return the table of :func:`positions` from the values of a profile's methods.

    The first two columns of the values are pass@1 and pass@256. SageError without those of the
    base. ``kl_form`` is that of the methods on the curve.
    """
    inference.require_base(values)
    curve = curve_methods(profile, values, kl_form)
    if len(curve) < 2:
        raise SageError(
            f"profile {profile.name} has {len(curve)} evaluated points of GRPO's trade-off curve "
            f"with the KL form {kl_form}: a curve needs two or more values of beta"
        )

    def against_line(method: str, bound: float = 0.0) -> dict[str, Any]:
        others = [key for key in curve if key != method]
        seeds = max((set(values[method].seeds) & set(values[key].seeds) for key in others), key=len)
        corners = [key for key in others if seeds <= set(values[key].seeds)]
        if not seeds:
            return {}
        betas = [beta_of(profile, key) for key in corners]
        line = [values[key] for key in (*corners, BASE)]
        row = {"method": method, "on_front": method in curve, "beta": beta_of(profile, method)}
        return row | position(values[method], line, betas, bound)

    # A line without the point at the smallest beta does not reach past it.
    rows = {method: against_line(method) for method in curve[1:]}
    enough = [row for row in rows.values() if row and row["seeds"] >= FEWEST_SEEDS]
    bound = max([0.0, *(row["excess"] for row in enough)])
    selected = []
    for method in values if methods is None else methods:
        if method not in (BASE, curve[0]):
            selected.append(rows[method] if method in rows else against_line(method, bound))
    return pd.DataFrame([row for row in selected if row])


def position(
    ours: Values, line: Sequence[Values], betas: Sequence[float], bound: float = 0.0
) -> dict[str, Any]:
    """Return one row of :func:`positions`.

    Args:
        ours: the values of a method. The first two columns count.
        line: the values of the points of the line, the last of them of the base.
        betas: of the other points.
        bound: the excess from which on a method is outside.
    """
    values, seeds = inference.at_common_seeds(ours, *line)
    values, sets = [array[..., :2] for array in values], ours.sets
    means = np.array([metrics.mean_over_sets(array.mean(axis=0), sets) for array in values])
    scale = np.ptp(means[1:], axis=0)
    _, corner, share, weights = nearest_point(means[0] / scale, means[1:] / scale)
    nearest = (1 - share) * values[1 + corner] + share * values[2 + corner]
    across = (((values[0] - nearest) / scale) @ weights)[..., None]
    mean, low, high = (x.item() for x in metrics.paired_difference(across, 0 * across, sets))
    by_seed = inference.over_seeds([metrics.mean_over_sets(x, sets).item() for x in across])
    row: dict[str, Any] = {"nearest": np.inf if share == 1 else betas[corner], "to_base": share}
    if corner < len(betas) - 1:  # not the stretch that ends at the base
        beta = (1 - share) * betas[corner] + share * betas[corner + 1]
        row = {"nearest": beta, "to_base": 0.0}
    row |= {"seeds": len(seeds), "excess": mean, "low": low, "high": high}
    row["low_seeds"], row["high_seeds"] = by_seed
    gaps = np.stack(metrics.paired_difference(values[0], nearest, sets))
    for axis, gap in zip(ours.columns, gaps.T, strict=False):
        numbers = zip(("difference", "low", "high"), gap, strict=True)
        row |= {f"{axis} {name}": number for name, number in numbers}
    row["bound"] = bound
    outcome = OUTCOMES.get(inference.row_outcome("above", row, 0.0), NOT_SEPARATED)
    if outcome == OUTSIDE and mean < bound:
        outcome = AS_GRPO
    return {**row, "verdict": outcome if len(seeds) >= FEWEST_SEEDS else "too few seeds"}


def nearest_point(point: np.ndarray, corners: np.ndarray) -> tuple[float, int, float, np.ndarray]:
    """Find the point x of a line at which the larger difference `point` - x is smallest.

    On a falling stretch of the line the weight of an axis is the slope of the other axis, so that
    the excess is constant along the stretch. At a corner, and on a rising stretch, the axis of the
    larger difference has all the weight.

    Args:
        point: scaled, shape (2,).
        corners: of the line, scaled, shape (n, 2).

    Returns:
        The larger difference, the corner to the left, the share of the way to the next corner, and
        the weights of the two axes in the excess.
    """
    shares = np.linspace(0, 1, FINENESS + 1)[:, None]
    nearest = []
    for corner in range(len(corners) - 1):
        gaps = point - (1 - shares) * corners[corner] - shares * corners[corner + 1]
        larger = gaps.max(axis=1)
        at = int(larger.argmin())
        nearest.append((float(larger[at]), corner, float(shares[at, 0]), gaps[at]))
    excess, corner, share, gap = min(nearest, key=lambda candidate: candidate[:3])
    step = corners[corner + 1] - corners[corner]
    if 0 < share < 1 and step[0] * step[1] < 0:
        return excess, corner, share, np.abs(step[::-1]) / np.abs(step).sum()
    return excess, corner, share, (gap == gap.max()).astype(float)
