"""Entropy and performance (exploration report, Section 3), and what a token is worth (eq. 6).

The unit of every interval is the training seed. Runs of several methods with one seed share its
batches: their mean counts once.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import linregress, t

from sage_lib.experiment.results import Results
from sage_lib.policy.token_groups import KINDS, OTHER, TOP
from sage_lib.report import inference, passk
from sage_lib.report.inference import FEWEST_SEEDS

#: Steps of one point of a fit: the reward of one step is that of eight prompts.
BLOCK = 10
RUN = ["method", "seed"]


# --- the law --------------------------------------------------------------------------------------


def law(entropy: ArrayLike, performance: ArrayLike) -> tuple[float, float]:
    """a and b of R = -a exp(H) + b by least squares (exploration report, Section 3.1); NaN where
    all entropies are equal."""
    x, y = np.exp(np.asarray(entropy, dtype=float)), np.asarray(performance, dtype=float)
    centred = x - x.mean()
    if not (centred**2).sum() > 0:
        return np.nan, np.nan
    slope = float((centred * y).sum() / (centred**2).sum())
    return -slope, float(y.mean() - slope * x.mean())


def points(results: Results) -> pd.DataFrame:
    """What the law is fitted to: method, seed, step, H and R of every RL run, means of token
    entropy (nats) and training reward over blocks of BLOCK steps."""
    rl = [key for key, method in results.profile.methods.items() if method.rft is None]
    log = results.steps[results.steps["method"].isin(rl)].astype({"seed": int})
    block = (-(-log["step"] // BLOCK) * BLOCK).clip(upper=log["step"].max())
    blocks = log.assign(step=block).groupby([*RUN, "step"], sort=False)[["entropy", "reward"]]
    named = {"entropy": "H", "reward": "R"}
    return blocks.mean().reset_index().rename(columns=named).dropna(subset=["H", "R"])


def exact_points(results: Results) -> pd.DataFrame:
    """The same with exact pass@1 of held-out problems as R, wherever it was logged. H is that of
    the BLOCK steps before it, at the start that of the first ones."""
    blocks = points(results)
    first = blocks.groupby(RUN, sort=False)["step"].transform("min")
    start = blocks[blocks["step"] == first].assign(step=0)
    entropy = pd.concat([start, blocks])[[*RUN, "step", "H"]]
    exact = passk.along_training(results)[[*RUN, "step", "pass@1"]].astype({"seed": int})
    return exact.merge(entropy, on=[*RUN, "step"]).rename(columns={"pass@1": "R"})


def fits(table: pd.DataFrame) -> pd.DataFrame:
    """The law of each run alone: method, seed, a, b, law_error, mean_error.

    The errors are root mean squares: what the law, and the mean, of the first half predict of the
    second. NaN for fewer than three points a half.
    """
    rows = []
    for (method, seed), run in table.groupby(RUN, sort=False):
        run = run.sort_values("step")
        early, late = run.iloc[: len(run) // 2], run.iloc[len(run) // 2 :]
        errors = np.nan, np.nan
        if len(early) >= 3:
            a, b = law(early["H"], early["R"])
            by_law, by_mean = late["R"] - (b - a * np.exp(late["H"])), late["R"] - early["R"].mean()
            errors = float(np.sqrt((by_law**2).mean())), float(np.sqrt((by_mean**2).mean()))
        rows.append((method, seed, *law(run["H"], run["R"]), *errors))
    return pd.DataFrame(rows, columns=[*RUN, "a", "b", "law_error", "mean_error"])


def laws(table: pd.DataFrame) -> pd.DataFrame:
    """One law for all runs of a method, and for all methods ("all"): method, seeds, a, low, high,
    b, r2. low and high bound a (:func:`jackknife`)."""
    rows = []
    for method, chosen in [*table.groupby("method", sort=False), ("all", table)]:
        (a, b), low, high = jackknife(chosen, lambda frame: law(frame["H"], frame["R"]))
        left = chosen["R"] - (b - a * np.exp(chosen["H"]))
        r2 = 1 - (left**2).sum() / ((chosen["R"] - chosen["R"].mean()) ** 2).sum()
        rows.append((method, chosen["seed"].nunique(), a, low[0], high[0], b, r2))
    return pd.DataFrame(rows, columns=["method", "seeds", "a", "low", "high", "b", "r2"])


def jackknife(
    frame: pd.DataFrame, estimate: Callable[[pd.DataFrame], Sequence[float]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Estimates from all rows, and their 95 % intervals that leave out one seed at a time (Efron
    and Stein 1981), with the t quantile. NaN bounds for fewer than FEWEST_SEEDS seeds.

    Returns (value, low, high), each of shape (estimates,).
    """
    whole, seeds = np.asarray(estimate(frame), dtype=float), frame["seed"].unique()
    n = len(seeds)
    if n < FEWEST_SEEDS:
        return whole, whole * np.nan, whole * np.nan
    without = np.array([estimate(frame[frame["seed"] != seed]) for seed in seeds])
    half = t.ppf(0.975, n - 1) * np.sqrt(n - 1) * without.std(axis=0)
    return whole, whole - half, whole + half


