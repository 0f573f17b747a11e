"""Figures of entropy and performance (notebook 14) and of replaced tokens (15): tables in, a
matplotlib Figure out."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_lib.experiment.profile import Profile
from sage_lib.policy.token_groups import MOVED
from sage_lib.report import entropy_tables, impact_tables
from sage_lib.report.measured import drawn, named
from sage_lib.report.panels import intervals
from sage_lib.report.style import (
    COLOURS,
    STYLE,
    WIDE,
    band,
    count,
    describe,
    error_bar,
    line,
    look,
    points,
    sentence,
    series,
    steps,
)

#: What a panel says of a stage that has not run.
NOTHING = "nothing measured yet:\nsage-companion stage {}"
SIGNS = {"positive": series(6), "negative": series(1)}


def law(profile: Profile) -> Figure:
    """R against H with the fitted law, its residuals by step, and a of the reference's family.

    Left and middle the runs of the reference method; right 95 % intervals over runs, and a at fixed
    weights with its 95 % interval over prompts.
    """
    table, laws = entropy_tables.points(profile), entropy_tables.laws(profile)
    rewards = table[table["performance"] == entropy_tables.REWARD]
    family, others = drawn(profile, list(profile.methods)) if profile.methods else ((), "")
    shown = laws[laws["performance"] == entropy_tables.REWARD].set_index("method")
    shown = shown.loc[[method for method in family if method in shown.index]].reset_index()
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(
            1, 3, figsize=(WIDE, max(2.5, 1.0 + 0.14 * len(shown))), width_ratios=[1.3, 1, 1]
        )
        chosen = rewards[rewards["method"] == profile.reference]
        if chosen.empty:
            for axis in (left, middle, right):
                sentence(axis, f"{profile.name}: no RL run")
            return figure
        _fit(left, chosen)
        _residuals(middle, chosen)
        bounded = shown.assign(**{k: shown[k].fillna(shown["a"]) for k in ("a low", "a high")})
        intervals(right, profile, bounded, ("a", "a low", "a high"))
        right.axvline(0, color="0.3", linewidth=0.8)
        fixed = entropy_tables.at_fixed_weights(profile)
        if len(fixed):
            a, error = fixed.loc[0, ["a", "a_error"]]
            right.axvspan(a - 1.96 * error, a + 1.96 * error, color="0.9", zorder=0)
            right.axvline(a, color="0.3", linewidth=0.8, linestyle=":")
        right.set(xlabel="a (reward)", title="a by method; dotted:\nover prompts, fixed weights")
        seeds = count(chosen["seed"].nunique(), "seed")
        clear = int(((shown["a low"] > 0) | (shown["a high"] < 0)).sum())
        measured = int(shown["a low"].notna().sum())
        describe(
            figure,
            f"R = -a exp(H) + b: the interval of a leaves out 0 for {clear} of {measured} methods"
            if measured
            else "R = -a exp(H) + b, of too few runs for an interval of a",
            f"{profile.name}. Left and middle {profile.label(profile.reference)}, {seeds}, points: "
            f"means of {count(entropy_tables.BLOCK, 'step')}",
            "bars: 95 % over runs (none below 3)",
            others,
        )
    return figure


def _fit(axis: Axes, table: pd.DataFrame) -> None:
    steps = table["step"].max()
    shown = axis.scatter(
        table["H"], table["R"], c=table["step"] / steps, cmap="cividis", s=7, linewidth=0
    )
    axis.figure.colorbar(shown, ax=axis, label="part of the run", ticks=[0, 0.5, 1], pad=0.02)
    grid = np.linspace(table["H"].min(), table["H"].max(), 50)
    for _, run in table.groupby("seed"):
        a, b = entropy_tables.law(run["H"], run["R"])
        axis.plot(grid, b - a * np.exp(grid), color="0.6", linewidth=0.8)
    a, b = entropy_tables.law(table["H"], table["R"])
    axis.plot(grid, b - a * np.exp(grid), color="0.1", linewidth=1.8)
    axis.set(
        xlabel="entropy H (nats)",
        ylabel="training reward R",
        title=f"R = {-a:.1f} exp(H) {'-' if b < 0 else '+'} {abs(b):.1f}\n(grey: single runs)",
    )


def _residuals(axis: Axes, table: pd.DataFrame) -> None:
    a, b = entropy_tables.law(table["H"], table["R"])
    left = table.assign(residual=table["R"] - (b - a * np.exp(table["H"])))
    axis.plot(left["step"], left["residual"], linestyle="none", marker=".", color="0.7")
    means = left.groupby("step")["residual"].mean()
    axis.plot(means.index, means, color="0.1")
    axis.axhline(0, color="0.3", linewidth=0.8)
    axis.set(ylabel="R minus the law", title="residuals\n(line: mean over runs)")
    steps(axis)


def stages(profile: Profile) -> Figure:
    """A run's stages: its reward with the rule's hinge, the entropy of positive and of negative
    samples, and the share of tokens that an update moves by more than 0.06."""
    table = entropy_tables.points(entropy_tables.alone(profile))
    along = entropy_tables.along(profile)
    rewards = table[table["performance"] == entropy_tables.REWARD]
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(WIDE, 2.7))
        curve = rewards.groupby("step")["R"].mean()
        left.plot(curve.index, curve, **{**look(profile.reference), "marker": "."})
        fit = entropy_tables.hinge(curve.index, curve)
        grid = np.array([0.0, fit.end, curve.index.max()])
        left.plot(
            grid, fit.start + fit.slope * np.minimum(grid, fit.end), color="0.1", linestyle="--"
        )
        said = {
            entropy_tables.STAGED: f"A rising stage to step {fit.end:.0f}, then a plateau",
            entropy_tables.STILL_RISING: "The reward rises to the end: no plateau by BIC",
            entropy_tables.LEVEL: "No rising stage by BIC",
        }[fit.shape]
        left.set(ylabel="training reward", title="reward, and the rule's hinge")
        steps(left)
        for axis in (middle, right) if along.empty else ():
            sentence(axis, NOTHING.format("replay"))
        if not along.empty:
            _signs(middle, along)
            moved = along.groupby("step")["moved"].mean()
            for _, run in along.groupby(["method", "seed"]):
                right.plot(run["step"], 100 * run["moved"], color="0.75", linewidth=0.8)
            right.plot(moved.index, 100 * moved, color="0.1")
            right.axhline(1, color="0.3", linewidth=0.8, linestyle=":")
            right.set(
                ylabel=f"tokens moved by > {MOVED} (%)",
                ylim=(0, None),
                title="an update\n(dotted: the report's 1 %)",
            )
            steps(right)
        replayed = count(along[["method", "seed"]].drop_duplicates().shape[0], "replayed run")
        seeds = count(rewards["seed"].nunique(), "seed")
        describe(
            figure,
            said,
            f"{profile.name}. {profile.label(profile.reference)}, {seeds}, dashed: the hinge",
            f"middle and right: {replayed}, thin lines: each of them",
        )
    return figure


def _signs(axis: Axes, along: pd.DataFrame) -> None:
    for sign, chosen in SIGNS.items():
        for _, run in along.groupby(["method", "seed"]):
            axis.plot(run["step"], run[sign], **{**line(chosen), "linewidth": 0.5, "alpha": 0.6})
        means = along.groupby("step")[sign].mean()
        axis.plot(means.index, means, label=sign, markevery=0.2, **chosen)
    axis.set(ylabel="entropy (nats)", ylim=(0, None), title="entropy of samples")
    steps(axis)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def tokens(profile: Profile) -> Figure:
    """Which tokens lost entropy, where updates fall by entropy, and entropy by position."""
    kinds, falls = entropy_tables.by_kind(profile), entropy_tables.by_uncertainty(profile)
    parts = entropy_tables.by_part(profile)
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(WIDE, 3.0))
        if kinds.empty:
            sentence(left, NOTHING.format("dynamics"))
            sentence(right, NOTHING.format("dynamics"))
        else:
            _kinds(left, kinds)
            _parts(right, parts)
        if falls.empty:
            sentence(middle, NOTHING.format("replay"))
        else:
            _falls(middle, falls)
        policies = entropy_tables.read(profile)
        methods = [] if policies.empty else list(policies["method"].unique())
        seeds = 0 if kinds.empty else int(kinds["seeds"].max())
        replayed = 0 if falls.empty else int(falls["seeds"].max())
        title = "Which tokens lose entropy, and where updates fall"
        if not falls.empty:
            last = falls[falls["tenth"] == falls["tenth"].max()]
            title = (
                f"{100 * last['shift'].mean():.0f} % of an update falls on the most uncertain tenth"
            )
        describe(
            figure,
            title,
            f"{profile.name}. Left and right {named(profile, methods)}, {count(seeds, 'seed')}, a "
            f"seed's methods averaged; middle {count(replayed, 'run')} of "
            f"{profile.label(profile.reference)} replayed",
            "bars and bands: 95 % over seeds (none below 3)",
        )
    return figure


def _kinds(axis: Axes, kinds: pd.DataFrame) -> None:
    for place, row in enumerate(kinds.to_dict("records")):
        bounds = [
            row[k] if row[k] == row[k] else row["fallen"] for k in ("fallen low", "fallen high")
        ]
        axis.barh(
            place - 0.2, row["share"], height=0.36, color="0.8", edgecolor="0.3", linewidth=0.5
        )
        axis.barh(place + 0.2, row["fallen"], height=0.36, color="0.35")
        low, high = bounds
        error_bar(
            axis, place + 0.2, row["fallen"], low, high, horizontal=True, color="0.1", marker=""
        )
    axis.set_yticks(range(len(kinds)), [k.replace(" or ", "\nor ") for k in kinds["kind"]])
    axis.invert_yaxis()
    axis.set(
        xlabel="share of tokens",
        title="dark: the fifth that lost\nmost entropy; light: all",
    )


def _falls(axis: Axes, falls: pd.DataFrame) -> None:
    for i, (stage, group) in enumerate(falls.groupby("stage", sort=False)):
        chosen = series(2 * i + 1)
        x = group["tenth"]
        axis.plot(x, group["shift"], label=f"change of p, {stage}", **chosen)
        band(axis, x, group["shift low"], group["shift high"], **chosen)
    last = falls[falls["stage"] == falls["stage"].iloc[-1]]
    axis.plot(last["tenth"], last["gradient"], label="$G_t$", **series(8))
    axis.axhline(0.1, color="0.3", linewidth=0.8, linestyle=":")
    axis.set(
        xticks=range(1, 11),
        xlabel="tenth of the tokens by entropy",
        ylabel="share of the sum (log)",
        yscale="log",
        title="where an update falls\n(dotted: equal shares)",
    )
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=6)


def _parts(axis: Axes, parts: pd.DataFrame) -> None:
    for sign, chosen in SIGNS.items():
        group = parts[parts["sign"] == sign]
        axis.plot(group["part"], group["policy"], label=f"{sign}, policy", **chosen)
        band(axis, group["part"], group["low"], group["high"], **chosen)
        hollow = {**chosen, "linestyle": ":", "markerfacecolor": "white", "linewidth": 0.8}
        axis.plot(group["part"], group["base"], label=f"{sign}, base", **hollow)
    axis.set(
        xticks=range(1, 11),
        xlabel="tenth of a completion",
        ylabel="entropy (nats)",
        yscale="log",
        title="entropy by position\n(log scale)",
    )
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=6, ncols=2)


def impact(profile: Profile) -> Figure:
    """Impact of replaced tokens: left by position and perplexity, right what most of them do.

    Bars are 95 % over runs; grey points are single runs.
    """
    table, single = impact_tables.impacts(profile), impact_tables.by_run(profile)
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 2.6), width_ratios=[3, 2])
        if table.empty:
            for axis in (left, right):
                sentence(axis, NOTHING.format("impact"))
            return figure
        names = [name for name in impact_tables.TOKENS if name in set(table["token"])]
        for i, group in enumerate(impact_tables.GROUPS):
            chosen = series((1, 6)[i])
            for place, name in enumerate(names):
                at = place + (i - 0.5) * 0.3
                of_runs = single[(single["token"] == name) & (single["perplexity_group"] == group)]
                jitter = at + np.linspace(-0.06, 0.06, max(len(of_runs), 1))[: len(of_runs)]
                left.plot(jitter, of_runs["impact"], linestyle="none", marker=".", color="0.7")
                row = table[(table["token"] == name) & (table["perplexity"] == group)].iloc[0]
                low, high = (row[k] if row[k] == row[k] else row["impact"] for k in ("low", "high"))
                error_bar(left, at, row["impact"], low, high, **chosen)
            left.plot([], [], label=f"{group} perplexity", **points(chosen))
        left.axhline(0, color="0.3", linewidth=0.8)
        left.set_xticks(range(len(names)), names)
        left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=2)
        left.set(ylabel="mean impact $I_t$", xlim=(-0.5, len(names) - 0.5))
        left.set_title("kept minus replaced, share of correct continuations")
        _distribution(right, impact_tables.replaced(profile))
        runs_, tokens_ = int(table["seeds"].max()), int(table["completions"].sum())
        clear = table[(table["low"] > 0) | (table["high"] < 0)]
        describe(
            figure,
            f"Impact of a replaced token: {len(clear)} of {len(table)} means are clear of 0"
            if table["low"].notna().any()
            else f"Impact of a replaced token in {count(runs_, 'run')}, too few for an interval",
            f"{profile.name}. {profile.label(profile.reference)}, {count(runs_, 'run')}, "
            f"{count(tokens_, 'token')} replaced",
            f"2 x {count(profile.exploration.continuations, 'continuation')} each",
            "bars: 95 % over runs (none below 3), grey: single runs",
        )
    return figure


def _distribution(axis: Axes, frame: pd.DataFrame) -> None:
    for i, name in enumerate(("early", "late")):
        values = np.sort(frame[frame["token"] == name]["impact"])
        share = np.arange(1, len(values) + 1) / len(values)
        axis.step(values, share, where="post", label=name, **line(series((2, 4)[i])))
    axis.set(
        xlabel="impact $I_t$ of a token",
        ylabel="share of tokens below",
        xlim=(-1.02, 1.02),
        ylim=(0, 1.02),
        title="early and late tokens",
    )
    axis.axvline(0, color=COLOURS["grey"], linewidth=0.8)
    axis.legend(loc="upper left")
