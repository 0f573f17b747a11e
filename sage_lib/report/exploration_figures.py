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
from sage_lib.report.panels import intervals, lines_of, panels, seeds, spread
from sage_lib.report.result_figures import pass_at_k
from sage_lib.report.style import STYLE, WIDE, count, describe, error_bar, look, sentence, series

#: eps of the support's curves: finer than the eye, since the curves are steps.
EPSILONS = tuple(float(eps) for eps in np.geomspace(0.001, 0.5, 109))
#: The one of them that the figure's title speaks of.
SHOWN_EPSILON = 0.01
#: The smallest value of these two that a completion can have.
LEAST = {"entropy": 0.0, "branching": 1.0}


def figure7(profile: Profile, methods: Sequence[str], family: str | None = None) -> Figure:
    """Figure 7: perplexity under the base model of the samples of a family's methods.

    Left its distribution, right how heavy the tail is.
    """
    frame = measured.scores(profile).dropna(subset=["perplexity"])
    methods, others = measured.drawn(profile, methods, family)
    frame = frame[frame["method"].isin(methods)]
    sizes = sorted(set(frame.groupby("method").size()))
    with plt.rc_context(STYLE):
        figure, axes = panels(profile, methods, [1, 1])
        left, right = axes[0]
        for method, chosen in lines_of(methods):
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
        tails = frame.groupby("method")["perplexity"].quantile(0.99).to_dict()
        describe(
            figure,
            spread(profile, tails, "99 % of samples have a perplexity below"),
            f"{profile.name}. {count(profile.evaluation.scored, 'sample')} a problem",
            seeds(profile, methods),
            f"{' or '.join(f'{size:,}' for size in sizes)} samples a method",
            others,
        )
    return figure


