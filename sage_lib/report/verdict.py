"""Claim by claim and prediction by prediction: what was said, what was measured, whether it agrees.

A claim is a list of comparisons, each with what the claim expects of it. Outcomes are computed from
the measured files alone: no sentence here states a result. What counts as a difference that
matters (:data:`MARGINS`) was fixed before the final evaluation of any trained policy; the first
trainings, which follow exact pass@k themselves, were then ending. Nothing is corrected for the
number of comparisons: of many, some come out wrong by chance.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sage_lib.errors import SageError
from sage_lib.evaluation.metrics import mean_over_sets
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.report import (
    exact_tables,
    front_tables,
    measured,
    reported,
    result_tables,
    sample_tables,
)
from sage_lib.report.claims import (
    CLAIMS,
    TAIL,
    THIRDS,
    Claim,
    Comparison,
)
from sage_lib.report.front_tables import (
    AXES,
    FEWEST_SEEDS,
    front_methods,
    points,
)
from sage_lib.report.result_tables import interval_text
from sage_lib.report.style import count

#: The smallest difference that matters, by metric, in its own unit. The base's rare mass is 0.009.
MARGINS = {"pass@1": 0.005, "pass@256": 0.005, "rare mass": 0.0005, "gradient norm": 0.002}
#: The smallest difference of :data:`claims.TAIL` that matters: a twentieth of the base's share.
TAIL_MARGIN = 0.0025
#: Metrics of a step log: its column, between which shares of the steps it counts, and the smallest
#: difference that matters where :data:`MARGINS` has none: a twentieth of the base's mean token
#: entropy on RL's prompts (0.041 nats), a hundredth of its mean length (31 tokens).
LOGGED = {
    **{
        f"gradient norm, {name} third": ("grad_norm", i / 3, (i + 1) / 3, MARGINS["gradient norm"])
        for i, name in enumerate(THIRDS)
    },
    "entropy": ("entropy", 0.8, 1.0, 0.002),
    "length": ("completions/mean_length", 0.8, 1.0, 0.3),
    "reward": ("reward", 0.8, 1.0, 0.005),
}
AGREES, DISAGREES, OPEN, MISSING = "agrees", "disagrees", "cannot tell", "not run"
#: Of a claim: one of its comparisons disagrees, and another one agrees.
IN_PART = "disagrees in part"
#: The paper's first claim.
MAIN = "both rise"
OUTCOMES = (AGREES, DISAGREES, IN_PART, OPEN, MISSING)
COMPARISONS = [
    *("claim", "outcome", "difference", "low", "high", "metric"),  # what is read first
    *("method", "against", "beta", "expects"),
    *("low over seeds", "high over seeds", "detectable", "seeds", "reported"),
]
CLAIMS_TABLE = ["claim", "outcome", "statement", "source", "comparisons", "settles"]


def outcome(expects: str, low: float, high: float, margin: float) -> str:
    """What an interval says of an expectation; ``margin`` is the smallest difference that matters.

    "above" disagrees where no gain of the margin is left in the interval (a gain too small to
    matter confirms nothing), and agrees where the whole interval is above 0. "equal" agrees where
    the interval lies within the margin on both sides, and disagrees where it lies beyond it. "not
    above" agrees below the margin, and disagrees above 0.
    """
    if np.isnan(low):
        return OPEN
    if expects in ("below", "not below"):
        expects = expects.replace("below", "above")
        low, high = -high, -low
    if expects == "above":
        return DISAGREES if high < margin else AGREES if low > 0 else OPEN
    if expects == "not above":
        return AGREES if high < margin else DISAGREES if low > 0 else OPEN
    if expects == "equal":
        within, beyond = -margin < low and high < margin, low > margin or high < -margin
        return AGREES if within else DISAGREES if beyond else OPEN
    raise SageError(f"a comparison expects above, below or equal, not {expects!r}")


def comparisons(
    profile: Profile, claims: Sequence[Claim] = CLAIMS, also: Sequence[Profile] = ()
) -> pd.DataFrame:
    """Every comparison of every claim: columns :data:`COMPARISONS`.

    Differences are paired by seed and problem with 95 % intervals over both; of what step logs hold
    (:data:`LOGGED`), by seed alone. With few seeds the former can be narrower than the t interval
    over the seeds' means (``low over seeds``, ``high over seeds``): where the two say different
    things, nothing can be told. ``reported`` is
    the same difference in the paper's own table, where it has one. ``also``: profiles that differ
    in the base alone, whose seeds are counted with the others: both methods of a difference start
    from one base.
    """
    rows = []
    for claim in claims:
        for one in claim.comparisons:
            found = _measured([profile, *also], one)
            row: dict[str, Any] = {
                "claim": claim.name,
                "method": one.method,
                "against": one.against,
                "beta": _beta(profile, one),
            }
            row |= {"metric": one.metric + (", ood" if one.ood else ""), "expects": one.expects}
            row["reported"] = _reported(profile, claim.table, one)
            if found is None:
                rows.append({**row, "seeds": 0, "outcome": MISSING})
                continue
            margin = margin_of(one.metric)
            both = found["low"], found["high"]
            judged = outcome(one.expects, *both, margin)
            low, high = found.pop("over seeds", both)
            row |= {"low over seeds": low, "high over seeds": high}
            of_seeds = outcome(one.expects, low, high, margin)
            enough = found["seeds"] >= FEWEST_SEEDS and of_seeds == judged
            tells = enough and not _at_a_floor(found, margin)
            rows.append({**row, **found, "outcome": judged if tells else OPEN})
    return pd.DataFrame(rows, columns=COMPARISONS)


def claims(
    profile: Profile, chosen: Sequence[Claim] = CLAIMS, also: Sequence[Profile] = ()
) -> pd.DataFrame:
    """Each claim with its outcome: columns :data:`CLAIMS_TABLE`.

    It agrees where all its comparisons agree, disagrees where one disagrees (in part, where another
    one agrees), and is "not run" where one is missing; without comparisons it cannot be told here.
    ``also`` as in :func:`comparisons`.
    """
    table = comparisons(profile, chosen, also)
    rows = []
    for claim in chosen:
        of_claim = list(table.loc[table["claim"] == claim.name, "outcome"])
        if DISAGREES in of_claim:
            found = IN_PART if AGREES in of_claim else DISAGREES
        elif MISSING in of_claim:
            found = MISSING
        else:
            found = AGREES if of_claim and set(of_claim) == {AGREES} else OPEN
        how = f"{of_claim.count(AGREES)} of {len(of_claim)} agree" if of_claim else "none here"
        settles = {OPEN: claim.settles, MISSING: "runs of its arms"}.get(found, "")
        rows.append((claim.name, found, claim.statement, claim.source, how, settles))
    return pd.DataFrame(rows, columns=CLAIMS_TABLE)


def _at_a_floor(found: dict[str, Any], margin: float) -> bool:
    """Both arms so near 0 or 1 that no difference that matters could be seen."""
    arms = found.pop("means", (0.5, 0.5))
    return max(arms) < margin or min(arms) > 1 - margin


def summary(profile: Profile) -> list[str]:
    """What came of the paper's first claim, and whether these runs could have told: two sentences,
    from the measured files."""
    compared = comparisons(profile)
    rows = compared[compared["claim"] == MAIN]
    if MISSING in set(rows["outcome"]):
        return ["SAGE and GRPO have not both been run yet."]
    first, second = (
        f"{interval_text(row.difference, row.low, row.high)} in {row.metric}"
        for row in rows.itertuples()
    )
    [judged] = claims(profile, [_named(MAIN)])["outcome"]
    words = {"agrees": "agree with the claim", "disagrees": "found no gain"}
    found = words.get(
        judged, "support the claim in part" if " in part" in judged else "cannot tell"
    )
    seeds = count(int(rows["seeds"].min()), "seed")
    level = points(profile).set_index("method")["pass@1"]
    best = level[level.index.intersection(front_methods(profile))].max()
    weak, known = _too_weak(compared)
    return [
        f"Our runs {found}, and had little room: at beta {rows['beta'].iloc[0]:g}, "
        f"SAGE minus GRPO is {first} and {second.replace(', 95 % [', ' [')} ({seeds}).",
        f"They cannot rule a gain out: GRPO itself moves pass@1 only from {level[BASE]:.3f} to "
        f"{best:.3f}, and {weak} of {known} comparisons could not have seen a difference that "
        "matters.",
    ]


def beyond(profile: Profile, table: pd.DataFrame) -> list[str]:
    """Who lies outside GRPO's front over beta, of how many of whom how many intervals would lie
    above 0 by chance, and how far out GRPO's own points lie, in sentences.

    ``table``: :func:`front_tables.outside`. Counted are methods of :data:`FEWEST_SEEDS` seeds or
    more; apart from the others, those that have another reference, or demonstrations, than the
    front.
    """
    table = table[table["on_front"] | (table["seeds"] >= FEWEST_SEEDS)]
    own, others = table[table["on_front"]], table[~table["on_front"]]
    of_others = others["method"].map(profile.methods)
    alike = of_others.map(lambda one: one.reference is None and one.family != "more_sft")
    alike, apart = others[alike.astype(bool)], others[~alike.astype(bool)]
    if alike.empty:
        return [f"no method beside the front has {count(FEWEST_SEEDS, 'seed')}"]
    named = [
        f"{profile.label(row.method)} by {interval_text(row.excess, row.low, row.high)}"
        for row in alike[alike["verdict"] == "outside"].itertuples()
    ]
    which = " and ".join(named).replace(", 95 % [", " [") or "none"
    chance = f"{count(len(alike), 'method')} ({0.025 * len(alike):.1f} by chance)"
    lines = [f"Outside the front, in shares of its range, of all {chance}: {which}"]
    if len(own):
        lines.append(f"GRPO's own points by up to {own['excess'].max():+.3f}")
    out = apart.loc[apart["verdict"] == "outside", "excess"]
    if len(out):
        ends = f"{out.min():+.2f} to {out.max():+.2f}" if len(out) > 1 else f"{out.item():+.2f}"
        lines.append(f"of {len(apart)} with another reference or data {len(out)}, by {ends}")
    return lines


def limits(profile: Profile, compared: pd.DataFrame) -> list[str]:
    """What these runs could not have shown, in sentences: how far GRPO itself moves, and in how
    many of :func:`comparisons` a difference has to be larger than the least that matters."""
    level = points(profile).set_index("method")
    names = [f"pass@{k}" for k in AXES]
    moved = level.loc[profile.reference, names] - level.loc[BASE, names]
    parts = " and ".join(f"{name} {moved[name]:+.3f}" for name in names)
    weak, known = _too_weak(compared)
    return [
        f"{profile.label(profile.reference)} at beta "
        f"{level.loc[profile.reference, 'beta']:g} minus the base: {parts}",
        f"of {count(known, 'comparison')} {weak} would find only more than the least that "
        "matters: much of what cannot be told is too few seeds",
    ]


def _too_weak(compared: pd.DataFrame) -> tuple[int, int]:
    """In how many comparisons a difference has to be larger than the least that matters; of how
    many whose detectable difference is known."""
    known = compared.dropna(subset="detectable")
    sizes = [margin_of(metric.removesuffix(", ood")) for metric in known["metric"]]
    return int((known["detectable"] > np.array(sizes)).sum()), len(known)


def _named(name: str) -> Claim:
    return next(claim for claim in CLAIMS if claim.name == name)


def beside_base(profile: Profile, rows: pd.DataFrame, *words: str) -> list[str]:
    """Of differences to the base, how many lie on which side of 0, and the methods among them that
    have seeds enough to tell; a line for each side.

    ``rows`` have the columns method, low, high and seeds; ``words`` are those of
    :func:`result_tables.verdict`.
    """
    sides = [result_tables.verdict(row.low, row.high, *words) for row in rows.itertuples()]
    lines = []
    for side, group in rows.groupby(sides, sort=False):
        names = measured.named(profile, group.loc[group["seeds"] >= FEWEST_SEEDS, "method"])
        of_these = f"of {count(FEWEST_SEEDS, 'seed')} or more: {names}"
        lines.append(f"    {side} the base: {len(group)}; {of_these}")
    return lines


def _measured(profiles: Sequence[Profile], one: Comparison) -> dict[str, Any] | None:
    """difference, low, high, detectable, seeds; None where no profile has runs of both arms."""
    there = [profile for profile in profiles if _has(profile, one)]
    if not there:
        return None
    if one.metric in LOGGED:
        return _logged(there, one)
    if one.metric == TAIL:
        return _tail(_alone(there[0], one), one)
    arms, sets = _arms(there, one)
    column = front_tables.PAIRED.index(one.metric)
    row = list(front_tables.pair_rows(*arms, sets))[column]
    found: dict[str, Any] = {
        key: row[key] for key in ("difference", "low", "high", "detectable", "seeds")
    }
    found["over seeds"] = over_seeds(*arms, sets, one.metric)
    if one.metric.startswith("pass@"):
        found["means"] = tuple(float(values[..., column].mean()) for values in arms)
    return found


def _has(profile: Profile, one: Comparison) -> bool:
    there = exact_tables.evaluated(profile)
    return {one.method, one.against} <= there and _share_a_seed(profile, one)


def _arms(
    profiles: Sequence[Profile], one: Comparison
) -> tuple[tuple[np.ndarray, np.ndarray], list[str]]:
    """Both arms in :data:`front_tables.PAIRED`, (seeds, problems, 3) each, and the problems' data
    sets; seeds of several profiles one after another, the base once for each seed."""
    ours: list[np.ndarray] = []
    theirs: list[np.ndarray] = []
    for profile in profiles:
        # what is published is read once for all comparisons
        of_both = profile if profile.published else _alone(profile, one)
        exact = exact_tables.by_method(of_both, AXES, one.ood)
        pair = front_tables.pair(exact[one.method], exact[one.against])
        seeds = max(map(len, pair))
        for arm, values in zip((ours, theirs), pair, strict=True):
            arm.append(np.broadcast_to(values, (seeds, *values.shape[1:])))
    return (np.concatenate(ours), np.concatenate(theirs)), exact[one.method].sets


def over_seeds(
    ours: np.ndarray, theirs: np.ndarray, sets: Sequence[str], metric: str
) -> tuple[float, float]:
    """The 95 % t interval of a difference over the means of common seeds alone, NaN for one seed:
    :func:`front_tables.over_seeds`. The arms as :func:`front_tables.pair` gives them."""
    column = front_tables.PAIRED.index(metric)
    return front_tables.over_seeds(
        [float(mean_over_sets(one, sets)[column]) for one in ours - theirs]
    )


def _alone(profile: Profile, one: Comparison) -> Profile:
    """The profile with the two methods of a comparison, so that no other's files are read."""
    both = (one.method, one.against)
    methods = {key: method for key, method in profile.methods.items() if key in both}
    evaluation = dataclasses.replace(profile.evaluation, methods=None)
    return dataclasses.replace(profile, methods=methods, evaluation=evaluation)


