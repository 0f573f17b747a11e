"""What the exploration report says of entropy and performance (its Section 3), statement by
statement, and what our runs say of it: the interval over seeds decides.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sage_lib.experiment.profile import Profile
from sage_lib.policy.token_groups import FORMAL, KINDS, OTHER, TOP
from sage_lib.report.entropy_tables import (
    EXACT,
    REWARD,
    along,
    at_fixed_weights,
    fits,
    halves,
    over_seeds,
    read,
    updates,
)
from sage_lib.report.front_tables import FEWEST_SEEDS
from sage_lib.report.verdict import MISSING, OPEN, outcome

STATEMENTS = [
    *("statement", "source", "reported", "what", "expects", "value", "low", "high"),
    *("seeds", "outcome"),
]


@dataclass(frozen=True)
class Statement:
    """What the report says, and the number of each seed that would have to lie above or below
    ``than``. ``error``: a standard error that all of these numbers share."""

    statement: str
    source: str
    reported: str  # its number, in its own unit; "" where it gives none
    what: str  # the number, in words
    values: Callable[[Profile], Sequence[float]]  # one of each seed
    expects: str  # "above" or "below"
    than: float = 0.0
    error: Callable[[Profile], float] | None = None


def judged(profile: Profile, statements: Sequence[Statement]) -> pd.DataFrame:
    """Each statement with what was measured: columns :data:`STATEMENTS`.

    It agrees where the whole 95 % interval over seeds lies on its side, disagrees where all of it
    lies on the other, and cannot be told otherwise, or from fewer than :data:`FEWEST_SEEDS` seeds;
    "not run" where nothing is there.
    """
    rows = []
    for one in statements:
        values = np.asarray(one.values(profile), dtype=float)
        values = values[~np.isnan(values)]
        value, low, high = over_seeds(values)
        if one.error is not None and len(values):
            half = float(np.hypot(high - value, 1.96 * one.error(profile)))
            low, high = value - half, value + half
        if not len(values):
            found = MISSING
        elif len(values) < FEWEST_SEEDS:
            found = OPEN
        else:
            found = outcome(one.expects, low - one.than, high - one.than, 0.0)
        expects = f"{one.expects} {one.than:g}"
        texts = (one.statement, one.source, one.reported, one.what, expects)
        rows.append((*texts, value, low, high, len(values), found))
    return pd.DataFrame(rows, columns=STATEMENTS)


def _law_values(
    column: str, performance: str = REWARD, method: str | None = None
) -> Callable[[Profile], Sequence[float]]:
    """A number of the law of each run of a method; None is the profile's first."""

    def values(profile: Profile) -> Sequence[float]:
        key = profile.reference if method is None else method
        if key not in profile.methods:
            return []
        table = fits(dataclasses.replace(profile, methods={key: profile.methods[key]}))
        chosen = table[table["performance"] == performance]
        if column == "advantage":
            return list(chosen["mean_error"] - chosen["law_error"])
        if column == "steeper":
            fixed = at_fixed_weights(profile)["a"]
            return list(chosen["a"] - fixed.iloc[0]) if len(fixed) else []
        return list(chosen[column])

    return values


def _error_at_fixed_weights(profile: Profile) -> float:
    found = at_fixed_weights(profile)["a_error"]
    return float(found.iloc[0]) if len(found) else float("nan")


def _per_seed(frame: pd.DataFrame, value: Callable[[pd.DataFrame], float]) -> list[float]:
    """The number of each run, the mean over the methods of a seed."""
    if frame.empty:
        return []
    found: dict[int, list[float]] = {}
    for (_, seed), run in frame.groupby(["method", "seed"], sort=False):
        found.setdefault(seed, []).append(value(run))
    return [float(np.mean(values)) for values in found.values()]


def _mean(run: pd.DataFrame, column: str, **chosen: object) -> float:
    """Mean over the tokens of some groups of a run; a list means any of its values."""
    for key, value in chosen.items():
        run = run[run[key].isin(value if isinstance(value, (list, tuple)) else [value])]
    tokens = run["tokens"].sum()
    return float((run[column] * run["tokens"]).sum() / tokens) if tokens else float("nan")


def _parts(*numbers: int) -> list[str]:
    return [str(number) for number in numbers]


def _gap(profile: Profile) -> Sequence[float]:
    return _per_seed(
        updates(profile),
        lambda run: (
            _mean(run, "before", by="all", sign="negative")
            - _mean(run, "before", by="all", sign="positive")
        ),
    )


def _slopes(profile: Profile) -> Sequence[float]:
    """Slope of the entropy of negative minus of positive samples, nats per 100 steps."""
    end, _, _ = halves(profile)
    table = along(profile)
    early = table[table["step"] <= end].dropna()
    return [
        float(100 * np.polyfit(run["step"], run["negative"] - run["positive"], 1)[0])
        for _, run in early.groupby(["method", "seed"], sort=False)
        if len(run) > 1
    ]


def _formal_share(profile: Profile) -> Sequence[float]:
    def value(run: pd.DataFrame) -> float:
        formal = _mean(run, "fallen", by="kind", group=FORMAL)
        tokens = run[run["by"] == "kind"]
        share = tokens.loc[tokens["group"].isin(FORMAL), "tokens"].sum() / tokens["tokens"].sum()
        return formal * share / TOP - share

    return _per_seed(read(profile), value)


