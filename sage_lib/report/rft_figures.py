"""Figures of rejection-sampling fine-tuning beside RL: exact pass@k, nothing is sampled."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from sage_lib.experiment.profile import Profile
from sage_lib.report import rft_tables
from sage_lib.report.panels import lines_of, method_legend, spread
from sage_lib.report.style import (
    NARROW,
    STYLE,
    WIDE,
    counts,
    describe,
    look,
    points,
    sentence,
    steps,
)

#: Panels of :func:`selections`: what is selected by.
PANELS = {
    "entropy": "entropy (%)",
    "branching": "branching factor (%)",
    "perplexity": "perplexity (%)",
    "position": "position of entropy (%)",
}


def _nothing(text: str) -> Figure:
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 1.5, 1.2))
        sentence(axis, text.replace(": ", ":\n"))
    return figure


def by_samples(profile: Profile) -> Figure:
    """Exact pass@1 and pass@256 by completions drawn: RL, and rejection sampling at each round's
    end.

    Thick lines are means over seeds, thin ones each seed.
    """
    if absent := rft_tables.missing(profile):
        return _nothing(absent)
    table = rft_tables.by_samples(profile)
    if table.empty:
        return _nothing(f"{profile.name}: no exact evaluation along training")
    methods = list(dict.fromkeys(table["method"]))
    with plt.rc_context(STYLE):
        height = 2.4 + 0.17 * -(-len(methods) // 3)
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, height))
        for axis, column in zip(axes, ("pass@1", "pass@256"), strict=True):
            for method, chosen in lines_of(methods):
                of_method = table[table["method"] == method]
                wide = of_method.pivot(index="drawn", columns="seed", values=column)
                axis.plot(wide.index, wide.mean(axis=1), **chosen)
                for seed in wide if wide.shape[1] > 1 else ():
                    thin = {**chosen, "linewidth": 0.4, "marker": "", "alpha": 0.6}
                    axis.plot(wide.index, wide[seed], **thin)
            axis.set_ylabel(f"exact {column}")
            steps(axis, "completions drawn in training")
        seeds = table.groupby("method")["seed"].nunique()
        shown = counts(seeds, "seed")
        ends = table[table["drawn"] == table.groupby("method")["drawn"].transform("max")]
        last = ends.groupby("method")["pass@256"].mean().to_dict()
        method_legend(figure, profile, methods, columns=3)
        describe(
            figure,
            spread(profile, last, "Exact pass@256 at the end"),
            f"{profile.name}. {shown}, evaluated exactly",
            "thin lines: each seed" if seeds.max() > 1 else "",
        )
    return figure


def selections(profile: Profile) -> Figure:
    """What the selected completions differ in from all eligible ones: the change of the mean.

    A point for each round and seed, left of the line less than the eligible have, right of it more.
    """
    if absent := rft_tables.missing(profile):
        return _nothing(absent)
    methods = rft_tables.arms(profile)
    table = rft_tables.rounds(profile)
    table = table[table["method"].isin(methods)]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(PANELS), figsize=(WIDE, 1.1 + 0.24 * len(methods)), sharey=True
        )
        for axis, (name, shown) in zip(axes, PANELS.items(), strict=True):
            gained = 100 * (table[f"selected {name}"] / table[f"eligible {name}"] - 1)
            for place, method in enumerate(methods):
                of_method = gained[table["method"] == method]
                axis.plot(of_method, [place] * len(of_method), **points(look(method)), alpha=0.7)
            axis.axvline(0, color="0.3", linewidth=0.8)
            axis.set_xlabel(shown)
        axes[0].set_yticks(range(len(methods)), [profile.label(method) for method in methods])
        axes[0].set_ylim(len(methods) - 0.5, -0.5)
        describe(
            figure,
            "What selected completions differ in from all eligible ones",
            f"{profile.name}. Change of the mean in %",
            "a point per round and seed",
        )
    return figure
