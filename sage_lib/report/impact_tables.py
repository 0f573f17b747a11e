"""What a token is worth (exploration report, eq. 6): replaced tokens in, tables out.

I_t is the accuracy of continuations of a token minus that of continuations of its runner-up. The
unit of every interval is the training run, whose completions are its own.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile
from sage_lib.report import measured
from sage_lib.report.entropy_statements import Statement, judged
from sage_lib.report.entropy_tables import over_seeds

#: Kinds of replaced tokens, in the order in which they are shown.
TOKENS = ("most uncertain", "early", "late", "random")
GROUPS = ("low", "high")
IMPACTS = [
    *("token", "perplexity", "impact", "low", "high", "size", "size low", "size high"),
    *("entropy", "correct", "completions", "seeds"),
]


def replaced(profile: Profile) -> pd.DataFrame:
    """Every replaced token of every run: the columns of impact.csv, method, seed, and

    impact (I_t) and square, an unbiased estimate of I_t²: of the difference's square, what the
    finite number of continuations alone would give is taken away."""
    frame = measured.explored(profile, "impact", "impact")
    if frame.empty:
        return frame
    noise = sum(
        frame[name] * (1 - frame[name]) / (frame["continuations"] - 1)
        for name in ("kept", "replaced")
    )
    impact = frame["kept"] - frame["replaced"]
    return frame.assign(impact=impact, square=impact**2 - noise)


def impacts(profile: Profile) -> pd.DataFrame:
    """Mean impact by kind of token and perplexity of the completion: columns :data:`IMPACTS`.

    size is the root of the mean of I_t², which counts a token that hurts as well as one that helps;
    bounds are 95 % over runs. entropy is the mean before the replaced token (nats), correct the
    share of the completions that were correct as drawn.
    """
    frame = replaced(profile)
    rows = []
    for token in TOKENS if len(frame) else ():
        for group in GROUPS:
            chosen = frame[(frame["token"] == token) & (frame["perplexity_group"] == group)]
            if chosen.empty:
                continue
            by_run = chosen.groupby(["method", "seed"], sort=False)[["impact", "square"]].mean()
            impact, size = over_seeds(by_run["impact"]), over_seeds(by_run["square"])
            roots = [float(np.sqrt(max(value, 0))) if value == value else value for value in size]
            means = chosen[["entropy", "correct"]].astype(float).mean()
            numbers = (*impact, *roots, *means, len(chosen), len(by_run))
            rows.append((token, group, *numbers))
    return pd.DataFrame(rows, columns=IMPACTS)


def by_run(profile: Profile, right: bool = False) -> pd.DataFrame:
    """Means of each run: columns method, seed, token, perplexity_group, impact, square; of the
    completions alone that were ``right`` as drawn, or of all."""
    frame = replaced(profile)
    keys = ["method", "seed", "token", "perplexity_group"]
    if frame.empty:
        return pd.DataFrame(columns=[*keys, "impact", "square"])
    chosen = frame[frame["correct"].astype(bool)] if right else frame
    return chosen.groupby(keys, sort=False)[["impact", "square"]].mean().reset_index()


def _low_against_high(value: str, right: bool) -> Callable[[Profile], Sequence[float]]:
    def values(profile: Profile) -> Sequence[float]:
        table = by_run(profile, right)
        chosen = table[table["token"] == "most uncertain"]
        return _difference(chosen, "perplexity_group", "high", "low", value)

    return values


def _early_against_late(group: str) -> Callable[[Profile], Sequence[float]]:
    def values(profile: Profile) -> Sequence[float]:
        table = by_run(profile)
        chosen = table[table["perplexity_group"] == group]
        return _difference(chosen, "token", "early", "late", "square")

    return values


def _uncertain_against_random(profile: Profile) -> Sequence[float]:
    table = by_run(profile)
    means = table.groupby(["method", "seed", "token"], sort=False)["impact"].mean().reset_index()
    return _difference(means, "token", "most uncertain", "random", "impact")


def _difference(
    frame: pd.DataFrame, column: str, one: str, other: str, value: str
) -> Sequence[float]:
    if frame.empty:
        return []
    wide = frame.pivot(index=["method", "seed"], columns=column, values=value)
    return list(wide.reindex(columns=[one, other]).diff(axis=1)[other] * -1)


_LESS_AT_LOW = "a replaced token changes less in answers of low perplexity"
_EARLY = "early tokens decide the outcome, late ones do not"
STATEMENTS_OF_IMPACT = (
    Statement(
        _LESS_AT_LOW,
        "Section 3.2.3, Figure 5b",
        "",
        "mean I_t² of the most uncertain token: high minus low perplexity",
        _low_against_high("square", right=False),
        "above",
    ),
    Statement(
        f"{_LESS_AT_LOW}, of answers that were right",
        "Section 3.2.3, Figure 5b; matched here",
        "",
        "mean I_t of the same, of completions that were right as drawn",
        _low_against_high("impact", right=True),
        "above",
    ),
    *(
        Statement(
            f"{_EARLY}: {group} perplexity",
            "Section 3.2.4, Figure 6b",
            "",
            "mean I_t² of the most uncertain token of the first fifth minus that of the last",
            _early_against_late(group),
            "above",
        )
        for group in GROUPS
    ),
    Statement(
        "tokens of high entropy are the ones that matter (forking tokens)",
        "Section 3.1, which has no such measurement",
        "",
        "mean I_t of the most uncertain token minus that of a random one",
        _uncertain_against_random,
        "above",
    ),
)


def statements(profile: Profile) -> pd.DataFrame:
    """What the report says of the worth of tokens, judged by our runs."""
    return judged(profile, STATEMENTS_OF_IMPACT)


def missing(profile: Profile) -> str:
    """One sentence where nothing is published, or made, yet; "" otherwise."""
    if any(run.record.is_file() for run in runs.impact_runs(profile)):
        return ""
    whose = "published" if profile.published else "made"
    return (
        f"Nothing is {whose} yet of replaced tokens, which need trained policies: "
        f"sage-companion stage impact --profile {profile.spec} makes it."
    )
