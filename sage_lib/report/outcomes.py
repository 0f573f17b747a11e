"""Outcomes of claims (claims.yaml) by the rule of :mod:`inference`.

Outcomes of primary claims are corrected together for their number (Holm). The others are not, so
some of them are wrong by chance. A paper's claim that disagrees is "not seen here".
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
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
#: Metrics of step logs: the column, and the first and last share of a run's steps in its mean.
#: Gradient norms are before clipping.
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
    """`method` minus `against`, and the expected sign of the difference."""

    method: str
    against: str
    metric: str
    expects: Literal["above", "below", "equal", "not above", "not below"]
    ood: Literal["", "ood"] = ""  # on the data outside Table 1


class Claim(BaseModel, extra="forbid"):
    """A statement of a source, and the comparisons that must all agree with it."""

    claim: str
    by: Literal["paper", "ours"]
    source: str
    statement: str
    settles: str  # the evidence that would decide it, where ours does not
    testable: bool = True  # whether these tasks and models can test it
    comparisons: list[Comparison]
    table: str | None = None  # the reported table with the same comparison, by labels
    question: str = ""  # names the notebook that shows it, where several share a file
    primary: bool = False  # its comparisons are corrected together, by Holm's rule


class Claims(BaseModel, extra="forbid"):
    """Claims, and the smallest difference that matters.

    For each metric it is the share `margin` of the metric's range over GRPO's values of beta above
    0, but at least the metric's `floor`.
    """

    margin: float
    floor: dict[str, float] = {}
    claims: list[Claim]


def load_claims(name: str = "claims", question: str = "") -> Claims:
    """Read the claims of a file in this folder, or only the claims of a question."""
    claims = Claims(**YAML(typ="safe").load(Path(__file__).with_name(f"{name}.yaml")))
    selected = [claim for claim in claims.claims if question in ("", claim.question)]
    return claims.model_copy(update={"claims": selected})


def comparisons(claims: Claims, results: Results) -> pd.DataFrame:
    """Return all comparisons of all claims with their outcomes: a row each, columns COMPARISONS.

    - judged_low, judged_high: the interval that decides, at 95 % or, for a primary comparison, at
      Holm's level.
    - kept: the number of seeds without which the outcome at 95 % stays, leaving out one at a time.
    - error_rate: of a primary comparison, the p-value of that outcome.
    - reported: the same difference in the paper's table.
    """
    sources: dict[tuple[str, str], dict[str, Values]] = {}
    rows: list[dict[str, Any]] = []
    primary: dict[int, partial[pd.Series]] = {}  # number of the row -> its differences at a level
    not_run = 0  # primary comparisons, which count for Holm's rule all the same
    for claim in claims.claims:
        for comparison in claim.comparisons:
            source = (comparison.metric, comparison.ood)
            if source not in sources:
                sources[source] = values(results, *source)
            row = {"claim": claim.claim, "by": claim.by, **comparison._asdict()}
            row |= {"outcome": NOT_RUN, "seeds": 0}
            row["beta"] = tradeoff.beta_of(results.profile, comparison.against)
            row["reported"] = _reported(results, claim.table, comparison)
            name = ", ".join(filter(None, source))
            share = claims.margin and claims.margin * _range(results, sources[source], source[0])
            row["margin"] = margin = max(share, claims.floor.get(name, 0))
            pair = _pair(sources[source], comparison)
            if pair is not None:
                row |= _compared(*pair, comparison, margin)
                if claim.primary:
                    primary[len(rows)] = at = partial(_row, *pair, comparison.metric)
                    row["error_rate"] = inference.error_rate(comparison.expects, at, margin)
            not_run += claim.primary and pair is None
            rows.append(row | {"metric": name})
    allowed = inference.holm([rows[number]["error_rate"] for number in primary] + [1.0] * not_run)
    for (number, at), rate in zip(primary.items(), allowed, strict=False):
        row = rows[number]
        row |= _judged(at(1 - rate), row["expects"], row["margin"])
    return _worded(pd.DataFrame(rows, columns=COMPARISONS))


def _worded(table: pd.DataFrame) -> pd.DataFrame:
    """Write NOT_SEEN in the place of DISAGREES for claims of a paper."""
    of_paper = (table["by"] == "paper") & (table["outcome"] == DISAGREES)
    return table.assign(outcome=table["outcome"].mask(of_paper, NOT_SEEN))


def by_base(compared: pd.DataFrame, results: Results) -> pd.DataFrame:
    """Return the primary comparisons on the seeds of each base alone: a row each.

    Column base names the profile that trained it. Bounds are those by which the outcome is judged,
    at 95 %, with the margin of all bases. A base on which the two share no seed has no row.
    """
    trained = results.runs[results.runs["method"] != BASE].dropna(subset="seed")
    rows = []
    for primary in compared.dropna(subset="error_rate").to_dict("records"):
        by_method, metric = values(results, primary["metric"]), primary["metric"]
        pair = [by_method[primary[side]] for side in ("method", "against")]
        names = {name: primary[name] for name in ("claim", "by", "metric", "method", "against")}
        for base, seeds in trained.groupby(results.base_of(trained), sort=False)["seed"]:
            if not set(seeds) & set(pair[0].seeds) & set(pair[1].seeds):
                continue
            ours, theirs = (side.at_seeds(seeds) for side in pair)
            row = _row(ours, theirs, metric)
            low, high = inference.deciding_interval(row)
            outcome = inference.row_outcome(primary["expects"], row, primary["margin"])
            numbers = {"difference": row["difference"], "low": low, "high": high}
            numbers |= {"seeds": row["seeds"], "outcome": outcome}
            rows.append({**names, "base": base, **numbers})
    return _worded(pd.DataFrame(rows)) if rows else pd.DataFrame()


def differences(results: Results, metric: str, pairs: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Return the differences of pairs (method, against) that share a seed, with 95 % bounds: a row
    each. The metric is one of :func:`values`."""
    by_method, rows = values(results, metric), []
    for method, against in pairs:
        pair = _pair(by_method, Comparison(method, against, metric, "above"))
        if pair is not None:
            rows.append(_row(*pair, metric)[["difference", "low", "high", "seeds"]].to_dict())
            rows[-1] |= {"method": method, "against": against}
    return pd.DataFrame(rows, columns=["method", "against", "difference", "low", "high", "seeds"])


