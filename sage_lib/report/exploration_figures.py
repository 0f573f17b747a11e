"""Figures of the exploration metrics: measured tables in, a matplotlib Figure out."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter
from matplotlib_venn import venn2, venn3

from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import Profile
from sage_lib.report import countdown_tables, measured, result_tables, sample_tables
from sage_lib.report.panels import intervals, lines_of, panel_rows, seeds
from sage_lib.report.result_figures import pass_at_k
from sage_lib.report.style import STYLE, WIDE, error_bar, look, sentence, series

#: The smallest value of these two that a completion can have.
LEAST = {"entropy": 0.0, "branching": 1.0}


def figure7(profile: Profile, methods: Sequence[str]) -> Figure:
    """Figure 7: perplexity under the base model of each method's samples.

    Left its distribution, right how heavy the tail is; a part for each family of methods.
    """
    frame = measured.scores(profile).dropna(subset=["perplexity"])
    sizes = sorted(set(frame.groupby("method").size()))
    with plt.rc_context(STYLE):
        figure, rows = panel_rows(profile, methods, [1, 1])
        for group, axes in rows:
            left, right = axes[0]
            for method, chosen in lines_of(group):
                values = np.sort(frame[frame["method"] == method]["perplexity"])
                rank = np.arange(len(values))
                left.plot(values, (rank + 1) / len(values), markevery=0.2, **chosen)
                right.plot(values, 1 - rank / len(values), markevery=0.2, **chosen)
            left.set(ylabel="share of samples below", xscale="log")
            right.set(ylabel="share of samples above", xscale="log", yscale="log")
            for axis in (left, right):
                axis.set_xlabel("perplexity under the base (eq. 39)")
                # Perplexities span less than a decade or two.
                axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
                axis.xaxis.set_major_formatter(ScalarFormatter())
                axis.xaxis.set_minor_formatter(NullFormatter())
        figure.suptitle(
            f"{profile.name}: {profile.evaluation.scored} samples a problem, "
            f"{seeds(profile)}; {' or '.join(map(str, sizes))} samples a method"
        )
    return figure


def exploration(profile: Profile, methods: Sequence[str]) -> Figure:
    """Figure 1 of the exploration report, a part for each family of methods.

    (a) pass@k, (b) answer diversity, (c) token entropy, (d) rollout branching factor; means over
    data sets with 95 % intervals over problems.
    """
    frame = measured.evaluations(profile)
    votes, scores = sample_tables.votes(profile), measured.scores(profile)
    samples = profile.evaluation.samples
    # Neither has a largest value worth the name: the largest that any method's samples show.
    ranges = {name: (least, scores[name].max()) for name, least in LEAST.items()}
    table = pd.concat(
        [
            result_tables.means_with_intervals(profile, votes, {"distinct": (0, samples)}),
            result_tables.means_with_intervals(profile, scores, ranges),
        ]
    )
    panels = {
        "distinct": f"(b) distinct\nanswers of {samples}",
        "entropy": "(c) token\nentropy (nats)",
        "branching": "(d) branching\nfactor, top 95 %",
    }
    with plt.rc_context(STYLE):
        figure, rows = panel_rows(profile, methods, [1.6, 1, 1, 1], legend=False)
        for group, axes in rows:
            curves, *others = axes[0]
            pass_at_k(curves, profile, frame, group)
            curves.set(ylabel="pass@k", title="(a)")
            for axis, (metric, name) in zip(others, panels.items(), strict=True):
                chosen = table[table["method"].isin(group) & (table["metric"] == metric)]
                intervals(axis, profile, chosen)
                axis.set_title(name)
            for axis in others[1:]:
                axis.tick_params(labelleft=False)
        problems = frame.groupby(["dataset", "problem"]).ngroups
        figure.suptitle(
            f"{profile.name}: {problems} problems x {samples} samples, "
            f"{seeds(profile)}; bars and bands: 95 % over problems"
        )
    return figure


def support(profile: Profile, methods: Sequence[str]) -> Figure:
    """How many valid completions of countdown enter and leave the support of the base, by eps.

    Exact: supp_eps (Definition 4.1) holds the completions with a probability above eps.
    """
    frame = countdown_tables.support(profile, epsilons=tuple(np.geomspace(0.001, 0.5, 28)))
    panels = {
        "size": "in the support",
        "entered": "entered, against the base",
        "left": "left, against the base",
    }
    with plt.rc_context(STYLE):
        figure, rows = panel_rows(profile, methods, [1, 1, 1])
        for group, axes in rows:
            for axis, (column, name) in zip(axes[0], panels.items(), strict=True):
                for method, chosen in lines_of(group):
                    if method == "base" and column != "size":
                        continue  # nothing enters or leaves the base's own support
                    found = frame[frame["method"] == method]
                    axis.plot(found["epsilon"], found[column], markevery=6, **chosen)
                axis.set(xscale="log", xlabel="eps", title=name, ylim=(0, None))
            axes[0, 0].set_ylabel("valid completions")
        figure.suptitle(
            f"{profile.name}: exact, all {frame['of'].iloc[0]} valid completions of the held-out "
            f"problems, mean over {seeds(profile)}"
        )
    return figure


def token_updates(profile: Profile) -> Figure:
    """Where the update falls by uncertainty, and what a token is worth.

    Left G_t (eq. 4 of the exploration report), right the impact I_t (eq. 6), bars 95 % over
    completions.
    """
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 2.6), width_ratios=[3, 2])
        _update_shares(left, measured.traced(profile, "updates"))
        _impacts(right, measured.traced(profile, "impact"), profile)
    return figure


def _update_shares(axis: Axes, updates: pd.DataFrame) -> None:
    axis.bar(updates["group"], updates["share"], color="0.6", width=0.7)
    axis.axhline(1 / len(updates), color="0.3", linewidth=0.8, linestyle=":")
    axis.set(
        xticks=updates["group"],
        xticklabels=[f"{entropy:.2g}" for entropy in updates["entropy"]],
        xlabel="mean entropy of a tenth of the tokens (nats)",
        ylabel="share of the summed $G_t$",
        title=f"{updates['tokens'].sum():,} tokens, 1 seed; dotted: equal shares",
    )
    axis.tick_params(axis="x", rotation=45)


def _impacts(axis: Axes, impact: pd.DataFrame, profile: Profile) -> None:
    settings = profile.evaluation
    kinds = list(impact["token"].unique())
    for i, kind in enumerate(kinds):
        group = impact[impact["token"] == kind]
        change = (group["kept"] - group["replaced"]).to_numpy()
        found = metrics.bootstrap_interval(
            change, settings.resamples, settings.seed, bounds=(-1.0, 1.0)
        )
        low, high = (float(bound[0]) for bound in found)
        jitter = np.random.default_rng(0).uniform(-0.12, 0.12, len(change))
        axis.plot(i + jitter, change, linestyle="none", marker=".", color="0.65", markersize=3)
        error_bar(axis, i, float(change.mean()), low, high, **series(i + 1))
    completions, continuations = len(impact) // len(kinds), impact["continuations"].iloc[0]
    axis.axhline(0, color="0.3", linewidth=0.8)
    axis.set(
        xticks=range(len(kinds)),
        xticklabels=kinds,
        xlim=(-0.5, len(kinds) - 0.5),
        ylabel="impact $I_t$ of a token",
        title=f"{completions} completions x {continuations}; bars: 95 %",
    )


def unsolvable_venn(profile: Profile, methods: Sequence[str]) -> Figure:
    """Which problems up to three methods never solved: a Venn diagram; of more, an UpSet plot."""
    if len(methods) > 3:
        return unsolvable_upset(profile, methods)
    sets = result_tables.unsolvable(profile, methods)
    names = [f"{profile.label(method)} ({len(sets[method])})" for method in methods]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(WIDE / 2, 2.6))
        colours = [look(method)["color"] for method in methods]
        if not any(sets.values()):
            sentence(axis, "every problem was solved by\n" + "\n".join(names))
        elif len(methods) == 1:
            axis.add_patch(Circle((0, 0), 1, color=colours[0], alpha=0.4))
            axis.text(0, 0, names[0], ha="center", va="center")
            axis.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
            axis.set_axis_off()
        else:
            draw = {2: venn2, 3: venn3}[len(methods)]
            drawn = draw([sets[m] for m in methods], names, set_colors=colours, ax=axis)
            for text in filter(None, (*drawn.set_labels, *drawn.subset_labels)):
                text.set_fontsize(7)
                text.set_visible(text.get_text() != "0")
        axis.set_title(_unsolvable_title(profile), pad=14)
    return figure


def unsolvable_upset(profile: Profile, methods: Sequence[str]) -> Figure:
    """Which problems any number of methods never solved, as an UpSet plot."""
    sets = result_tables.unsolvable(profile, methods)
    return upset(
        profile, sets, _unsolvable_title(profile), "unsolved by exactly the marked methods"
    )


def upset(profile: Profile, sets: Mapping[str, set[str]], title: str, label: str) -> Figure:
    """An UpSet plot of sets of problems by method.

    Bars: the problems that stand in exactly the sets marked below them, most first.
    """
    methods = list(sets)
    found = metrics.exclusive_regions(dict(sets))
    regions = sorted(found.items(), key=lambda region: -region[1])
    rows, columns = range(len(methods)), range(len(regions))
    below = 0.18 * len(methods)
    with plt.rc_context(STYLE):
        figure, (bars, dots) = plt.subplots(
            2, 1, figsize=(WIDE, 1.8 + below), sharex=True, height_ratios=[1.4, below]
        )
        bars.bar(columns, [size for _, size in regions], color="0.3", width=0.6)
        bars.margins(y=0.15)
        bars.yaxis.set_major_locator(MaxNLocator(integer=True))
        bars.set(ylabel="problems", title=title)
        for column, (members, size) in enumerate(regions):
            bars.annotate(str(size), (column, size), ha="center", va="bottom", fontsize=6.5)
            marked = [row for row in rows if methods[row] in members]
            everywhere = [column] * len(methods)
            dots.plot(everywhere, rows, "o", color="0.85", markersize=4)
            dots.plot([column] * len(marked), marked, "o-", color="0.1", markersize=4, linewidth=1)
        dots.set(
            yticks=rows,
            yticklabels=[f"{profile.label(m)} ({len(sets[m])})" for m in methods],
            xticks=[],
            xlabel=label,
            xlim=(-0.6, max(len(regions), 1) - 0.4),
            ylim=(len(methods) - 0.5, -0.5),
        )
    return figure


def _unsolvable_title(profile: Profile) -> str:
    samples = profile.evaluation.samples
    return f"{profile.name}: problems without one correct sample\namong {samples}, 1 seed"
