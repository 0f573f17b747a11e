"""Figures of the two training stages: step logs and entropies in, a matplotlib Figure out."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import t

from sage_lib.algorithm.guides import BranchGuide, build_guide
from sage_lib.experiment.profile import BASE, Profile
from sage_lib.experiment.runs import entropies, sft_run
from sage_lib.files import read_lines
from sage_lib.report import measured, training_tables
from sage_lib.report.panels import (
    banded,
    keep_lines_near,
    legend_columns,
    lines_of,
    method_legend,
    seeds,
    spread,
)
from sage_lib.report.style import (
    COLOURS,
    NARROW,
    STYLE,
    WIDE,
    band,
    count,
    describe,
    error_bar,
    line,
    sentence,
    series,
    steps,
)

#: What the training curves show: the first six that the profile's runs log.
PANELS = {
    "reward": "reward",
    "entropy": "token entropy (nats)",
    "kl_ref": "KL to $\\pi_{ref}$ (k3, nats)",
    "grad_norm": "gradient norm",
    "task/rare": "share of the rare way",
    "frac_reward_zero_std": "groups without a\nspread of reward",
    "completions/mean_length": "tokens of a completion",
}
#: A smaller change of the pull is shown as none.
ROUNDED = 0.0005
ANCHORS = {
    "k3": "k3 (the paper's)",
    "k3_corrected": "k3, corrected",
    "sequence": "sequence (eq. 8)",
}


def sft_loss(profile: Profile) -> Figure:
    """Training loss of supervised fine-tuning by step; a sentence for a model taken as it comes."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW, 2.1))
        if not profile.sft:
            sentence(axis, f"{profile.name}: no fine-tuning,\nthe model is taken as it comes")
            return figure
        log = pd.DataFrame(read_lines(sft_run(profile).measured / "steps.jsonl"))
        every = profile.sft["logging_steps"]
        axis.plot(log["step"], log["loss"], color=COLOURS["blue"])
        axis.set(ylabel="loss (nats per token)", yscale="log")
        steps(axis, "SFT step")
        first, last = log["loss"].iloc[0], log["loss"].iloc[-1]
        describe(
            figure,
            f"SFT: the loss falls from {first:.2g} to {last:.2g}",
            f"{profile.name}. 1 seed",
            f"each point the mean of {count(every, 'step')}",
        )
    return figure


def entropy_thresholds(profile: Profile) -> Figure:
    """The base model's token entropies, and eq. 11's q over them.

    A threshold and a curve of q for each branch guide that the profile's methods have.
    """
    entropy = entropies(profile)
    counts = np.array(entropy["histogram"]["counts"])
    edges = np.array(entropy["histogram"]["edges"])
    grid = np.linspace(edges[0], edges[-1], 300)
    choices = _branch_choices(profile)
    built = [build_guide(choice, entropy["quantiles"]) for choice in choices]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.6, 2.8))
        axis.stairs(counts / counts.sum(), edges, fill=True, color="0.75", label="tokens")
        axis.axvline(1.2, color="0.3", linestyle=":", label="the paper's 1.2 nats")
        axis.set(
            xlabel="token entropy $H_t$ (nats)",
            ylabel="share of tokens",
            yscale="log",
        )
        handles = axis.get_legend_handles_labels()[0]
        right = axis.twinx()
        right.grid(False)
        right.spines["right"].set_visible(True)
        right.set(ylabel="$q$ (eq. 11)", ylim=(0.98, 1.05))
        above = []
        for i, (choice, guide) in enumerate(zip(choices, built, strict=True)):
            if not isinstance(guide, BranchGuide):
                continue
            q = np.clip(
                1 + guide.ratio * np.maximum(grid - guide.threshold, 0), guide.low, guide.high
            )
            chosen = line(series(i + 5))
            name = f"threshold {guide.threshold:.3g}"
            mark = {"color": chosen["color"], "linewidth": 0.9, "linestyle": (0, (4, 2))}
            handles.append(axis.axvline(guide.threshold, label=name, **mark))
            label = f"$q$ of {name}, ratio {guide.ratio:.2g} (right axis)"
            handles += right.plot(grid, q, label=label, **chosen)
            share = counts[edges[:-1] >= guide.threshold].sum() / counts.sum()
            if "threshold_quantile" in choice:  # exactly, and not by the histogram's bins
                share = 1 - choice["threshold_quantile"]
            above.append(f"{100 * share:.1f} % above {guide.threshold:.3g} nats")
            right.set_ylim(0.98, max(right.get_ylim()[1], guide.high + 0.1))
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
        describe(
            figure,
            f"Of the tokens {', '.join(above)}" if above else "The base's token entropies",
            f"{profile.name}. Base model, {entropy['tokens']:,} sampled tokens",
        )
    return figure