def at_fixed_weights(prompts: pd.DataFrame) -> tuple[float, float]:
    """a of the law over prompts at the base's fixed weights, and its standard error.

    Hard prompts have a lower reward *and* a higher entropy: a slope in training that is no steeper
    than this one tells of prompts, not of learning.
    """
    base = prompts[prompts["source"] == "base"]
    one = base[base["run"] == base["run"].iloc[0]]
    found = linregress(np.exp(one["entropy"]), one["correct"])
    return -float(found.slope), float(found.stderr)


# --- tokens ---------------------------------------------------------------------------------------


def mean_over_tokens(
    frame: pd.DataFrame, column: str, by: str = "all", **chosen: object
) -> pd.Series:
    """Mean of a column over the tokens of some groups, of each run (method, seed).

    by: how tokens are grouped. chosen: values of other columns, a list for any of several.
    """
    rows = frame[frame["by"] == by]
    for key, value in chosen.items():
        rows = rows[rows[key].isin(value if isinstance(value, list | tuple) else [value])]
    weighted = (rows[column] * rows["tokens"]).groupby([rows[key] for key in RUN]).sum()
    tokens = rows.groupby(RUN)["tokens"].sum()
    return (weighted / tokens).where(tokens > 0)


def share_of_sum(frame: pd.DataFrame, column: str, by: str, groups: Sequence[str]) -> pd.Series:
    """Share of a column's sum over all tokens that falls on some groups, of each run."""
    rows = frame[frame["by"] == by]
    sums = (rows[column] * rows["tokens"]).groupby([*(rows[k] for k in RUN), rows["group"]]).sum()
    inside = sums[sums.index.get_level_values("group").isin(groups)]
    return inside.groupby(RUN).sum() / sums.groupby(RUN).sum()


def by_kind(tokens: pd.DataFrame) -> pd.DataFrame:
    """Which tokens lost entropy: kind, share (of all tokens), fallen (of the share TOP with the
    largest falls), low, high (of fallen, over seeds), before and after (entropy, nats)."""
    rows = tokens[tokens["by"] == "kind"]
    rows = rows.assign(**{k: rows[k] * rows["tokens"] for k in ("fallen", "before", "after")})
    sums = rows.groupby([*RUN, "group"])[["tokens", "fallen", "before", "after"]].sum()
    whole = sums["tokens"].groupby(RUN).transform("sum")
    means = sums[["before", "after"]].div(sums["tokens"], axis=0)
    means = means.assign(share=sums["tokens"] / whole, fallen=sums["fallen"] / whole / TOP)
    by_seed = means.groupby(["seed", "group"]).mean()
    found = []
    for kind in [k for k in (*KINDS, OTHER) if k in by_seed.index.get_level_values("group")]:
        one = by_seed.xs(kind, level="group")
        around = one["before"].mean(), one["after"].mean()
        found.append((kind, one["share"].mean(), *mean_over_seeds(one["fallen"]), *around))
    columns = ["kind", "share", "fallen", "low", "high", "before", "after"]
    return pd.DataFrame(found, columns=columns)


def with_impact(impact: pd.DataFrame) -> pd.DataFrame:
    """The frame `impact` with the columns impact (I_t, eq. 6) and square, an unbiased estimate of
    I_t²: without what a finite number of continuations alone would give."""
    noise = sum(
        impact[name] * (1 - impact[name]) / (impact["continuations"] - 1)
        for name in ("kept", "replaced")
    )
    difference = impact["kept"] - impact["replaced"]
    return impact.assign(impact=difference, square=difference**2 - noise)


# --- statements -----------------------------------------------------------------------------------


def mean_over_seeds(by_run: pd.Series) -> tuple[float, float, float]:
    """Mean and 95 % interval over seeds of a number of each seed, or of each run (method, seed):
    methods of a seed are averaged first. NaN bounds for fewer than FEWEST_SEEDS seeds."""
    values = by_run.groupby("seed").mean() if "seed" in by_run.index.names else by_run
    values = values.dropna()
    if len(values) < FEWEST_SEEDS:
        return values.mean(), np.nan, np.nan
    return (values.mean(), *inference.over_seeds(list(values)))


Row = tuple[str, str, float, pd.Series] | tuple[str, str, float, pd.Series, float]


def statements(rows: Iterable[Row]) -> pd.DataFrame:
    """Statements judged by intervals over seeds: statement, expects, value, low, high, outcome.

    A row is (statement, "above" or "below", than what, the number of each run) and, where there is
    one, a standard error that all of these numbers share.
    """
    found = []
    for statement, expects, than, by_run, *error in rows:
        value, low, high = mean_over_seeds(by_run)
        if error:
            half = float(np.hypot(high - value, 1.96 * error[0]))
            low, high = value - half, value + half
        seeds = by_run.dropna().index.get_level_values("seed").nunique()
        row = {"low": low - than, "high": high - than, "seeds": seeds}
        outcome = inference.row_outcome(expects, row, 0.0) if seeds else inference.NOT_RUN
        found.append((statement, f"{expects} {than:g}", value, low, high, outcome))
    columns = ["statement", "expects", "value", "low", "high", "outcome"]
    return pd.DataFrame(found, columns=columns)
