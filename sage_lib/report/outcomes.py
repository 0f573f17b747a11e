"""Claim by claim: what was said (claims.yaml), what was measured, and whether it agrees.

Outcomes follow from the intervals by the one rule of :mod:`inference`. Those of primary claims are
corrected together for their number (Holm); the others are not, so of many some come out wrong. A
paper's claim that disagrees is "not seen here".
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel
from ruamel.yaml import YAML

from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import BASE
from sage_lib.experiment.results import Results
from sage_lib.report import inference, passk, reported, tradeoff
from sage_lib.report.inference import (
    AGREES,
    CANNOT_TELL,
    DISAGREES,
    NOT_RUN,
    NOT_SEEN,
    NOT_TESTABLE,
    Values,
)

TAIL, UNSOUND = "perplexity tail", "unsound"
DIVERSITY, BRANCHING = "diversity", "branching"
#: Metrics of step logs: the column, and between which shares of a run's steps it is averaged.
#: Gradient norms are those before clipping.
LOGGED = {
    "gradient norm, first third": ("grad_norm", 0, 1 / 3),
    "gradient norm, middle third": ("grad_norm", 1 / 3, 2 / 3),
    "gradient norm, last third": ("grad_norm", 2 / 3, 1),
    "entropy": ("entropy", 0.8, 1),
    "length": ("completions/mean_length", 0.8, 1),
    "reward": ("reward", 0.8, 1),
}
COMPARISONS = [
    *("claim", "by", "outcome", "difference", "low", "high", "margin", "metric", "method"),
    *("against", "beta", "expects", "low_seeds", "high_seeds", "judged_low", "judged_high"),
    *("detectable", "seeds", "kept", "error_rate", "reported"),
]


class Comparison(NamedTuple):
    """`method` minus `against`, and what is expected of the difference."""

    method: str
    against: str
    metric: str
    expects: Literal["above", "below", "equal", "not above", "not below"]
    ood: Literal["", "ood"] = ""  # on the data outside Table 1


class Claim(BaseModel, extra="forbid"):
    """What a source says, and the comparisons that would all have to come out so."""

    claim: str
    by: Literal["paper", "ours"]
    source: str
    statement: str
    settles: str  # what would settle it, where it cannot be told here
    testable: bool = True  # whether these tasks and models can judge it
    comparisons: list[Comparison]
    table: str | None = None  # the reported table that has the same comparison, by labels
    question: str = ""  # the notebook that shows it, where several share a file
    primary: bool = False  # its comparisons are corrected together, by Holm's rule


class Claims(BaseModel, extra="forbid"):
    """Claims, and the smallest difference that matters: of each metric the share `margin` of the
    range over which GRPO moves it, over its values of beta above 0, but at least its `floor`."""

    margin: float
    floor: dict[str, float] = {}
    claims: list[Claim]


def load_claims(name: str = "claims", question: str = "") -> Claims:
    """The claims of a file beside this one, or those of them that belong to a question."""
    every = Claims(**YAML(typ="safe").load(Path(__file__).with_name(f"{name}.yaml")))
    return every.model_copy(
        update={"claims": [one for one in every.claims if question in ("", one.question)]}
    )


def comparisons(chosen: Claims, results: Results) -> pd.DataFrame:
    """Every comparison of every claim, measured and judged: columns COMPARISONS.

    judged_low, judged_high: the interval by which a comparison is judged, at 95 % or, where it is
    primary, at Holm's level. kept: with how many of the seeds left out, one at a time, the outcome
    at 95 % stays. error_rate: of a primary comparison, the p-value of that outcome. reported: the
    same difference in the paper's own table.
    """
    sources: dict[tuple[str, str], dict[str, Values]] = {}
    rows: list[dict[str, Any]] = []
    primary: dict[int, tuple[Values, Values]] = {}
    for claim in chosen.claims:
        for one in claim.comparisons:
            where = (one.metric, one.ood)
            if where not in sources:
                sources[where] = values(results, *where)
            row = {"claim": claim.claim, "by": claim.by, **one._asdict(), "outcome": NOT_RUN}
            row |= {"seeds": 0, "beta": tradeoff.beta_of(results.profile, one.against)}
            row["reported"] = _reported(results, claim.table, one)
            share = chosen.margin and chosen.margin * _range(results, sources[where], one.metric)
            row["margin"] = margin = max(share, chosen.floor.get(", ".join(filter(None, where)), 0))
            pair = _pair(sources[where], one)
            if pair is not None:
                row |= _measured(*pair, one, margin)
                if claim.primary:
                    primary[len(rows)] = pair
                    row["error_rate"] = _rate(*pair, one, margin)
            row["metric"] = ", ".join(filter(None, where))
            rows.append(row)
    allowed = inference.holm([rows[place]["error_rate"] for place in primary])
    for (place, pair), rate in zip(primary.items(), allowed, strict=True):
        rows[place] |= _judged(*pair, rows[place], 1 - rate)
    return _worded(pd.DataFrame(rows, columns=COMPARISONS))


def _worded(table: pd.DataFrame) -> pd.DataFrame:
    """A table with the columns by and outcome, in which no claim of a paper disagrees: it is
    NOT_SEEN."""
    of_paper = (table["by"] == "paper") & (table["outcome"] == DISAGREES)
    return table.assign(outcome=table["outcome"].mask(of_paper, NOT_SEEN))


def by_base(compared: pd.DataFrame, results: Results) -> pd.DataFrame:
    """The primary comparisons among `compared` on the seeds of each base alone, a row each.

    Columns claim, by, metric, method, against, base (the profile that trained it), difference, low,
    high (95 % over seeds and problems), seeds, outcome (at 95 %, by the margin of all bases).
    """
    trained = results.runs[results.runs["method"] != BASE].dropna(subset="seed")
    profiles = trained["run"].str.rpartition("/")[0].replace("", results.name)
    rows = []
    for one in compared.dropna(subset="error_rate").to_dict("records"):
        found = values(results, one["metric"])
        for base, seeds in trained.groupby(profiles, sort=False)["seed"]:
            ours, theirs = (found[one[side]].at_seeds(seeds) for side in ("method", "against"))
            row = _row(ours, theirs, one["metric"])
            told = inference.row_outcome(one["expects"], row, one["margin"])
            named = {name: one[name] for name in ("claim", "by", "metric", "method", "against")}
            numbers = row[["difference", "low", "high", "seeds"]].to_dict()
            rows.append({**named, "base": base, **numbers, "outcome": told})
    return _worded(pd.DataFrame(rows)) if rows else pd.DataFrame()


def differences(results: Results, metric: str, pairs: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Of each pair (method, against) whose methods share a seed: method, against, difference, its
    95 % interval low and high, seeds."""
    found, rows = values(results, metric), []
    for method, against in pairs:
        pair = _pair(found, Comparison(method, against, metric, "above"))
        if pair is not None:
            rows.append(_row(*pair, metric)[["difference", "low", "high", "seeds"]].to_dict())
            rows[-1] |= {"method": method, "against": against}
    return pd.DataFrame(rows, columns=["method", "against", "difference", "low", "high", "seeds"])


