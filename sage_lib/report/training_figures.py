"""Figures of the two training stages: step logs and entropies in, a matplotlib Figure out."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sage_lib.algorithm.guides import BranchGuide, build_guide
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import entropies, sft_run
from sage_lib.files import read_lines
from sage_lib.report import measured, training_tables
from sage_lib.report.panels import banded, lines_of, method_legend, seeds
from sage_lib.report.style import (
    COLOURS,
    NARROW,
    STYLE,
    WIDE,
    band,
    count,
    error_bar,
    sentence,
    series,
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
        axis.set(
            xlabel="SFT step",
            ylabel="loss (nats per token)",
            yscale="log",
            title=f"{profile.name}: 1 seed, each point the mean of {count(every, 'step')}",
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
    guides = [guide for guide in built if isinstance(guide, BranchGuide)]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.6, 2.8))
        axis.stairs(counts / counts.sum(), edges, fill=True, color="0.75", label="tokens")
        axis.axvline(1.2, color="0.3", linestyle=":", label="the paper's 1.2 nats")
        axis.set(
            xlabel="token entropy $H_t$ (nats)",
            ylabel="share of tokens",
            yscale="log",
            title=f"base model, {entropy['tokens']:,} sampled tokens",
        )
        handles = axis.get_legend_handles_labels()[0]
        right = axis.twinx()
        right.grid(False)
        right.spines["right"].set_visible(True)
        right.set(ylabel="$q$ (eq. 11)", ylim=(0.98, 1.05))
        for i, guide in enumerate(guides):
            q = np.clip(
                1 + guide.ratio * np.maximum(grid - guide.threshold, 0), guide.low, guide.high
            )
            colour = series(i + 5)["color"]
            name = f"threshold {guide.threshold:.2f} nats"
            handles.append(axis.axvline(guide.threshold, color=colour, linestyle="--", label=name))
            handles += right.plot(grid, q, color=colour, label="$q$ (right axis)")
            right.set_ylim(0.98, max(right.get_ylim()[1], guide.high + 0.1))
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _branch_choices(profile: Profile) -> list[Mapping[str, Any]]:
    """The different branch guides of the profile's methods, also those inside other guides."""
    found: list[Mapping[str, Any]] = []
    for method in profile.methods.values():
        choice: Mapping[str, Any] | None = method.guide
        while choice is not None and choice.get("inner"):
            choice = choice["inner"]
        if choice is not None and choice["name"] == "branch" and choice not in found:
            found.append(choice)
    return found


def training_curves(profile: Profile, methods: Sequence[str], *columns: str) -> Figure:
    """What the runs of ``methods`` log, by RL step: :data:`PANELS`, mean over seeds.

    Bands span the seeds, where there are several. ``columns``: up to three of the panels, in one
    row; without them the first six that are logged.
    """
    frame = measured.training(profile)
    panels = {column: PANELS[column] for column in columns or PANELS if column in frame}
    window, rows, across = _window(profile), 1 if columns else 2, 2 if columns else 4
    with plt.rc_context(STYLE):
        height = 0.4 + 1.6 * rows + 0.17 * -(-len(methods) // across)
        figure, axes = plt.subplots(rows, 3, figsize=(WIDE, height), sharex=True, squeeze=False)
        shown = list(zip(axes.flat, panels.items(), strict=False))
        for axis, (column, name) in shown:
            _curves(axis, profile, frame, methods, column)
            axis.set(ylabel=name)
        for axis in axes.flat[len(shown) :]:
            axis.axis("off")
        for axis in axes[-1]:
            axis.set_xlabel("RL step")
        batch = profile.rl["per_device_train_batch_size"]
        rollouts = batch * profile.rl["gradient_accumulation_steps"]
        averaged = f"mean over {count(window, 'step')} and {_seeds(profile, methods)}"
        figure.suptitle(f"{profile.name}: {rollouts} rollouts a step, {averaged}")
        method_legend(figure, profile, methods, across)
    return figure


def reward_curves(axis: Axes, profile: Profile, methods: Sequence[str]) -> None:
    """The training reward of ``methods`` by RL step in one panel, as training_curves draws it."""
    trained = [method for method in methods if method != "base"]
    if not trained:
        sentence(axis, "no RL method")
        return
    _curves(axis, profile, measured.training(profile), trained, "reward")
    axis.set(
        xlabel="RL step",
        ylabel="training reward",
        title=f"mean over {count(_window(profile), 'step')} and {_seeds(profile)}",
    )


def _curves(
    axis: Axes, profile: Profile, frame: pd.DataFrame, methods: Sequence[str], column: str
) -> None:
    """Mean over seeds of one logged column for each method that logs it."""
    window = _window(profile)
    for method, chosen in lines_of(methods):
        of_method = frame[frame["method"] == method]
        logged = [run[column].to_numpy() for _, run in of_method.groupby("seed")]
        whole = [_smooth(run, window) for run in logged if not np.isnan(run).any()]
        if not whole:  # no KL term, for instance
            continue
        runs = np.stack(whole)
        steps = np.arange(1, runs.shape[1] + 1)
        every = max(1, len(steps) // 6)
        axis.plot(steps, runs.mean(0), markevery=every, **chosen)
        if len(runs) > 1 and method in banded(profile, methods):
            band(axis, steps, runs.min(0), runs.max(0), **chosen)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _window(profile: Profile) -> int:
    """Steps that a training curve averages over: a tenth of the run."""
    return max(1, profile.rl["max_steps"] // 10)


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last ``window`` steps (fewer at the start)."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)


def _seeds(profile: Profile, methods: Sequence[str] | None = None) -> str:
    """How many seeds a panel shows, and what its bands are."""
    found = seeds(profile, methods)
    return found if len(profile.seeds) == 1 else f"{found}; bands: all of them"


def guide_effects(profile: Profile) -> Figure:
    """What the branch guide adds to the expected gradient of each anchor.

    Exact over the next token; bars: standard errors over prompts.
    """
    frame, size = training_tables.effects(profile), measured.effects(profile)
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.4, 2.3))
        for i, row in enumerate(frame.to_dict("records")):
            low, high = row["along"] - row["along_se"], row["along"] + row["along_se"]
            error_bar(axis, i, row["along"], low, high, **series(i + 3))
        axis.axhline(0, color="0.3", linewidth=0.8)
        drawn = "{prompts} prompts x {batches} x {completions} completions".format(**size)
        axis.set(
            xticks=range(len(frame)),
            xticklabels=[ANCHORS.get(anchor, anchor) for anchor in frame["anchor"]],
            xlim=(-0.5, len(frame) - 0.5),
            ylabel="change of the KL pull\nby the branch guide",
            title=f"{profile.name}: {drawn}, 1 seed\n"
            "exact over the next token; bars: 1 s.e. over prompts",
        )
    return figure
