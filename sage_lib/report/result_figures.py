"""Figures 2 to 4 of the paper and the modes: tables of counts in, a matplotlib Figure out."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_lib.evaluation import metrics
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.report import countdown_tables, measured, result_tables
from sage_lib.report.panels import banded, intervals, lines_of, panels, seeds, spread
from sage_lib.report.style import NARROW, STYLE, band, count, describe, look
from sage_lib.report.training_figures import reward_curves


def figure2(profile: Profile, family: str | None = None) -> Figure:
    """Figure 2: training reward by step against held-out pass@1, for the methods of a family.

    Small dots below a method's mean: its training seeds, where there are several.
    """
    table = result_tables.table1(profile)
    average = table[(table["dataset"] == "Avg") & (table["metric"] == "pass@1")]
    frame = measured.evaluations(profile)
    samples = profile.evaluation.samples
    methods, others = measured.drawn(profile, [BASE, *profile.evaluated], family)
    with plt.rc_context(STYLE):
        figure, axes = panels(profile, methods, width_ratios=[3, 2], legend=False)
        left, right = axes[0]
        trained = reward_curves(left, profile, methods)
        chosen = average[average["method"].isin(methods)]
        intervals(right, profile, chosen)
        several = _seed_dots(right, frame, list(chosen["method"]))
        right.set_xlabel("held-out pass@1")
        means = dict(zip(chosen["method"], chosen["mean"], strict=True))
        describe(
            figure,
            spread(profile, means, "Held-out pass@1") + _told_apart(profile, methods),
            f"{profile.name}. {trained}",
            f"right: {count(chosen['problems'].iloc[0], 'problem')} x {count(samples, 'sample')}, "
            "bars: 95 % over problems, " + ("dots: each seed" if several else "one seed"),
            others,
        )
    return figure


def _told_apart(profile: Profile, methods: Sequence[str]) -> str:
    """How many of ``methods`` can be told from the one to compare with at pass@1; "" of none."""
    against = result_tables.reference(profile)
    found = result_tables.compared(profile)
    found = found[(found["against"] == against) & (found["metric"] == "pass@1")]
    found = found[found["method"].isin(methods)]
    told = ((found["low"] > 0) | (found["high"] < 0)).sum()
    return f"; {told} of {len(found)} told from {profile.label(against)}" if len(found) else ""


def _seed_dots(axis: Axes, frame: pd.DataFrame, methods: Sequence[str]) -> bool:
    """pass@1 of every seed of ``methods``, each on its line of :func:`intervals`, a little lower.

    False where no method has several seeds: then there is nothing to draw.
    """
    several = False
    for position, method in enumerate(methods):
        by_seed, sets, seeds_of_method = result_tables.curves(frame, method, (1,))
        if len(seeds_of_method) > 1:
            several = True
            values = [metrics.mean_over_sets(one, sets)[0] for one in by_seed]
            lower = [position + 0.3] * len(values)
            axis.plot(values, lower, ".", markersize=3, color=look(method)["color"], gid="seeds")
    return several


def figure3(profile: Profile, ood: bool = False, family: str | None = None) -> Figure:
    """Figure 3: pass@k by k for each data set, for the methods of a family.

    Bands: 95 % over problems (seeds averaged first). With ``ood``, Figure 4: the same on
    the data outside Table 1, Knights and Knaves where the profile's model can read them.
    """
    frame = measured.evaluations(profile, ood)
    datasets = list(dict.fromkeys(frame["dataset"]))
    columns = min(len(datasets), 4)
    lines = -(-len(datasets) // columns)
    methods, others = measured.drawn(profile, [BASE, *profile.evaluated], family)
    with plt.rc_context(STYLE):
        figure, axes = panels(profile, methods, [1] * columns, lines, sharey=True)
        last: dict[str, list[float]] = {}
        for axis, dataset in zip(axes.flat, datasets, strict=False):
            of_set = frame[frame["dataset"] == dataset]
            for method, value in pass_at_k(axis, profile, of_set, methods).items():
                last.setdefault(method, []).append(value)
            problems = count(of_set["problem"].nunique(), "problem")
            axis.set(title=f"{dataset.replace('_', ' ')}\n{problems}")
        for axis in axes.flat[len(datasets) :]:
            axis.axis("off")
        for axis in axes[:, 0]:
            axis.set_ylabel("pass@k")
        means = {method: sum(values) / len(values) for method, values in last.items()}
        describe(
            figure,
            spread(profile, means, f"pass@{profile.evaluation.ks[-1]}"),
            f"{profile.name}. {count(profile.evaluation.samples, 'sample')} a problem",
            seeds(profile, methods),
            f"bands{_whose(profile, methods)}: 95 % over problems",
            others,
        )
    return figure


def at_k(profile: Profile, table: pd.DataFrame, k: int) -> Figure:
    """pass@k at one k: a method a line, its mean and 95 % interval over problems.

    ``table``: result_tables.at_each_k. What is drawn of a method has its key as gid; the axis is
    the same at every k.
    """
    rows = table[table["k"] == k]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 1.2, 0.9 + 0.19 * len(rows)))
        intervals(axis, profile, rows)
        for method, drawn in zip(rows["method"], axis.containers, strict=True):
            for part in drawn.get_children():
                part.set_gid(method)
        axis.set(xlabel=f"pass@{k}", xlim=(-0.02, 1.02), title=f"{profile.name}: pass@{k}")
    return figure


def _whose(profile: Profile, methods: Sequence[str]) -> str:
    """Whose the bands are, where not every line has one."""
    have = banded(profile, methods)
    return "" if len(have) == len(methods) else f" ({profile.label(have[0])})"


def pass_at_k(
    axis: Axes, profile: Profile, frame: pd.DataFrame, methods: Sequence[str]
) -> dict[str, float]:
    """pass@k by k of ``methods`` in one panel: the mean over the data sets of ``frame``.

    Returns each method's value at the largest k.

    ``frame`` is (a part of) what measured.evaluations gives.
    """
    settings = profile.evaluation
    with_band, last = banded(profile, methods), {}
    for method, chosen in lines_of(methods):
        by_seed, sets, _ = result_tables.curves(frame, method, settings.ks)
        curves = by_seed.mean(axis=0)
        mean = metrics.mean_over_sets(curves, sets)
        axis.plot(settings.ks, mean, **chosen)
        last[method] = float(mean[-1])
        if method in with_band:
            low, high = metrics.bootstrap_interval(curves, settings.resamples, settings.seed, sets)
            band(axis, settings.ks, low, high, **chosen)
    axis.set_xscale("log", base=2)
    shown = settings.ks[::2]
    axis.set_xticks(shown, [str(k) for k in shown])
    axis.set(xlabel="k", ylim=(-0.02, 1.02))
    return last


def mode_shares(profile: Profile, family: str | None = None) -> Figure:
    """The rare way's share of samples, and of problems solved validly both ways, by method."""
    frame = countdown_tables.modes(profile)
    methods, others = measured.drawn(profile, list(frame["method"]), family)
    frame = frame[frame["method"].isin(methods)]
    shown = {"rare": "rare way, share of samples", "both_ways": "problems solved both ways"}
    columns = {
        "rare": ("rare_share", "rare_low", "rare_high"),
        "both_ways": ("both_ways", "both_ways_low", "both_ways_high"),
    }
    with plt.rc_context(STYLE):
        figure, axes = panels(profile, methods, [1, 1], legend=False, sharey=True)
        for axis, (panel, name) in zip(axes[0], shown.items(), strict=True):
            intervals(axis, profile, frame, columns[panel])
            highest = frame[columns[panel][2]].max()
            top = max(highest * 1.1, 0.01)  # a column of zeros still needs an axis
            axis.set(xlabel=name, xlim=(-0.03 * top, top))
        means = dict(zip(frame["method"], frame["rare_share"], strict=True))
        describe(
            figure,
            spread(profile, means, "Share of the rare way"),
            f"{profile.name}. {count(profile.evaluation.samples, 'sample')} a problem",
            seeds(profile, methods),
            "bars: 95 % over problems",
            others,
        )
    return figure