def claim_outcomes(claims: Claims, compared: pd.DataFrame) -> pd.DataFrame:
    """Return the claims with their outcomes (`inference.worst_outcome`): a row each.

    `compared` is from :func:`comparisons`. A claim that is not testable is NOT_TESTABLE.
    """
    rows = []
    for claim in claims.claims:
        outcomes = list(compared.loc[compared["claim"] == claim.claim, "outcome"])
        outcome = inference.worst_outcome(outcomes) if claim.testable else NOT_TESTABLE
        agree = f"{outcomes.count(AGREES)} of {len(outcomes)} agree" if outcomes else "none here"
        settles = {NOT_RUN: "runs of its methods"}
        settles |= dict.fromkeys((CANNOT_TELL, NOT_TESTABLE), claim.settles)
        names = (claim.claim, claim.by, outcome, claim.statement, claim.source)
        rows.append((*names, agree, settles.get(outcome, "")))
    columns = ["claim", "by", "outcome", "statement", "source", "comparisons", "settles"]
    return pd.DataFrame(rows, columns=columns)


def values(results: Results, metric: str, ood: str = "") -> dict[str, Values]:
    """Return a metric of each method: by seed and problem, or from logs by seed alone.

    Metrics have names such as "pass@8", "right pass@8", "entropy" or TAIL. ``ood`` is "ood" for the
    data outside Table 1.
    """
    functions = {TAIL: tail, UNSOUND: unsound, DIVERSITY: diversity, BRANCHING: branching}
    if metric in functions:
        return functions[metric](results)
    if metric in LOGGED:
        frame = logged(metric, results).rename(metric).reset_index()
        return Values.by_method(frame.assign(dataset="", problem=""), [metric])
    right, k = metric.startswith(passk.RIGHT), int(metric.rpartition("@")[2])
    if not results.profile.exact:
        # Samples count right answers in any case, so the metric has the name that was asked for.
        by_method = passk.sampled(results, [k], ood=bool(ood))
        return {method: replace(of, columns=[metric]) for method, of in by_method.items()}
    ks = sorted({*passk.AXES, k})
    if right:
        return passk.right(results, ks, ood=bool(ood))
    return passk.exact(results, ks, ood=bool(ood))


def _pair(values: dict[str, Values], comparison: Comparison) -> tuple[Values, Values] | None:
    """Return both sides; None where a method was not evaluated, or no seed is common."""
    if not {comparison.method, comparison.against} <= values.keys():
        return None
    pair = values[comparison.method], values[comparison.against]
    trained = [set(side.seeds) for side in pair if side.method != BASE]
    return pair if set.intersection(*trained) else None


def _row(ours: Values, theirs: Values, metric: str, level: float = 0.95) -> pd.Series:
    row = inference.difference(ours, theirs, level).set_index("metric").loc[metric]
    if metric in LOGGED:  # a number a seed: its interval is over seeds, its level no probability
        bounds = {"low": row["low_seeds"], "high": row["high_seeds"]}
        row = pd.Series({**row.drop(["ours", "theirs"]), **bounds})
    return row


def _compared(
    ours: Values, theirs: Values, comparison: Comparison, margin: float
) -> dict[str, Any]:
    metric, expects = comparison.metric, comparison.expects
    difference = _row(ours, theirs, metric)
    row: dict[str, Any] = dict(difference.drop(["method", "against"]))
    row |= _judged(difference, expects, margin)
    if difference["seeds"] > inference.FEWEST_SEEDS:
        at = partial(_row, metric=metric)
        row["kept"] = inference.stable_seeds(at, ours, theirs, expects, margin)
    return row


