"""Entropy and performance (exploration report, Section 3): the law R = -a exp(H) + b, the stages of
a run, and which tokens change. Measured files in, tables out.

The unit of every interval here is the training seed: another one means other batches and other
completions. Runs of several methods with one seed share its batches, so that their mean counts
once. All runs of a profile start from one base.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import t

from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile
from sage_lib.policy.token_groups import KINDS, OTHER, TOP
from sage_lib.report import exact_tables, front_tables, measured
from sage_lib.report.front_tables import FEWEST_SEEDS

#: Steps of one point of a fit: of one step the reward is that of eight prompts.
BLOCK = 10
#: What stands for the performance R: reward of training, and exact pass@1 of held-out problems.
REWARD, EXACT = "training reward", "exact pass@1"
#: The row of all methods together.
ALL = "all"
POINTS = ["performance", "method", "seed", "step", "H", "R"]
FITS = [
    *("performance", "method", "seed", "points", "a", "b", "ceiling", "r2", "trend"),
    *("law_error", "mean_error"),
]
LAWS = [
    *("performance", "method", "runs", "points"),
    *("a", "a low", "a high", "b", "b low", "b high", "ceiling", "best", "r2"),
    *("law_error", "mean_error"),
]
STAGES = ["method", "seeds", "shape", "end", "gain", "per 100 steps", "bic", "bic, line"]
#: The two stages of a run, and what stands in for them where they are not found.
STAGE_NAMES, THIRD_NAMES = ("rising", "plateau"), ("first third", "last third")
#: Shapes of a reward over the steps.
LEVEL, STILL_RISING, STAGED = "level", "rises to the end", "rises, then level"


# --- the law --------------------------------------------------------------------------------------


def law(entropy: ArrayLike, performance: ArrayLike) -> tuple[float, float]:
    """a and b of R = -a exp(H) + b by least squares, which is linear in exp(H).

    NaN where all entropies are equal. Source: exploration report, Section 3.1 (Cui et al. 2025).
    """
    x, y = np.exp(np.asarray(entropy, dtype=float)), np.asarray(performance, dtype=float)
    centred = x - x.mean()
    if len(x) < 2 or not (centred**2).sum() > 0:
        return float("nan"), float("nan")
    slope = float((centred * y).sum() / (centred**2).sum())
    return -slope, float(y.mean() - slope * x.mean())


def points(profile: Profile) -> pd.DataFrame:
    """What the law is fitted to: columns :data:`POINTS`, of every RL run (no rounds of RFT or SFT).

    Training reward: means over blocks of :data:`BLOCK` steps. Exact pass@1: wherever it was logged,
    with the mean entropy of the :data:`BLOCK` steps before it (at the start: of the first ones).
    """
    log = measured.training(profile)
    if log.empty or "entropy" not in log:
        return pd.DataFrame(columns=POINTS)
    of_rl = [key for key, method in profile.methods.items() if method.rft is None]
    log = log[log["method"].isin(of_rl)]
    log = log.assign(block=(-(-log["step"] // BLOCK) * BLOCK).clip(upper=log["step"].max()))
    keys = ["method", "seed"]
    blocks = log.groupby([*keys, "block"], sort=False)[["entropy", "reward"]].mean().reset_index()
    blocks = blocks.rename(columns={"block": "step", "entropy": "H", "reward": "R"})
    blocks = blocks.dropna(subset=["H", "R"])
    exact = exact_tables.along_training(profile)[[*keys, "step", "pass@1"]]
    if exact.empty:
        return blocks.assign(performance=REWARD)[POINTS]
    first = blocks.groupby(keys, sort=False)["step"].transform("min")
    start = blocks[blocks["step"] == first].assign(step=0)
    of_exact = exact.merge(pd.concat([start, blocks])[[*keys, "step", "H"]], on=[*keys, "step"])
    of_exact = of_exact.rename(columns={"pass@1": "R"})
    both = [blocks.assign(performance=REWARD), of_exact.assign(performance=EXACT)]
    return pd.concat(both, ignore_index=True)[POINTS]


def fits(profile: Profile) -> pd.DataFrame:
    """The law of each run alone: columns :data:`FITS`.

    ceiling is b - a, the best performance there could be (H = 0); trend the correlation of the
    residuals with the step, 0 where the law holds all along; law_error and mean_error (root mean
    square) what the law, and the mean, of the first half predict of the second.
    """
    rows = []
    for (performance, method, seed), run in points(profile).groupby(
        ["performance", "method", "seed"], sort=False
    ):
        run = run.sort_values("step")
        h, r = run["H"].to_numpy(), run["R"].to_numpy()
        a, b = law(h, r)
        residuals = r - (b - a * np.exp(h))
        spread = ((r - r.mean()) ** 2).sum()
        rows.append(
            {
                "performance": performance,
                "method": method,
                "seed": seed,
                "points": len(run),
                "a": a,
                "b": b,
                "ceiling": b - a,
                "r2": 1 - (residuals**2).sum() / spread if spread > 0 else np.nan,
                "trend": _correlation(run["step"].to_numpy(dtype=float), residuals),
                **_second_half(h, r),
            }
        )
    return pd.DataFrame(rows, columns=FITS)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    if len(x) < 3 or not (np.std(x) > 0 and np.std(y) > 1e-12):
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _second_half(h: np.ndarray, r: np.ndarray) -> dict[str, float]:
    half = len(h) // 2
    if half < 3:
        return {"law_error": float("nan"), "mean_error": float("nan")}
    a, b = law(h[:half], r[:half])
    by_law = r[half:] - (b - a * np.exp(h[half:]))
    by_mean = r[half:] - r[:half].mean()
    return {
        "law_error": float(np.sqrt((by_law**2).mean())),
        "mean_error": float(np.sqrt((by_mean**2).mean())),
    }


def laws(profile: Profile) -> pd.DataFrame:
    """The law of all runs of a method, and of all methods, with 95 % intervals over seeds: columns
    :data:`LAWS`.

    One a and b for all points of the runs; the intervals are those of the jackknife that leaves out
    one seed at a time, with the t distribution (:func:`jackknife`): no fewer than
    :data:`FEWEST_SEEDS` seeds have one. best is the highest mean over runs that a step reached; the
    errors are means over runs of those of :func:`fits`.
    """
    table, single = points(profile), fits(profile)
    rows = []
    for performance, of_kind in table.groupby("performance", sort=False):
        methods = list(dict.fromkeys(of_kind["method"]))
        for method in [*methods, *([ALL] if len(methods) > 1 else [])]:
            chosen = of_kind if method == ALL else of_kind[of_kind["method"] == method]
            alone = single[single["performance"] == performance]
            alone = alone if method == ALL else alone[alone["method"] == method]
            by_seed = [one for _, one in chosen.groupby("seed", sort=False)]
            (a, b), low, high = jackknife(by_seed, lambda frame: law(frame["H"], frame["R"]))
            predicted = b - a * np.exp(chosen["H"])
            spread = ((chosen["R"] - chosen["R"].mean()) ** 2).sum()
            rows.append(
                {
                    "performance": performance,
                    "method": method,
                    "runs": chosen.groupby(["method", "seed"]).ngroups,
                    "points": len(chosen),
                    "a": a,
                    "a low": low[0],
                    "a high": high[0],
                    "b": b,
                    "b low": low[1],
                    "b high": high[1],
                    "ceiling": b - a,
                    "best": chosen.groupby("step")["R"].mean().max(),
                    "r2": 1 - ((chosen["R"] - predicted) ** 2).sum() / spread
                    if spread > 0
                    else np.nan,
                    "law_error": alone["law_error"].mean(),
                    "mean_error": alone["mean_error"].mean(),
                }
            )
    return pd.DataFrame(rows, columns=LAWS)


def bend(profile: Profile) -> str:
    """How far the reference method's entropies could tell exp(H) from a straight line, in a
    sentence; "" without its runs."""
    h = points(alone(profile))["H"].to_numpy()
    if len(h) < 2:
        return ""
    line = np.polynomial.Polynomial.fit(h, np.exp(h), 1)
    most = np.abs(np.exp(h) - line(h)).max() / np.ptp(np.exp(h))
    said = f"{profile.label(profile.reference)}: H from {h.min():.3f} to {h.max():.3f} nats, "
    return said + f"where exp(H) leaves a straight line by at most {most:.1%} of its range"


def jackknife(
    by_run: Sequence[pd.DataFrame], estimate: Callable[[pd.DataFrame], Sequence[float]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An estimate from the rows of all runs, and its 95 % interval over runs.

    Leaves out one run at a time (Efron and Stein 1981); the quantile is that of t with runs - 1
    degrees of freedom. NaN bounds of fewer than :data:`FEWEST_SEEDS` runs. Of a mean of runs with
    equally many rows this is the usual t interval.

    Returns:
        (value, low, high), each of shape (estimates,).
    """
    whole = np.asarray(estimate(pd.concat(by_run)), dtype=float)
    n = len(by_run)
    if n < FEWEST_SEEDS:
        nothing = np.full(whole.shape, np.nan)
        return whole, nothing, nothing
    without = np.array([estimate(pd.concat([*by_run[:i], *by_run[i + 1 :]])) for i in range(n)])
    error = np.sqrt((n - 1) / n * ((without - without.mean(axis=0)) ** 2).sum(axis=0))
    half = t.ppf(0.975, n - 1) * error
    return whole, whole - half, whole + half