def _share_a_seed(profile: Profile, one: Comparison) -> bool:
    """Of a grid that is published in part, two methods may have no seed in common yet."""
    if BASE in (one.method, one.against):
        return True
    return bool({*profile.seeds_of(one.method)} & {*profile.seeds_of(one.against)})


def _logged(profiles: Sequence[Profile], one: Comparison) -> dict[str, Any] | None:
    """The mean of a logged column over the steps that count: a t interval over paired seeds."""
    found: list[float] = []
    for profile in profiles:
        means = logged(_alone(profile, one), one.metric)
        arms = [means[key] for key in (one.method, one.against) if key in means]
        if len(arms) == 2:
            found += [*(arms[0] - arms[1]).dropna()]
    if not found:
        return None
    low, high = front_tables.over_seeds(found)
    return {"difference": float(np.mean(found)), "low": low, "high": high, "seeds": len(found)}


def _tail(profile: Profile, one: Comparison) -> dict[str, Any] | None:
    """The difference of two methods' tails, over seeds and problems; None where nothing was scored
    under the base."""
    if not sample_tables.is_scored(profile):
        return None
    row = sample_tables.tails(profile, against=one.against).set_index("method").loc[one.method]
    return {key: row[key] for key in ("difference", "low", "high", "seeds")}


