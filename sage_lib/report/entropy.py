"""Entropy and performance (exploration report, Section 3), and the worth of a token (eq. 6).

The unit of all intervals is the training seed. Runs of several methods with the same seed share its
batches: their mean counts once.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import linregress, t

from sage_lib.experiment.results import Results
from sage_lib.report import inference, passk
from sage_lib.report.inference import FEWEST_SEEDS

#: Steps of a point of a fit: the reward of a single step is a mean over eight prompts.
BLOCK = 10
RUN = ["method", "seed"]


# --- the law --------------------------------------------------------------------------------------


def law(entropy: ArrayLike, performance: ArrayLike) -> tuple[float, float]:
    """Fit a and b of R = -a exp(H) + b by least squares (exploration report, Section 3.1); NaN
    where all entropies are equal."""
    x = np.exp(np.asarray(entropy, dtype=float))
    if not np.ptp(x) > 0:
        return np.nan, np.nan
    fit = linregress(x, performance)
    return -float(fit.slope), float(fit.intercept)


def points(results: Results) -> pd.DataFrame:
    """Return the points to which the law is fitted: a row for each block of BLOCK steps of a run.

    Columns method, seed, step, H and R: means of token entropy (nats) and of training reward.
    """
    rl = [key for key, method in results.profile.methods.items() if method.rft is None]
    log = results.steps[results.steps["method"].isin(rl)].astype({"seed": int})
    block = (-(-log["step"] // BLOCK) * BLOCK).clip(upper=log["step"].max())
    blocks = log.assign(step=block).groupby([*RUN, "step"], sort=False)[["entropy", "reward"]]
    named = {"entropy": "H", "reward": "R"}
    return blocks.mean().reset_index().rename(columns=named).dropna(subset=["H", "R"])


def exact_points(results: Results) -> pd.DataFrame:
    """Return the points with exact pass@1 of held-out problems as R, at the steps that log it. H is
    a mean over the BLOCK steps before, and at step 0 over the first BLOCK steps."""
    blocks = points(results)
    first = blocks.groupby(RUN, sort=False)["step"].transform("min")
    start = blocks[blocks["step"] == first].assign(step=0)
    entropy = pd.concat([start, blocks])[[*RUN, "step", "H"]]
    exact = passk.along_training(results)[[*RUN, "step", "pass@1"]].astype({"seed": int})
    return exact.merge(entropy, on=[*RUN, "step"]).rename(columns={"pass@1": "R"})


def fits(table: pd.DataFrame) -> pd.DataFrame:
    """Fit the law to each run: a row each, with method, seed, a, b, law_error, mean_error.

    The errors are root mean square errors on the second half, predicted by the law and by the mean
    of the first half. NaN for fewer than three points a half.
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
    """Fit a law to all runs of each method, and to all methods ("all"): a row each, with a's bounds
    low and high (:func:`jackknife`)."""
    rows = []
    for method, of in [*table.groupby("method", sort=False), ("all", table)]:
        (a, b), low, high = jackknife(of, lambda frame: law(frame["H"], frame["R"]))
        residuals = of["R"] - (b - a * np.exp(of["H"]))
        r2 = 1 - (residuals**2).sum() / ((of["R"] - of["R"].mean()) ** 2).sum()
        rows.append((method, of["seed"].nunique(), a, low[0], high[0], b, r2))
    return pd.DataFrame(rows, columns=["method", "seeds", "a", "low", "high", "b", "r2"])


