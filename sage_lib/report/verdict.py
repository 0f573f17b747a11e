"""Claim by claim: what was said (claims.yaml), what was measured, and whether it agrees.

Outcomes follow from the intervals by the one rule of :mod:`inference`. Nothing is corrected for the
number of comparisons: of many, some come out wrong by chance.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel
from ruamel.yaml import YAML

from sage_lib.experiment.profile import BASE
from sage_lib.experiment.results import Study
from sage_lib.report import front, inference, passk, reported
from sage_lib.report.inference import AGREES, CANNOT_TELL, NOT_RUN, Values

CLAIMS = Path(__file__).with_name("claims.yaml")
TAIL = "perplexity tail"
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
    *("claim", "outcome", "difference", "low", "high", "metric", "method", "against", "beta"),
    *("expects", "low_seeds", "high_seeds", "detectable", "seeds", "reported"),
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
    source: str
    statement: str
    settles: str  # what would settle it, where it cannot be told here
    comparisons: list[Comparison]
    table: str | None = None  # the reported table that has the same comparison, by labels


class Claims(BaseModel, extra="forbid"):
    """Claims, and by metric the smallest difference that matters."""

    margins: dict[str, float]
    claims: list[Claim]


def load(path: Path = CLAIMS) -> Claims:
    return Claims(**YAML(typ="safe").load(path))


def comparisons(chosen: Claims, study: Study, *others: Study) -> pd.DataFrame:
    """Every comparison of every claim, measured and judged: columns COMPARISONS.

    `others` are studies of the same problems from another base: pairs stay within a study.
    reported: the same difference in the paper's own table.
    """
    studies, rows = (study, *others), []
    asked = {(one.metric, one.ood) for claim in chosen.claims for one in claim.comparisons}
    logs = {name: logged(name, *studies) for name, _ in asked if name in LOGGED}
    values = {("", TAIL): inference.stacked(*map(tail, studies))} if (TAIL, "") in asked else {}
    for ood in {ood for _, ood in asked}:
        values[ood, ""] = inference.stacked(*(passk.exact(one, ood=bool(ood)) for one in studies))
    for claim in chosen.claims:
        for one in claim.comparisons:
            if one.metric in LOGGED:
                found = _of_logs(logs[one.metric], one)
            else:
                found = _paired(values[one.ood, TAIL if one.metric == TAIL else ""], one)
            row = {"claim": claim.claim, **one._asdict(), "outcome": NOT_RUN, "seeds": 0, **found}
            if found:
                margin = chosen.margins[one.metric]
                row["outcome"] = inference.judged(one.expects, found, margin)
            row["metric"] = ", ".join(filter(None, (one.metric, one.ood)))
            row["beta"] = front.beta_of(study.settings, one.against)
            rows.append({**row, "reported": _reported(study, claim.table, one)})
    return pd.DataFrame(rows, columns=COMPARISONS)


def judge(chosen: Claims, compared: pd.DataFrame) -> pd.DataFrame:
    """Each claim with its outcome, from :func:`comparisons`: it agrees where all of them agree, and
    disagrees where one does; without comparisons it cannot be told."""
    rows = []
    for claim in chosen.claims:
        found = list(compared.loc[compared["claim"] == claim.claim, "outcome"])
        outcome = inference.together(found)
        how = f"{found.count(AGREES)} of {len(found)} agree" if found else "none here"
        settles = {CANNOT_TELL: claim.settles, NOT_RUN: "runs of its methods"}.get(outcome, "")
        rows.append((claim.claim, outcome, claim.statement, claim.source, how, settles))
    columns = ["claim", "outcome", "statement", "source", "comparisons", "settles"]
    return pd.DataFrame(rows, columns=columns)


def _paired(values: dict[str, Values], one: Comparison) -> dict[str, Any]:
    """A row of differences; empty where a method was not evaluated, or no seed is common."""
    pair = [values[key] for key in (one.method, one.against) if key in values]
    trained = [set(each.seeds) for each in pair if each.method != BASE]
    if len(pair) < 2 or not set.intersection(*trained):
        return {}
    found = inference.difference(*pair).set_index("metric").loc[one.metric]
    return dict(found.drop(["method", "against"]))


def _of_logs(means: pd.Series, one: Comparison) -> dict[str, Any]:
    if not {one.method, one.against} <= set(means.index.get_level_values("method")):
        return {}
    found = inference.difference_of_seeds(means[one.method], means[one.against])
    alone = {"low_seeds": found["low"], "high_seeds": found["high"]}
    return found | alone if found["seeds"] else {}


def logged(metric: str, *studies: Study) -> pd.Series:
    """A metric of LOGGED by method, study and seed: the mean over its part of the run's steps."""
    column, start, end = LOGGED[metric]
    keys = ["method", "study", "seed"]
    frames = [one.steps.query("method != @BASE").assign(study=one.name) for one in studies]
    steps = pd.concat([one.reindex(columns=[*keys, "step", column]) for one in frames])
    share = steps["step"] / steps.groupby(keys)["step"].transform("max")
    found: pd.Series = steps[(share > start) & (share <= end)].groupby(keys)[column].mean()
    return found.dropna()


def tail(study: Study) -> dict[str, Values]:
    """The share of each problem's samples beyond the base's upper twentieth of perplexity."""
    scores = passk.of_sets(study.scores, study.settings, ood=False)
    bound = scores.loc[scores["method"] == BASE, "perplexity"].quantile(0.95)
    return Values.by_method(scores.assign(**{TAIL: scores["perplexity"] > bound}), [TAIL])


def _reported(study: Study, table: str | None, one: Comparison) -> float:
    """The paper's own difference: of its average, or of its only data set; NaN without one."""
    if table is None or {one.method, one.against} - {BASE, *study.settings.methods}:
        return np.nan
    printed = reported.load(table).query("metric == @one.metric")
    average = printed[printed["dataset"] == "Avg"]
    means = (average if len(average) else printed).drop_duplicates("row").set_index("row")["mean"]
    labels = [study.label(key).split(",")[0] for key in (one.method, one.against)]
    ours, theirs = (float(means.get(label, "nan")) for label in labels)
    return ours - theirs