def logged(profile: Profile, metric: str) -> pd.Series:
    """A metric of :data:`LOGGED` of every RL run, by method and seed: the mean over a part of its
    steps (of gradient norms before clipping)."""
    column, start, end, _ = LOGGED[metric]
    keys = ["method", "seed"]
    frame = measured.training(profile).reindex(columns=[*keys, "step", column])
    share = frame["step"] / frame.groupby(keys)["step"].transform("max")
    found: pd.Series = frame[(share > start) & (share <= end)].groupby(keys)[column].mean()
    return found.dropna()


def margin_of(metric: str) -> float:
    """The smallest difference of a metric that matters, in its own unit."""
    of_logs = {name: margin for name, (*_, margin) in LOGGED.items()}
    return {**MARGINS, **of_logs, TAIL: TAIL_MARGIN}[metric]


def _beta(profile: Profile, one: Comparison) -> float:
    """The beta at which a comparison is made, that of the arm compared with; NaN for the base's."""
    whole = measured.declared(profile)
    known = one.against in whole.methods
    return front_tables.beta_of(whole, one.against) if known else float("nan")


def _reported(profile: Profile, table: str | None, one: Comparison) -> float:
    """The paper's own difference of the same labels, of its average or its only data set; NaN."""
    if table is None:
        return float("nan")
    frame = reported.load(table)
    average = frame[(frame["dataset"] == "Avg") & (frame["metric"] == one.metric)]
    if average.empty:
        average = frame[frame["metric"] == one.metric]
    means = pd.Series(
        pd.to_numeric(average["mean"]).to_numpy(), index=average["row"].to_numpy(), dtype=float
    )
    known = [key for key in (one.method, one.against) if _known(profile, key)]
    labels = [profile.label(key).split(",")[0] for key in known]  # whatever its beta
    if len(labels) < 2 or not set(labels) <= set(means.index):
        return float("nan")
    return float(means[labels[0]] - means[labels[1]])


def _known(profile: Profile, key: str) -> bool:
    return key == BASE or key in profile.methods