def _top_share(column: str) -> Callable[[Profile], Sequence[float]]:
    """Share of a sum over all tokens that falls on the fifth with the highest entropy."""

    def value(run: pd.DataFrame) -> float:
        tenths = run[run["by"] == "entropy"]
        sums = (tenths[column] * tenths["tokens"]).groupby(tenths["group"].astype(str)).sum()
        return float(sums.reindex(_parts(9, 10)).sum() / sums.sum())

    return lambda profile: _per_seed(updates(profile, "plateau"), value)


def _valley(run: pd.DataFrame) -> float:
    first, middle, last = (
        _mean(run, "after", by="position", group=_parts(*numbers))
        for numbers in ((1, 2), (5, 6), (9, 10))
    )
    return min(first, last) - middle


STATEMENTS_OF_ENTROPY = (
    Statement(
        "reward falls as entropy rises: a > 0 in R = -a exp(H) + b",
        "Section 3.1, after Cui et al.",
        "a, b > 0",
        "mean of the a of each run of the reference method, training reward",
        _law_values("a"),
        "above",
    ),
    Statement(
        "a law fitted before tells the reward from the entropy of the same batch",
        "Section 3.1",
        "",
        "error of the first half's mean minus that of its law, on the second half",
        _law_values("advantage"),
        "above",
    ),
    Statement(
        "the law tells of learning, not of hard and easy batches",
        "control of this companion",
        "",
        "a in training minus a over prompts at the base's fixed weights",
        _law_values("steeper"),
        "above",
        error=_error_at_fixed_weights,
    ),
    *(
        Statement(
            f"the law holds for held-out performance, {words}",
            "Section 3.1",
            "a, b > 0",
            "mean of the a of each run, exact pass@1",
            _law_values("a", EXACT, method),
            "above",
        )
        for words, method in (("reference method", None), ("without KL", "grpo_no_kl"))
    ),
    Statement(
        "negative samples have the higher entropy",
        "Section 3.2.2, Figure 3c",
        "",
        "entropy of negative minus positive samples, nats",
        _gap,
        "above",
    ),
    Statement(
        "the entropy of negative samples falls faster in the rising stage",
        "Section 3.2.2, Figure 3c",
        "",
        "slope of their difference, nats per 100 steps",
        _slopes,
        "below",
    ),
    Statement(
        "the tokens that lose most entropy are less often formal than others",
        "Section 3.2.2, Figure 3b: they have nothing to do with the task",
        "",
        "formal tokens: share of the largest falls minus share of all tokens",
        _formal_share,
        "below",
    ),
    Statement(
        "an update moves few probabilities on the plateau",
        "Section 3.2.2",
        "over 99 % below 0.06",
        "share of tokens that an update moves by at most 0.06",
        lambda profile: _per_seed(
            updates(profile, "plateau"), lambda run: 1 - _mean(run, "moved", by="all")
        ),
        "above",
        0.99,
    ),
    Statement(
        "updates reinforce positive samples and suppress negative ones",
        "Section 3.2.2, Figure 4a",
        "",
        "the smaller of the mean rise in positive and the mean fall in negative samples",
        lambda profile: _per_seed(
            updates(profile, "plateau"),
            lambda run: min(
                _mean(run, "rise", by="all", sign="positive"),
                -_mean(run, "rise", by="all", sign="negative"),
            ),
        ),
        "above",
    ),
    Statement(
        "updates fall on the tokens of high entropy",
        "Section 3.2.2, Figure 4b",
        "",
        "share of all change of probability on the fifth of highest entropy",
        _top_share("shift"),
        "above",
        0.5,
    ),
    Statement(
        "tokens of high entropy have the larger gradients",
        "Section 3.2.2, eq. 4",
        "",
        "share of the summed G_t on the fifth of highest entropy",
        _top_share("gradient"),
        "above",
        0.5,
    ),
    Statement(
        "updates are largest on formal tokens",
        "Section 3.2.2, Table 1",
        "0.039 against 0.031 to 0.034",
        "share among the largest fifth of changes: formal tokens minus all others",
        lambda profile: _per_seed(
            updates(profile, "plateau"),
            lambda run: (
                _mean(run, "shifted", by="kind", group=FORMAL)
                - _mean(run, "shifted", by="kind", group=[*set(KINDS) - set(FORMAL), OTHER])
            ),
        ),
        "above",
    ),
    Statement(
        "updates concentrate in samples of low perplexity",
        "Section 3.2.3, Figure 5a",
        "",
        "share among the largest fifth of changes: lowest fifth of perplexity minus highest",
        lambda profile: _per_seed(
            updates(profile),
            lambda run: (
                _mean(run, "shifted", by="perplexity", group=_parts(1))
                - _mean(run, "shifted", by="perplexity", group=_parts(5))
            ),
        ),
        "above",
    ),
    Statement(
        "entropy is high at the start and at the end of a response (U shape)",
        "Section 3.2.4, Figure 6a",
        "",
        "the smaller of the first and the last fifth minus the middle one, nats",
        lambda profile: _per_seed(read(profile), _valley),
        "above",
    ),
    Statement(
        "late tokens of negative samples have the higher entropy",
        "Section 3.2.4",
        "",
        "entropy of the last fifth: negative minus positive samples, nats",
        lambda profile: _per_seed(
            read(profile),
            lambda run: (
                _mean(run, "after", by="position", group=_parts(9, 10), sign="negative")
                - _mean(run, "after", by="position", group=_parts(9, 10), sign="positive")
            ),
        ),
        "above",
    ),
)


def statements(profile: Profile) -> pd.DataFrame:
    """What the report says of entropy and performance, judged by our runs (:func:`judged`)."""
    return judged(profile, STATEMENTS_OF_ENTROPY)