def claim_outcomes(chosen: Claims, compared: pd.DataFrame) -> pd.DataFrame:
    """Each claim with its outcome, from :func:`comparisons`: that of its worst comparison, which is
    not corrected for their number (`inference.worst_outcome`). Without comparisons it cannot be
    told. A claim that is not testable is NOT_TESTABLE."""
    rows = []
    for claim in chosen.claims:
        found = list(compared.loc[compared["claim"] == claim.claim, "outcome"])
        outcome = inference.worst_outcome(found) if claim.testable else NOT_TESTABLE
        how = f"{found.count(AGREES)} of {len(found)} agree" if found else "none here"
        settles = {NOT_RUN: "runs of its methods"}
        settles |= dict.fromkeys((CANNOT_TELL, NOT_TESTABLE), claim.settles)
        named = (claim.claim, claim.by, outcome, claim.statement, claim.source)
        rows.append((*named, how, settles.get(outcome, "")))
    columns = ["claim", "by", "outcome", "statement", "source", "comparisons", "settles"]
    return pd.DataFrame(rows, columns=columns)


def values(results: Results, metric: str, ood: str = "") -> dict[str, Values]:
    """A comparison's metric by method: by seed and problem, or of logs by seed alone."""
    own = {TAIL: tail, UNSOUND: unsound, DIVERSITY: diversity, BRANCHING: branching}
    if metric in own:
        return own[metric](results)
    if metric in LOGGED:
        found = logged(metric, results)
        return {
            str(method): Values(
                str(method),
                of.to_numpy()[:, None, None],
                [metric],
                [""],
                list(of[method].index),
            )
            for method, of in found.groupby(level="method", sort=False)
        }
    right, k = metric.startswith(passk.RIGHT), int(metric.rpartition("@")[2])
    if not results.profile.exact:
        return passk.sampled(results, [k], ood=bool(ood))
    ks = sorted({*passk.AXES, k})
    if right:
        return passk.right(results, ks, ood=bool(ood))
    return passk.exact(results, ks, ood=bool(ood))