def _judged(difference: pd.Series, expects: str, margin: float) -> dict[str, Any]:
    """Return the outcome of a row of differences, and the interval that decides it."""
    low, high = inference.deciding_interval(difference)
    outcome = inference.row_outcome(expects, difference, margin)
    return {"outcome": outcome, "judged_low": low, "judged_high": high}


def _range(results: Results, values: dict[str, Values], metric: str) -> float:
    """Return the range of GRPO's means over its values of beta above 0; NaN for fewer than two."""
    line = tradeoff.curve_methods(results.profile, values.keys() & results.profile.methods.keys())
    means = [
        metrics.mean_over_sets(of.values.mean(axis=0), of.sets)[list(of.columns).index(metric)]
        for of in (values[m] for m in line if tradeoff.beta_of(results.profile, m) > 0)
    ]
    return float(np.ptp(means)) if len(means) > 1 else np.nan


def logged(metric: str, results: Results) -> pd.Series:
    """Return a metric of LOGGED by method and seed: the mean over its part of the run's steps."""
    column, start, end = LOGGED[metric]
    keys = ["method", "seed"]
    steps = results.steps.query("method != @BASE").reindex(columns=[*keys, "step", column])
    share = steps["step"] / steps.groupby(keys)["step"].transform("max")
    part = steps[(share > start) & (share <= end)]
    means: pd.Series = part.groupby(keys, sort=False)[column].mean()
    return means.dropna()


def unsound(results: Results) -> dict[str, Values]:
    """Return the share of each problem's samples with a right answer and work that is not valid."""
    counts = passk.of_sets(results.counts, results.profile, ood=False)
    valid = counts["valid_common"] + counts["valid_rare"]
    return Values.by_method(
        counts.assign(**{UNSOUND: (counts["c"] - valid) / counts["n"]}), [UNSOUND]
    )


def tail(results: Results) -> dict[str, Values]:
    """Return the share of each problem's samples above the base's 95 % quantile of perplexity.
    SageError without the base's evaluation."""
    scores = passk.of_sets(results.scores, results.profile, ood=False)
    inference.require_base(scores["method"])
    bound = scores.loc[scores["method"] == BASE, "perplexity"].quantile(0.95)
    return Values.by_method(scores.assign(**{TAIL: scores["perplexity"] > bound}), [TAIL])


def diversity(results: Results) -> dict[str, Values]:
    """Return the effective number of valid completions of each problem: exp of the entropy of their
    normalised probabilities (exact)."""
    support = passk.of_sets(results.support, results.profile, ood=False)
    keys = ["run", "method", "seed", *passk.PROBLEM]
    p = np.exp(support["logp"])
    shares = p / p.groupby([support[key] for key in keys], dropna=False).transform("sum")
    nats = support.assign(**{DIVERSITY: -shares * np.log(shares.where(shares > 0, 1.0))})
    summed = nats.groupby(keys, sort=False, dropna=False)[DIVERSITY].sum()
    return Values.by_method(np.exp(summed).reset_index(), [DIVERSITY])


def branching(results: Results) -> dict[str, Values]:
    """Return the mean branching factor of each problem's samples."""
    scores = passk.of_sets(results.scores, results.profile, ood=False)
    return Values.by_method(scores.dropna(subset=[BRANCHING]), [BRANCHING])


def readable(compared: pd.DataFrame, results: Results) -> pd.DataFrame:
    """Return comparisons with labels and deciding intervals, as readers see them: a row each."""
    numbers = compared[["difference", "judged_low", "judged_high"]].itertuples(index=False)
    bounds = [
        "" if np.isnan(d) else f"{d:+.4f}{'' if np.isnan(low) else f' [{low:+.4f}, {high:+.4f}]'}"
        for d, low, high in numbers
    ]
    labels = [compared[side].map(results.label) for side in ("method", "against")]
    columns = {
        "claim": compared["claim"],
        "comparison": labels[0] + " - " + labels[1],
        "expected": compared["metric"] + " " + compared["expects"],
        "difference": bounds,
    }
    return pd.DataFrame(columns).join(compared[["seeds", "outcome"]])


def _reported(results: Results, table: str | None, comparison: Comparison) -> float:
    """Return the paper's difference: of its average, or of its only data set; NaN without one."""
    pair = (comparison.method, comparison.against)
    if table == "sage_table1":  # or the one that has this profile's model
        table = results.profile.reported
    if table is None or {*pair} - {BASE, *results.profile.methods}:
        return np.nan
    printed = reported.read_table(table)
    printed = printed[printed["metric"] == comparison.metric.removeprefix(passk.RIGHT)]
    average = printed[printed["dataset"] == "Avg"]
    means = (average if len(average) else printed).drop_duplicates("row").set_index("row")["mean"]
    labels = [results.label(key).split(",")[0] for key in pair]
    ours, theirs = (float(means.get(label, "nan")) for label in labels)
    return ours - theirs
