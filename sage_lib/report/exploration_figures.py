"""Figures of the exploration metrics: measured tables in, a matplotlib Figure out."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from matplotlib_venn import venn2, venn3

from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import Profile
from sage_lib.report import sample_tables, tables
from sage_lib.report.figures import STYLE, WIDE, look, series


def figure7(profile: Profile, methods: Sequence[str]) -> Figure:
    """Figure 7: perplexity under the base model of each method's samples: its distribution, and how heavy the tail is."""
    frame = sample_tables.scores(profile)
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 2.5), sharey=False)
        for method in methods:
            values = np.sort(frame[frame["method"] == method]["perplexity"].dropna())
            style = {**look(profile, method), "marker": ""}
            left.plot(
                values,
                np.arange(1, len(values) + 1) / len(values),
                label=f"{tables.label(profile, method)} ({len(values):,})",
                **style,
            )
            right.plot(values, 1 - np.arange(len(values)) / len(values), **style)
        left.set(
            xlabel="perplexity under the base (eq. 39)",
            ylabel="share of samples below",
            xscale="log",
        )
        right.set(
            xlabel="perplexity under the base (eq. 39)",
            ylabel="share of samples above",
            xscale="log",
            yscale="log",
            title="the tail",
        )
        for axis in (left, right):  # perplexities span less than a decade or two
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
            axis.xaxis.set_major_formatter(ScalarFormatter())
            axis.xaxis.set_minor_formatter(NullFormatter())
        figure.suptitle(
            f"{profile.name}: {profile.evaluation.scored} samples a problem, {len(profile.seeds)} seed(s)",
            fontsize=8,
        )
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def exploration(profile: Profile, methods: Sequence[str]) -> Figure:
    """Figure 1 of the exploration report: pass@k, answer diversity, entropy and rollout branching factor; 95 % over problems."""
    frame, settings = tables.evaluations(profile), profile.evaluation
    votes, scores = (
        tables.means_with_intervals(profile, sample_tables.votes(profile), ["distinct"]),
        tables.means_with_intervals(
            profile, sample_tables.scores(profile), ["entropy", "branching"]
        ),
    )
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 4, figsize=(WIDE, 2.5))
        for method in methods:
            curves, sets = tables.curves(frame, method, settings.ks)
            low, high = metrics.bootstrap_interval(curves, settings.resamples, settings.seed, sets)
            axes[0].plot(
                settings.ks,
                metrics.mean_over_sets(curves, sets),
                label=tables.label(profile, method),
                **look(profile, method),
            )
            axes[0].fill_between(
                settings.ks,
                low,
                high,
                color=look(profile, method)["color"],
                alpha=0.12,
                linewidth=0,
            )
        axes[0].set_xscale("log", base=2)
        axes[0].set(xlabel="k", ylabel="pass@k", title="(a)")
        panels = (
            (votes, "distinct", f"distinct answers of {settings.samples}", "(b)"),
            (scores, "entropy", "token entropy (nats)", "(c)"),
            (scores, "branching", "branching factor, top 95 %", "(d)"),
        )
        for axis, (table, metric, name, title) in zip(axes[1:], panels, strict=True):
            for position, method in enumerate(methods):
                row = table[
                    (table["row"] == tables.label(profile, method)) & (table["metric"] == metric)
                ].iloc[0]
                axis.errorbar(
                    position,
                    row["mean"],
                    yerr=[[row["mean"] - row["low"]], [row["high"] - row["mean"]]],
                    capsize=2,
                    **{**look(profile, method), "linestyle": "none"},
                )
            axis.set(xticks=[], ylabel=name, title=title, xlim=(-0.7, len(methods) - 0.3))
            axis.margins(y=0.15)
        problems = frame.groupby(["dataset", "problem"]).ngroups
        figure.suptitle(
            f"{profile.name}: {problems} problems x {settings.samples} samples, {len(profile.seeds)} seed(s); bars and bands: 95 % over problems",
            fontsize=8,
        )
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def support(profile: Profile, methods: Sequence[str]) -> Figure:
    """Exact, on the embedded task: how many valid completions enter and leave supp_eps (Definition 4.1) against the base, by eps."""
    frame = tables.support(profile, epsilons=tuple(np.geomspace(0.001, 0.5, 28)))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(WIDE, 2.5))
        for method in methods:
            rows = frame[frame["row"] == tables.label(profile, method)]
            style = {**look(profile, method), "markevery": 6}
            axes[0].plot(
                rows["epsilon"], rows["size"], label=tables.label(profile, method), **style
            )
            if method != "base":
                axes[1].plot(rows["epsilon"], rows["entered"], **style)
                axes[2].plot(rows["epsilon"], rows["left"], **style)
        for axis, name in zip(
            axes,
            ("in the support", "entered, against the base", "left, against the base"),
            strict=True,
        ):
            axis.set(
                xscale="log", xlabel="eps", ylabel="valid completions", title=name, ylim=(0, None)
            )
        figure.suptitle(
            f"{profile.name}: exact, all {frame['of'].iloc[0]} valid completions of the held-out problems, mean over {len(profile.seeds)} seed(s)",
            fontsize=8,
        )
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def token_updates(profile: Profile) -> Figure:
    """Where the update falls by uncertainty (G_t, eq. 4 of the exploration report), and what a token is worth (eq. 6)."""
    updates, impact = tables.traced(profile, "updates"), tables.traced(profile, "impact")
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 2.6), width_ratios=[3, 2])
        left.bar(updates["group"], updates["share"], color="0.6", width=0.7)
        left.axhline(0.1, color="0.3", linewidth=0.8, linestyle=":")
        left.set(
            xticks=updates["group"],
            xticklabels=[f"{e:.2g}" for e in updates["entropy"]],
            xlabel="mean entropy of a tenth of the tokens (nats)",
            ylabel="share of the summed $G_t$",
            title=f"{updates['tokens'].sum():,} tokens, 1 seed; dotted: equal shares",
        )
        left.tick_params(axis="x", rotation=45)
        for i, (kind, group) in enumerate(impact.groupby("token", sort=False)):
            change = (group["kept"] - group["replaced"]).to_numpy()
            low, high = metrics.bootstrap_interval(
                change[:, None], profile.evaluation.resamples, profile.evaluation.seed
            )
            jitter = np.random.default_rng(0).uniform(-0.12, 0.12, len(change))
            right.plot(i + jitter, change, linestyle="none", marker=".", color="0.65", markersize=3)
            right.errorbar(
                i,
                change.mean(),
                yerr=[[max(change.mean() - low[0], 0)], [max(high[0] - change.mean(), 0)]],
                capsize=3,
                **{**series(i + 1), "linestyle": "none"},
            )
        right.axhline(0, color="0.3", linewidth=0.8)
        right.set(
            xticks=range(impact["token"].nunique()),
            xticklabels=impact["token"].unique(),
            xlim=(-0.5, 1.5),
            ylabel="impact $I_t$ of a token",
            title=f"{len(change)} completions x {impact['continuations'].iloc[0]}; bars: 95 %",
        )
    return figure