def _pair(values: dict[str, Values], one: Comparison) -> tuple[Values, Values] | None:
    """Both sides; None where a method was not evaluated, or no seed is common."""
    if not {one.method, one.against} <= values.keys():
        return None
    pair = values[one.method], values[one.against]
    trained = [set(each.seeds) for each in pair if each.method != BASE]
    return pair if set.intersection(*trained) else None


def _row(ours: Values, theirs: Values, metric: str, level: float = 0.95) -> pd.Series:
    found = inference.difference(ours, theirs, level).set_index("metric").loc[metric]
    if metric in LOGGED:  # one number a seed: its interval is over seeds, its level no probability
        bounds = {"low": found["low_seeds"], "high": found["high_seeds"]}
        found = pd.Series({**found.drop(["ours", "theirs"]), **bounds})
    return found


def _measured(ours: Values, theirs: Values, one: Comparison, margin: float) -> dict[str, Any]:
    found = _row(ours, theirs, one.metric)
    row: dict[str, Any] = dict(found.drop(["method", "against"]))
    row |= _judged(ours, theirs, {**one._asdict(), "margin": margin})
    if found["seeds"] > inference.FEWEST_SEEDS:
        row["kept"] = inference.stable_seeds(ours, theirs, one.metric, one.expects, margin)
    return row


def _judged(
    ours: Values, theirs: Values, row: dict[str, Any], level: float = 0.95
) -> dict[str, Any]:
    """The outcome of a row of comparisons at a level, and the interval that it follows from."""
    found = _row(ours, theirs, row["metric"], level)
    low, high = inference.deciding_interval(found)
    told = inference.row_outcome(row["expects"], found, row["margin"])
    return {"outcome": told, "judged_low": low, "judged_high": high}


def _rate(ours: Values, theirs: Values, one: Comparison, margin: float) -> float:
    def at(level: float) -> pd.Series:
        return _row(ours, theirs, one.metric, level)

    return inference.error_rate(one.expects, at, margin)


def _range(results: Results, values: dict[str, Values], metric: str) -> float:
    """How far apart GRPO's means are, over its values of beta above 0; NaN for fewer than two."""
    line = tradeoff.curve_methods(results.profile, values.keys() & results.profile.methods.keys())
    means = [
        metrics.mean_over_sets(one.values.mean(axis=0), one.sets)[list(one.columns).index(metric)]
        for one in (values[m] for m in line if tradeoff.beta_of(results.profile, m) > 0)
    ]
    return float(np.ptp(means)) if len(means) > 1 else np.nan