def exploration(profile: Profile, methods: Sequence[str], family: str | None = None) -> Figure:
    """Figure 1 of the exploration report, for the methods of a family.

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
    shown = {
        "distinct": f"(b) distinct\nanswers of {samples}",
        "entropy": "(c) token\nentropy (nats)",
        "branching": "(d) branching\nfactor, top 95 %",
    }
    methods, others = measured.drawn(profile, methods, family)
    with plt.rc_context(STYLE):
        figure, axes = panels(profile, methods, [1.6, 1, 1, 1], legend=False)
        curves, *right = axes[0]
        pass_at_k(curves, profile, frame, methods)
        curves.set(ylabel="pass@k", title="(a)")
        for axis, (metric, name) in zip(right, shown.items(), strict=True):
            chosen = table[table["method"].isin(methods) & (table["metric"] == metric)]
            intervals(axis, profile, chosen)
            axis.set_title(name)
        for axis in right[1:]:
            axis.tick_params(labelleft=False)
        distinct = table[table["method"].isin(methods) & (table["metric"] == "distinct")]
        means = dict(zip(distinct["method"], distinct["mean"], strict=True))
        problems = frame.groupby(["dataset", "problem"]).ngroups
        describe(
            figure,
            spread(profile, means, f"Distinct answers of {samples}"),
            f"{profile.name}. {count(problems, 'problem')} x {count(samples, 'sample')}",
            seeds(profile, methods),
            "bars and bands: 95 % over problems",
            others,
        )
    return figure


def support(profile: Profile, methods: Sequence[str], family: str | None = None) -> Figure:
    """How many valid completions of countdown enter and leave the support of the base, by eps.

    Exact: supp_eps (Definition 4.1) holds the completions with a probability above eps. All three
    are steps: a completion leaves at its own probability, and nothing happens between two.
    """
    methods, others = measured.drawn(profile, methods, family)
    frame = countdown_tables.support_curves(profile, methods, EPSILONS)
    shown = {
        "size": "in the support",
        "entered": "entered, against the base",
        "left": "left, against the base",
    }
    with plt.rc_context(STYLE):
        figure, axes = panels(profile, methods, [1, 1, 1])
        for axis, (column, name) in zip(axes[0], shown.items(), strict=True):
            for method, chosen in lines_of(methods):
                if method == "base" and column != "size":
                    continue  # nothing enters or leaves the base's own support
                found = frame[frame["method"] == method]
                axis.step(found["epsilon"], found[column], where="post", markevery=0.2, **chosen)
            axis.set(xscale="log", xlabel="eps", title=name, ylim=(0, None))
        axes[0, 0].set_ylabel("valid completions")
        at = min(EPSILONS, key=lambda one: abs(np.log(one / SHOWN_EPSILON)))
        there = frame[frame["epsilon"] == at]
        net = dict(zip(there["method"], there["entered"] - there["left"], strict=True))
        describe(
            figure,
            _net(profile, net, at),
            f"{profile.name}. Exact, all {frame['of'].iloc[0]:,} valid completions of the held-out "
            "problems",
            f"mean over {seeds(profile, methods)}",
            others,
        )
    return figure


def _net(profile: Profile, net: Mapping[str, float], at: float) -> str:
    """How far the support shrinks or grows at one eps, in words."""
    trained = {method: value for method, value in net.items() if method != "base"}
    if not trained:
        return "The support of the base"
    low, high = min(trained, key=trained.__getitem__), max(trained, key=trained.__getitem__)
    parts = [f"{trained[low]:+.0f} ({profile.label(low)})"]
    if low != high:
        parts.append(f"{trained[high]:+.0f} ({profile.label(high)})")
    return f"At eps {at:.2g} the support changes by {' to '.join(parts)} completions"


def token_updates(profile: Profile) -> Figure:
    """Where the update falls by uncertainty, and what a token is worth.

    Left G_t (eq. 4 of the exploration report), right the impact I_t (eq. 6), bars 95 % over
    completions.
    """
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 2.6), width_ratios=[3, 2])
        updates = measured.traced(profile, "updates")
        _update_shares(left, updates)
        impacts = _impacts(right, measured.traced(profile, "impact"), profile)
        most = updates.loc[updates["entropy"].idxmax(), "share"]
        describe(
            figure,
            f"{100 * most:.0f} % of the update falls on the most uncertain tenth of the tokens",
            f"{profile.name}. Left: {updates['tokens'].sum():,} tokens, 1 seed, dotted: equal "
            "shares",
            f"right: {impacts}",
        )
    return figure


def _update_shares(axis: Axes, updates: pd.DataFrame) -> None:
    axis.bar(updates["group"], updates["share"], color="0.6", width=0.7)
    axis.axhline(1 / len(updates), color="0.3", linewidth=0.8, linestyle=":")
    axis.set(
        xticks=updates["group"],
        xticklabels=[f"{entropy:.2g}" for entropy in updates["entropy"]],
        xlabel="mean entropy of a tenth of the tokens (nats)",
        ylabel="share of the summed $G_t$",
    )
    axis.tick_params(axis="x", rotation=45)


def _impacts(axis: Axes, impact: pd.DataFrame, profile: Profile) -> str:
    """Draws the impact of replaced tokens; returns what it stands on."""
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
    )
    drawn = f"{count(completions, 'completion')} x {count(int(continuations), 'continuation')}"
    return f"{drawn}, bars: 95 % over completions"


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
        never = len(set.intersection(*sets.values()))
        title = f"{count(never, 'problem')} unsolved by all {len(methods)}"
        describe(figure, title, _unsolved(profile))
    return figure


def unsolvable_upset(profile: Profile, methods: Sequence[str], family: str | None = None) -> Figure:
    """Which problems the methods of a family never solved, as an UpSet plot."""
    methods, others = measured.drawn(profile, methods, family)
    sets = result_tables.unsolvable(profile, methods)
    marked = "unsolved by exactly the marked methods"
    return upset(profile, sets, marked, _unsolved(profile), others)


def upset(profile: Profile, sets: Mapping[str, set[str]], label: str, *caption: str) -> Figure:
    """An UpSet plot of sets of problems by method.

    Bars: the problems that stand in exactly the sets marked below them, most first. ``caption``:
    what makes a problem one of a set, and on what that stands.
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
        bars.set_ylabel("problems")
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
        every, never = set.union(*sets.values()), set.intersection(*sets.values())
        inside = count(len(never), "problem")
        title = f"{inside} in all {len(methods)} sets, {len(every)} in at least one"
        describe(figure, title, *caption)
    return figure


def _unsolved(profile: Profile) -> str:
    samples = count(profile.evaluation.samples, "sample")
    return f"{profile.name}. Problems without a correct one of {samples}, 1 seed"