def at_fixed_weights(profile: Profile) -> pd.DataFrame:
    """The law over prompts at the base's fixed weights, where nothing is learned: columns prompts,
    a, b, a_error.

    A batch of hard prompts has a lower reward *and* a higher entropy; so has every batch of every
    step. A slope in training that is no steeper than this one tells of the prompts, not of
    learning. Empty without the stage dynamics.
    """
    frames = measured.explored(profile, "dynamics", "prompts")
    if frames.empty:
        return pd.DataFrame(columns=["prompts", "a", "b", "a_error"])
    one = frames[frames["source"] == "base"]
    first = one[(one["method"] == one["method"].iloc[0]) & (one["seed"] == one["seed"].iloc[0])]
    a, b = law(first["entropy"], first["correct"])
    x = np.exp(first["entropy"])
    residuals = first["correct"] - (b - a * x)
    variance = (residuals**2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum()
    row = {"prompts": len(x), "a": a, "b": b, "a_error": float(np.sqrt(variance))}
    return pd.DataFrame([row])


# --- the stages of a run --------------------------------------------------------------------------


@dataclass(frozen=True)
class Hinge:
    """A line that rises up to ``end`` and is level from there."""

    start: float  # value at step 0
    slope: float  # a step
    end: float
    bic: float  # of a constant minus of the hinge: above 0 speaks for the hinge
    line: float  # of a straight line minus of the hinge: above 0 speaks for a plateau

    @property
    def shape(self) -> str:
        if not (self.slope > 0 and self.bic > 0):
            return LEVEL
        return STAGED if self.line > 0 else STILL_RISING


def hinge(steps: ArrayLike, values: ArrayLike) -> Hinge:
    """The best R = c + s min(step, end) by least squares, ``end`` among the steps up to four fifths
    of the last one, so that a plateau can be seen.

    ``bic`` compares it (three parameters and the variance) with a constant, ``line`` with a
    straight line, for normal errors.
    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    n = len(x)
    flat = ((y - y.mean()) ** 2).sum()
    best: tuple[float, float, float, float] | None = None
    for end in [step for step in np.sort(x)[1:] if step <= 0.8 * x.max()]:
        design = np.stack([np.ones(n), np.minimum(x, end)], axis=1)
        (c, s), *_ = np.linalg.lstsq(design, y, rcond=None)
        left = ((y - design @ [c, s]) ** 2).sum()
        if best is None or left < best[0]:
            best = left, c, s, end
    if best is None:
        return Hinge(float(y.mean()), 0.0, float("nan"), float("-inf"), float("-inf"))
    left, c, s, end = best
    design = np.stack([np.ones(n), x], axis=1)
    straight = ((y - design @ np.linalg.lstsq(design, y, rcond=None)[0]) ** 2).sum()
    over_constant, over_line = (
        float(n * np.log(max(other, 1e-300) / max(left, 1e-300)) - more * np.log(n))
        for other, more in ((flat, 2), (straight, 1))
    )
    return Hinge(float(c), float(s), float(end), over_constant, over_line)


def stages(profile: Profile) -> pd.DataFrame:
    """Where each method's rising stage ends: columns :data:`STAGES`.

    The rule, of the training reward in blocks, mean over seeds: a hinge (:func:`hinge`) that rises
    and that BIC prefers to a constant and to a straight line; the rising stage ends at its kink
    (``end``, a step), the plateau follows. Where the straight line is as good no plateau is seen,
    and where the constant is, no rise: end is empty then. bic and "bic, line" are these
    differences, gain what the hinge rises by.
    """
    return _stages(points(profile))


def _stages(table: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for method, group in table[table["performance"] == REWARD].groupby("method", sort=False):
        curve = group.groupby("step")["R"].mean()
        fit = hinge(curve.index, curve)
        rows.append(
            {
                "method": method,
                "seeds": group["seed"].nunique(),
                "shape": fit.shape,
                "end": fit.end if fit.shape == STAGED else np.nan,
                "gain": fit.slope * fit.end,
                "per 100 steps": 100 * fit.slope,
                "bic": fit.bic,
                "bic, line": fit.line,
            }
        )
    return pd.DataFrame(rows, columns=STAGES)


def alone(profile: Profile) -> Profile:
    """The profile with its reference method alone: the logs of others need not be read."""
    chosen = {key: one for key, one in profile.methods.items() if key == profile.reference}
    return dataclasses.replace(profile, methods=chosen)


def halves(profile: Profile) -> tuple[float, float, bool]:
    """(end of the rising stage, start of the plateau, found) of the reference method, in steps.

    Where these two stages are not found: the ends of the first and of the second third.
    """
    found = points(alone(profile))
    table = _stages(found).set_index("method")
    last = float(found["step"].max())
    if profile.reference in table.index and table.loc[profile.reference, "shape"] == STAGED:
        end = float(table.loc[profile.reference, "end"])
        return end, end, True
    return last / 3, 2 * last / 3, False


# --- tokens ---------------------------------------------------------------------------------------


def read(profile: Profile) -> pd.DataFrame:
    """Tokens of the policies' own completions, base against policy (stage dynamics); empty where
    nothing is there."""
    frame = measured.explored(profile, "dynamics", "tokens")
    return frame if frame.empty else frame[frame["source"] == "policy"]


def updates(profile: Profile, stage: str = "") -> pd.DataFrame:
    """Tokens before and after each update (stage replay): of all, or of the stage "rising" or
    "plateau" of :func:`halves`; empty where nothing is there."""
    frame = measured.explored(profile, "replay", "moves")
    if frame.empty or not stage:
        return frame
    end, start, _ = halves(profile)
    return frame[frame["step"] <= end] if stage == "rising" else frame[frame["step"] > start]


def weighed(frame: pd.DataFrame, by: str, columns: Sequence[str]) -> pd.DataFrame:
    """Means over tokens of the groups of one kind: a row for each method, seed and group, with the
    number of tokens and their ``share`` of the run's."""
    chosen = frame[frame["by"] == by]
    keys = ["method", "seed", "group"]
    sums = chosen[list(columns)].mul(chosen["tokens"], axis=0)
    totals = (
        sums.assign(tokens=chosen["tokens"])
        .groupby([chosen[key] for key in keys], sort=False)
        .sum()
    )
    means = totals[list(columns)].div(totals["tokens"], axis=0).assign(tokens=totals["tokens"])
    whole = means["tokens"].groupby(level=["method", "seed"], sort=False).transform("sum")
    return means.assign(share=means["tokens"] / whole).reset_index()


def by_kind(profile: Profile) -> pd.DataFrame:
    """Which tokens lost entropy: a row for each kind of token.

    Columns kind, share (of all tokens), fallen (of those with the largest :data:`TOP` falls, the
    share that is of this kind), before and after (mean entropy under base and policy, nats), seeds;
    means over runs, and bounds "fallen low" and "fallen high" over seeds.
    """
    frame = read(profile)
    columns = ["kind", "share", "fallen", "fallen low", "fallen high", "before", "after", "seeds"]
    if frame.empty:
        return pd.DataFrame(columns=columns)
    table = weighed(frame, "kind", ["fallen", "before", "after"])
    table["fallen"] *= table["share"] / TOP
    rows = []
    for kind in [name for name in (*KINDS, OTHER) if name in set(table["group"])]:
        of_kind = by_seed(table[table["group"] == kind], ["fallen", "share", "before", "after"])
        mean, low, high = over_seeds(of_kind["fallen"])
        means = of_kind[["share", "before", "after"]].mean()
        bounds = {"fallen": mean, "fallen low": low, "fallen high": high}
        rows.append({"kind": kind, **means, **bounds, "seeds": len(of_kind)})
    return pd.DataFrame(rows, columns=columns)


def by_part(profile: Profile) -> pd.DataFrame:
    """Entropy by tenth of a completion: columns part, sign, base, policy (mean entropy, nats), low
    and high (of the policy's, over seeds), seeds."""
    frame = read(profile)
    columns = ["part", "sign", "base", "policy", "low", "high", "seeds"]
    if frame.empty:
        return pd.DataFrame(columns=columns)
    rows = []
    chosen = frame[frame["by"] == "position"]
    for (sign, part), group in chosen.groupby(["sign", chosen["group"].astype(int)]):
        of_part = by_seed(group, ["before", "after"])
        mean, low, high = over_seeds(of_part["after"])
        base = of_part["before"].mean()
        rows.append((part, sign, base, mean, low, high, len(of_part)))
    return pd.DataFrame(rows, columns=columns)


def by_uncertainty(profile: Profile) -> pd.DataFrame:
    """Where updates fall: a row for each stage and tenth of the tokens by entropy, least first.

    Columns stage (of :func:`halves`), tenth, entropy (nats), moved (share of tokens that an update
    moves by more than 0.06), shift and gradient (shares of the sums of |change of probability| and
    of G_t), seeds; means over seeds, with "shift low" and "shift high".
    """
    columns = ["stage", "tenth", "entropy", "moved", "shift", "shift low", "shift high"]
    columns += ["gradient", "seeds"]
    rows = []
    names = STAGE_NAMES if halves(profile)[2] else THIRD_NAMES
    for stage, name_of_stage in zip(STAGE_NAMES, names, strict=True):
        frame = updates(profile, stage)
        if frame.empty:
            continue
        table = weighed(frame, "entropy", ["before", "moved", "shift", "gradient"])
        for name in ("shift", "gradient"):
            sums = table[name] * table["tokens"]
            table[name] = sums / sums.groupby([table["method"], table["seed"]]).transform("sum")
        for tenth, group in table.groupby(table["group"].astype(int)):
            mean, low, high = over_seeds(group["shift"])
            means = group[["before", "moved", "gradient"]].mean()
            row = {"stage": name_of_stage, "tenth": tenth, "entropy": means["before"]}
            row |= {"moved": means["moved"], "gradient": means["gradient"], "seeds": len(group)}
            rows.append({**row, "shift": mean, "shift low": low, "shift high": high})
    return pd.DataFrame(rows, columns=columns)


def along(profile: Profile) -> pd.DataFrame:
    """What the updates of a run did, by step: columns method, seed, step, positive and negative
    (mean entropy of such samples before the update, nats), moved (share of tokens)."""
    columns = ["method", "seed", "step", "positive", "negative", "moved"]
    frame = updates(profile)
    if frame.empty:
        return pd.DataFrame(columns=columns)
    every = frame[frame["by"] == "all"]
    keys = ["method", "seed", "step"]
    entropy = every.pivot_table(index=keys, columns="sign", values="before", sort=False)
    moved = (every["moved"] * every["tokens"]).groupby([every[key] for key in keys]).sum()
    moved /= every["tokens"].groupby([every[key] for key in keys]).sum()
    signs = entropy.reindex(columns=["positive", "negative"])
    return signs.assign(moved=moved).reset_index()[columns]


def by_seed(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The mean of each seed over its methods, which share its batches."""
    return frame.groupby("seed", sort=False)[list(columns)].mean()


def over_seeds(values: ArrayLike) -> tuple[float, float, float]:
    """Mean and 95 % t interval over seeds; NaN bounds of fewer than :data:`FEWEST_SEEDS`."""
    found = np.asarray(values, dtype=float)
    found = found[~np.isnan(found)]
    n = len(found)
    if n == 0:
        return float("nan"), float("nan"), float("nan")
    mean = float(found.mean())
    if n < FEWEST_SEEDS:
        return mean, float("nan"), float("nan")
    return (mean, *front_tables.over_seeds([*found]))


def missing(profile: Profile) -> str:
    """One sentence on what is not published (yet), or not made; "" where all is there."""
    lacking = [
        stage
        for stage, found in (
            ("dynamics", runs.dynamics_runs(profile)),
            ("replay", runs.replay_runs(profile)),
        )
        if not any(run.record.is_file() for run in found)
    ]
    if not lacking:
        return ""
    whose = "published" if profile.published else "made"
    return (
        f"Nothing is {whose} yet of {' and '.join(lacking)}, which needs trained policies: "
        f"sage-companion stage {lacking[0]} --profile {profile.spec} makes it."
    )