def logged(metric: str, results: Results) -> pd.Series:
    """A metric of LOGGED by method and seed: the mean over its part of the run's steps."""
    column, start, end = LOGGED[metric]
    keys = ["method", "seed"]
    steps = results.steps.query("method != @BASE").reindex(columns=[*keys, "step", column])
    share = steps["step"] / steps.groupby(keys)["step"].transform("max")
    part = steps[(share > start) & (share <= end)]
    found: pd.Series = part.groupby(keys, sort=False)[column].mean()
    return found.dropna()


def unsound(results: Results) -> dict[str, Values]:
    """The share of each problem's samples with a right answer whose work is not valid."""
    counts = passk.of_sets(results.counts, results.profile, ood=False)
    valid = counts["valid_common"] + counts["valid_rare"]
    return Values.by_method(
        counts.assign(**{UNSOUND: (counts["c"] - valid) / counts["n"]}), [UNSOUND]
    )


def tail(results: Results) -> dict[str, Values]:
    """The share of each problem's samples beyond the base's upper twentieth of perplexity."""
    scores = passk.of_sets(results.scores, results.profile, ood=False)
    bound = scores.loc[scores["method"] == BASE, "perplexity"].quantile(0.95)
    return Values.by_method(scores.assign(**{TAIL: scores["perplexity"] > bound}), [TAIL])


def diversity(results: Results) -> dict[str, Values]:
    """The effective number of valid completions of each problem: exp of the entropy of their
    probabilities, normalised (exact)."""
    support = passk.of_sets(results.support, results.profile, ood=False)
    keys = ["run", "method", "seed", *passk.PROBLEM]
    p = np.exp(support["logp"])
    shares = p / p.groupby([support[key] for key in keys], dropna=False).transform("sum")
    nats = support.assign(**{DIVERSITY: -shares * np.log(shares.where(shares > 0, 1.0))})
    summed = nats.groupby(keys, sort=False, dropna=False)[DIVERSITY].sum()
    return Values.by_method(np.exp(summed).reset_index(), [DIVERSITY])


def branching(results: Results) -> dict[str, Values]:
    """The mean branching factor of each problem's samples."""
    scores = passk.of_sets(results.scores, results.profile, ood=False)
    return Values.by_method(scores.dropna(subset=[BRANCHING]), [BRANCHING])


def readable(compared: pd.DataFrame, results: Results) -> pd.DataFrame:
    """What readers see: claim, comparison, expected, difference with the interval by which it is
    judged, seeds, outcome."""
    table = compared[["claim", "seeds", "outcome"]].copy()
    numbers = zip(
        *(compared[name] for name in ("difference", "judged_low", "judged_high")), strict=True
    )
    pairs = zip(compared["method"], compared["against"], strict=True)
    of = [" - ".join(results.label(method) for method in pair) for pair in pairs]
    bounds = [
        "" if np.isnan(d) else f"{d:+.4f} [{low:+.4f}, {high:+.4f}]" for d, low, high in numbers
    ]
    table.insert(1, "comparison", of)
    table.insert(2, "expected", compared["metric"] + " " + compared["expects"])
    table.insert(3, "difference", bounds)
    return table


def _reported(results: Results, table: str | None, one: Comparison) -> float:
    """The paper's own difference: of its average, or of its only data set; NaN without one."""
    if table is None or {one.method, one.against} - {BASE, *results.profile.methods}:
        return np.nan
    printed = reported.read_table(table)
    printed = printed[printed["metric"] == one.metric.removeprefix(passk.RIGHT)]
    average = printed[printed["dataset"] == "Avg"]
    means = (average if len(average) else printed).drop_duplicates("row").set_index("row")["mean"]
    labels = [results.label(key).split(",")[0] for key in (one.method, one.against)]
    ours, theirs = (float(means.get(label, "nan")) for label in labels)
    return ours - theirs