def jackknife(
    frame: pd.DataFrame, estimate: Callable[[pd.DataFrame], Sequence[float]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return estimates from all rows with 95 % jackknife intervals over seeds: (value, low, high),
    each of shape (estimates,).

    A jackknife leaves out one seed at a time (Efron and Stein 1981); here with the t quantile.
    Bounds are NaN for fewer than FEWEST_SEEDS seeds.
    """
    value, seeds = np.asarray(estimate(frame), dtype=float), frame["seed"].unique()
    n = len(seeds)
    if n < FEWEST_SEEDS:
        return value, value * np.nan, value * np.nan
    without = np.array([estimate(frame[frame["seed"] != seed]) for seed in seeds])
    half = t.ppf(0.975, n - 1) * np.sqrt(n - 1) * without.std(axis=0)
    return value, value - half, value + half


def at_fixed_weights(prompts: pd.DataFrame) -> tuple[float, float]:
    """Return a of the law over prompts at the base's fixed weights, and its standard error.

    Hard prompts have a lower reward *and* a higher entropy. A slope in training that is not steeper
    than this slope is evidence about prompts, not about learning.
    """
    base = prompts[prompts["source"] == "base"]
    first = base[base["run"] == base["run"].iloc[0]]
    fit = linregress(np.exp(first["entropy"]), first["correct"])
    return -float(fit.slope), float(fit.stderr)


# --- tokens ---------------------------------------------------------------------------------------


def mean_over_tokens(
    frame: pd.DataFrame, column: str, by: str = "all", **conditions: object
) -> pd.Series:
    """Return the mean of a column over tokens, for each run (method, seed).

    Rows are groups of tokens in the grouping ``by``, and the column is a mean over each group.
    Conditions are values of other columns, a list for any of several.
    """
    rows = frame[frame["by"] == by]
    for key, value in conditions.items():
        rows = rows[rows[key].isin(value if isinstance(value, list | tuple) else [value])]
    weighted = (rows[column] * rows["tokens"]).groupby([rows[key] for key in RUN]).sum()
    tokens = rows.groupby(RUN)["tokens"].sum()
    return (weighted / tokens).where(tokens > 0)


def share_of_sum(frame: pd.DataFrame, column: str, by: str, groups: Sequence[str]) -> pd.Series:
    """Return the share of some groups in a column's sum over all tokens, for each run.

    Rows and column are as in :func:`mean_over_tokens`.
    """
    rows = frame[frame["by"] == by]
    sums = (rows[column] * rows["tokens"]).groupby([*(rows[k] for k in RUN), rows["group"]]).sum()
    inside = sums[sums.index.get_level_values("group").isin(groups)]
    return inside.groupby(RUN).sum() / sums.groupby(RUN).sum()


def with_impact(impact: pd.DataFrame) -> pd.DataFrame:
    """Add the columns impact (I_t, eq. 6) and square, an unbiased estimate of I_t²: without the
    noise of a finite number of continuations."""
    noise = sum(
        impact[name] * (1 - impact[name]) / (impact["continuations"] - 1)
        for name in ("kept", "replaced")
    )
    difference = impact["kept"] - impact["replaced"]
    return impact.assign(impact=difference, square=difference**2 - noise)


# --- statements -----------------------------------------------------------------------------------


def mean_over_seeds(by_run: pd.Series) -> tuple[float, float, float]:
    """Return mean and 95 % interval over seeds of a number of each seed, or of each run (method,
    seed), averaged by seed. NaN bounds for fewer than FEWEST_SEEDS seeds."""
    values = by_run.groupby("seed").mean() if "seed" in by_run.index.names else by_run
    values = values.dropna()
    if len(values) < FEWEST_SEEDS:
        return values.mean(), np.nan, np.nan
    return (values.mean(), *inference.over_seeds(list(values)))


Row = tuple[str, str, float, pd.Series] | tuple[str, str, float, pd.Series, float]


def statements(rows: Iterable[Row]) -> pd.DataFrame:
    """Decide statements by intervals over seeds: a row each.

    Columns statement, expects, value, low, high, outcome.

    Args:
        rows: (statement, "above" or "below", bound, the number of each run), and optionally a
            standard error that all of these numbers share.
    """
    table = []
    for statement, expects, bound, by_run, *error in rows:
        value, low, high = mean_over_seeds(by_run)
        if error:
            half = float(np.hypot(high - value, 1.96 * error[0]))
            low, high = value - half, value + half
        seeds = by_run.dropna().index.get_level_values("seed").nunique()
        row = {"low": low - bound, "high": high - bound, "seeds": seeds}
        outcome = inference.row_outcome(expects, row, 0.0) if seeds else inference.NOT_RUN
        table.append((statement, f"{expects} {bound:g}", value, low, high, outcome))
    columns = ["statement", "expects", "value", "low", "high", "outcome"]
    return pd.DataFrame(table, columns=columns)