def _branch_choices(profile: Profile) -> list[Mapping[str, Any]]:
    """The different branch guides of the profile's main methods, also those inside other guides."""
    found: list[Mapping[str, Any]] = []
    for method in profile.methods.values():
        if method.family != "main":
            continue
        choice: Mapping[str, Any] | None = method.guide
        while choice is not None and choice.get("inner"):
            choice = choice["inner"]
        if choice is not None and choice["name"] == "branch" and choice not in found:
            found.append(choice)
    return found


def training_curves(profile: Profile, methods: Sequence[str], *columns: str) -> Figure:
    """What the runs of ``methods`` log, by RL step: :data:`PANELS`, mean over seeds.

    Bands span the seeds, where there are several. ``columns``: up to three of the panels, in one
    row; without them the first six that are logged. Runs of different lengths stand beside each
    other by the share of the run.
    """
    frame = measured.training(profile)
    panels = {column: PANELS[column] for column in columns or PANELS if column in frame}
    rows = 1 if columns else 2
    across = legend_columns(profile, methods, WIDE, 2 if columns else 4)
    with plt.rc_context(STYLE):
        height = 0.6 + 1.6 * rows + 0.17 * -(-len(methods) // across)
        figure, axes = plt.subplots(rows, 3, figsize=(WIDE, height), squeeze=False)
        shown = list(zip(axes.flat, panels.items(), strict=False))
        for axis, (column, name) in shown:
            _curves(axis, profile, frame, methods, column)
            axis.set_ylabel(name)
        left = [keep_lines_near(axis) for axis, _ in shown]
        for axis in axes.flat[len(shown) :]:
            axis.axis("off")
        method_legend(figure, profile, methods, across)
        batch = profile.rl["per_device_train_batch_size"]
        rollouts = batch * profile.rl["gradient_accumulation_steps"]
        lengths = _lengths(profile, methods)
        last, drawn = _steps(_window(max(lengths))), "step"
        if len(lengths) > 1:
            last, drawn = "tenth of a run", "batch"
        ends = {method: _end(frame, method) for method in methods if method != BASE}
        describe(
            figure,
            spread(profile, ends, f"Reward over the last {last}"),
            f"{profile.name}. {count(rollouts, 'rollout')} a {drawn}",
            _averaged(profile, methods),
            "a line that leaves its panel goes on above it" if any(left) else "",
        )
    return figure


def _end(frame: pd.DataFrame, method: str) -> float:
    """Mean reward of a method over the last window of its runs."""
    of_method = frame[frame["method"] == method]
    runs = [run["reward"] for _, run in of_method.groupby("seed")]
    return float(np.mean([run.tail(_window(len(run))).mean() for run in runs]))


def _lengths(profile: Profile, methods: Sequence[str]) -> set[int]:
    """Of how many steps the runs of methods are, by their settings."""
    return {profile.steps_of(method) for method in methods if method != BASE}


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"


def reward_curves(axis: Axes, profile: Profile, methods: Sequence[str]) -> str:
    """The training reward of ``methods`` by RL step in one panel, as training_curves draws it.

    Returns what it shows, for the figure's caption.
    """
    trained = [method for method in methods if method != BASE]
    if not trained:
        sentence(axis, "no RL method")
        return "Nothing is trained"
    _curves(axis, profile, measured.training(profile), trained, "reward")
    axis.set_ylabel("training reward")
    return f"Left: {_averaged(profile, trained)}"


def _averaged(profile: Profile, methods: Sequence[str]) -> str:
    """Over what a panel's lines are means, and what their bands are."""
    windows = {_window(length) for length in _lengths(profile, methods)}
    before = f"the {_steps(max(windows))} before" if len(windows) == 1 else "a tenth of a run"
    lines = f"mean over {before} and {seeds(profile, methods)}"
    if windows == {1}:
        lines = f"every step, mean over {seeds(profile, methods)}"
    if len(profile.seeds) == 1:
        return lines
    have = banded(profile, methods)
    whose = "" if len(have) == len(methods) else f" ({profile.label(have[0])})"
    return f"{lines}, bands{whose}: lowest to highest seed"


def _curves(
    axis: Axes, profile: Profile, frame: pd.DataFrame, methods: Sequence[str], column: str
) -> None:
    """Mean over seeds of one logged column for each method that logs it, from the first step that
    has a whole window behind it. A run that collapsed is in the means up to where it ended."""
    together = len(_lengths(profile, methods)) == 1
    for method, chosen in lines_of(methods):
        of_method = frame[frame["method"] == method]
        logged = [run[column].to_numpy() for _, run in of_method.groupby("seed")]
        whole = [run for run in logged if not np.isnan(run).any()]
        if not whole:  # no KL term, for instance
            continue
        longest = max(map(len, whole))
        runs = np.full((len(whole), longest), np.nan)
        for row, run in zip(runs, whole, strict=True):
            row[: len(run)] = _smooth(run, _window(longest))
        at = np.arange(1, longest + 1)
        first = _window(longest) - 1
        at, runs = at[first:], runs[:, first:]
        every = max(1, len(at) // 6)
        at = at if together else at / at[-1]
        axis.plot(at, np.nanmean(runs, axis=0), markevery=every, **chosen)
        if len(runs) > 1 and method in banded(profile, methods):
            ends = np.nanmin(runs, axis=0), np.nanmax(runs, axis=0)
            band(axis, at, *ends, **chosen)
    if together:
        steps(axis)
    else:
        axis.set_xlabel("share of the run")


def _window(length: int) -> int:
    """Steps that the curve of a run of so many averages over: a tenth of them."""
    return max(1, length // 10)


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last ``window`` steps (fewer at the start)."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)


def guide_effects(profile: Profile) -> Figure:
    """What the branch guide adds to the expected gradient of each anchor.

    Exact over the next token; bars: 95 % t intervals over prompts.
    """
    frame, size = training_tables.effects(profile), measured.effects(profile)
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.4, 2.3))
        sure: list[str] = []
        for i, row in enumerate(frame.to_dict("records")):
            half = t.ppf(0.975, size["prompts"] - 1) * row["along_se"]
            ends = row["along"] - half, row["along"] + half
            error_bar(axis, i, row["along"], *ends, **series(i + 3))
            clear = (min(ends) > 0 or max(ends) < 0) and abs(row["along"]) >= ROUNDED
            sure += [ANCHORS.get(row["anchor"], row["anchor"])] if clear else []
        axis.axhline(0, color="0.3", linewidth=0.8)
        drawn = f"{count(size['prompts'], 'prompt')}, of each {size['batches']} times "
        drawn += count(size["completions"], "completion")
        axis.set(
            xticks=range(len(frame)),
            xticklabels=[ANCHORS.get(anchor, anchor) for anchor in frame["anchor"]],
            xlim=(-0.5, len(frame) - 0.5),
            ylabel="change of the KL pull by\nthe branch guide (share of it)",
        )
        described = [
            f"{ANCHORS.get(row['anchor'], row['anchor'])} "
            f"{0.0 if abs(row['along']) < ROUNDED else row['along']:+.3f}"
            for row in frame.to_dict("records")
        ]
        describe(
            figure,
            f"The branch guide's change of the pull, clear of 0 in {len(sure)} of {len(frame)} "
            f"anchors: {', '.join(described)}",
            f"{profile.name}. {drawn}, 1 seed",
            "exact over the next token",
            f"bars: 95 % over prompts; clear of 0: {', '.join(sure)}"
            if sure
            else "bars: 95 % over prompts",
        )
    return figure