def unsolvable_venn(profile: Profile, methods: Sequence[str]) -> Figure:
    """Which problems two or three methods never solved, as a Venn diagram."""
    sets = tables.unsolvable(profile, methods)
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(WIDE / 2, 2.6))
        drawn = {2: venn2, 3: venn3}[len(sets)](
            list(sets.values()),
            [f"{name} ({len(s)})" for name, s in sets.items()],
            set_colors=[look(profile, m)["color"] for m in methods],
            ax=axis,
        )
        for text in (*drawn.set_labels, *drawn.subset_labels):
            if text is not None:
                text.set_fontsize(7)
        axis.set_title(_unsolvable_title(profile), pad=14)
    return figure


def unsolvable_upset(profile: Profile, methods: Sequence[str]) -> Figure:
    """Which problems any number of methods never solved: bars of those in exactly the methods marked below them, largest first."""
    sets = tables.unsolvable(profile, methods)
    regions = sorted(metrics.exclusive_regions(sets).items(), key=lambda region: -region[1])
    names = list(sets)
    with plt.rc_context(STYLE):
        figure, (bars, dots) = plt.subplots(
            2,
            1,
            figsize=(WIDE, 1.8 + 0.18 * len(names)),
            sharex=True,
            height_ratios=[1.4, 0.18 * len(names)],
        )
        x = np.arange(len(regions))
        bars.bar(x, [n for _, n in regions], color="0.3", width=0.6)
        for position, (_, n) in enumerate(regions):
            bars.annotate(str(n), (position, n), ha="center", va="bottom", fontsize=6.5)
        bars.set(ylabel="problems", title=_unsolvable_title(profile))
        for position, (members, _) in enumerate(regions):
            rows = [names.index(m) for m in members]
            dots.plot(
                [position] * len(names),
                range(len(names)),
                color="0.85",
                marker="o",
                linestyle="none",
                markersize=4,
            )
            dots.plot(
                [position] * len(rows), rows, color="0.1", marker="o", markersize=4, linewidth=1
            )
        dots.set(
            yticks=range(len(names)),
            yticklabels=[f"{name} ({len(sets[name])})" for name in names],
            xticks=[],
            xlabel="unsolved by exactly the marked methods",
            ylim=(len(names) - 0.5, -0.5),
        )
        dots.set_xlim(-0.6, max(len(regions), 1) - 0.4)
    return figure


def _unsolvable_title(profile: Profile) -> str:
    return f"{profile.name}: problems without one correct sample among {profile.evaluation.samples}, 1 seed"
