"""Every figure of the companion: measured tables in, a matplotlib Figure out, saved as vector and as picture.

One style: colours that the colour-blind tell apart, and a marker and dash of its own for each method, so that grey
print reads as well. Every figure states n, and shows intervals wherever something was sampled.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.figure import Figure

from sage_lib import paths
from sage_lib.evaluation import metrics
from sage_lib.experiment import records
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import evaluated, sft_run
from sage_lib.files import read_lines, write_json
from sage_lib.report import tables

#: Columns of a two-column page and of one column, inches.
WIDE, NARROW = 6.75, 3.25
_COLOURS = sns.color_palette("colorblind")
#: In the order base, first method, ...: neighbours differ in lightness as well as in hue.
_METHOD_COLOURS = [_COLOURS[i] for i in (7, 1, 2, 5, 4, 3, 0, 9, 6, 8)]
_DASHES = ["-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1))]
_MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,
    "svg.hashsalt": "sage",
}


def look(profile: Profile, method: str) -> dict:
    """Colour, dash and marker of a method: the same in every figure."""
    return series(["base", *profile.methods].index(method))


def series(i: int) -> dict:
    """Colour, dash and marker of the i-th series of a figure. Past ten the colours repeat, but not those of GRPO and
    GRPO + Branch (1 and 6), which stand in every figure."""
    colour = i if i < 10 else {1: 0, 6: 7}.get(i % 10, i % 10)
    return {
        "color": _METHOD_COLOURS[colour],
        "linestyle": _DASHES[i % len(_DASHES)],
        "marker": _MARKERS[i % len(_MARKERS)],
    }


def save_figure(figure: Figure, name: str, profile: str) -> list[Path]:
    """Write figures/<profile>/<name>.pdf and .png with a record of the revision and versions beside them."""
    folder = paths.figures(profile)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for ending, extra in (
        (".pdf", {"metadata": {"CreationDate": None}}),
        (".png", {"dpi": 200, "metadata": {"Software": None}}),
    ):
        temporary = folder / f".{name}{ending}"
        figure.savefig(
            temporary, format=ending[1:], bbox_inches="tight", pad_inches=0.05, **extra
        )  # no title or label is cut
        made.append(temporary.replace(folder / f"{name}{ending}"))
    plt.close(figure)  # or a notebook would show it a second time at the end of the cell
    write_json(
        folder / f"{name}.json",
        {
            "figure": name,
            "profile": profile,
            "revision": records.revision(),
            "versions": records.versions(),
        },
    )
    return made


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last ``window`` steps (fewer at the start)."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    start = np.maximum(np.arange(1, len(values) + 1) - window, 0)
    return (total[1:] - total[start]) / (np.arange(1, len(values) + 1) - start)


def sft_loss(profile: Profile) -> Figure:
    """Training loss of supervised fine-tuning by step."""
    steps = read_lines(sft_run(profile).measured / "steps.jsonl")
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW, 2.1))
        axis.plot([s["step"] for s in steps], [s["loss"] for s in steps], color=_COLOURS[0])
        axis.set(
            xlabel="SFT step",
            ylabel="loss (nats per token)",
            yscale="log",
            title=f"{profile.name}: 1 seed, each point the mean of {profile.sft['logging_steps']} steps",
        )
    return figure


def entropy_thresholds(profile: Profile, threshold: float, ratio: float) -> Figure:
    """The base model's token entropies, and eq. 11's q over them with the chosen threshold and ratio."""
    entropy = tables.entropy(profile)
    counts, edges = (
        np.array(entropy["histogram"]["counts"]),
        np.array(entropy["histogram"]["edges"]),
    )
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.6, 2.8))
        axis.stairs(counts / counts.sum(), edges, fill=True, color="0.75", label="tokens")
        axis.axvline(
            threshold, color=_COLOURS[3], linestyle="--", label=f"threshold {threshold:.2f} nats"
        )
        axis.axvline(1.2, color="0.3", linestyle=":", label="the paper's 1.2 nats")
        axis.set(
            xlabel="token entropy $H_t$ (nats)",
            ylabel="share of tokens",
            yscale="log",
            title=f"base model, {entropy['tokens']:,} sampled tokens",
        )
        other = axis.twinx()
        grid = np.linspace(edges[0], edges[-1], 300)
        other.plot(
            grid,
            np.clip(
                1 + ratio * np.maximum(grid - threshold, 0), profile.guide.low, profile.guide.high
            ),
            color=_COLOURS[0],
            label="$q$ (right axis)",
        )
        other.set(ylabel="$q$ (eq. 11)", ylim=(0.98, profile.guide.high + 0.1))
        other.grid(False)
        other.spines["right"].set_visible(True)
        handles = [*axis.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def training_curves(profile: Profile, methods: Sequence[str]) -> Figure:
    """Reward, token entropy, KL to the reference, gradient norm and share of the rare way by RL step; bands span the seeds."""
    frame = tables.training(profile)
    panels = [
        ("reward", "reward"),
        ("entropy", "token entropy (nats)"),
        ("kl_ref", "KL to $\\pi_{ref}$ (k3, nats)"),
        ("grad_norm", "gradient norm"),
        ("task/rare", "share of the rare way"),
    ]
    panels = [(key, name) for key, name in panels if key in frame]
    window = max(1, profile.rl["max_steps"] // 10)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 3, figsize=(WIDE, 3.9), sharex=True)
        for axis, (key, name) in zip(axes.flat, panels, strict=False):
            for method in methods:
                runs = [
                    _smooth(g[key].to_numpy(), window)
                    for _, g in frame[frame["method"] == method].groupby("seed")
                    if g[key].notna().all()
                ]
                if runs:
                    runs, steps = np.stack(runs), np.arange(1, len(runs[0]) + 1)
                    axis.plot(
                        steps,
                        runs.mean(0),
                        label=tables.label(profile, method),
                        markevery=max(1, len(steps) // 6),
                        **look(profile, method),
                    )
                    axis.fill_between(
                        steps,
                        runs.min(0),
                        runs.max(0),
                        color=look(profile, method)["color"],
                        alpha=0.15,
                        linewidth=0,
                    )
            axis.set(xlabel="RL step", ylabel=name)
            axis.xaxis.get_major_locator().set_params(integer=True)
        handles = axes.flat[0].get_legend_handles_labels()
        for axis in axes.flat[len(panels) :]:
            axis.axis("off")
        axes.flat[-1].legend(*handles, loc="center")
        rollouts = (
            profile.rl["per_device_train_batch_size"] * profile.rl["gradient_accumulation_steps"]
        )
        figure.suptitle(
            f"{profile.name}: {rollouts} rollouts a step, mean over {window} steps; {len(profile.seeds)} seed(s), bands: all seeds",
            fontsize=8,
        )
    return figure


def guide_effects(profile: Profile) -> Figure:
    """What the branch guide adds to the expected gradient of each anchor on the embedded model; bars: standard errors over prompts."""
    frame, measured = tables.effects(profile), tables.effects_size(profile)
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.4, 2.3))
        for i, row in enumerate(frame.itertuples()):
            axis.errorbar(
                i, row.along, yerr=row.along_se, capsize=3, **{**series(i + 3), "linestyle": "none"}
            )
        axis.axhline(0, color="0.3", linewidth=0.8)
        axis.set(
            xticks=range(len(frame)),
            xticklabels=["k3 (the paper's)", "k3, corrected", "sequence (eq. 8)"],
            xlim=(-0.5, len(frame) - 0.5),
            ylabel="change of the KL pull\nby the branch guide",
            title=f"{profile.name}: {measured['prompts']} prompts x {measured['batches']} x {measured['completions']} completions, 1 seed\nexact over the next token; bars: 1 s.e. over prompts",
        )
    return figure


def figure2(profile: Profile) -> Figure:
    """Figure 2: training reward by step against held-out pass@1 of GRPO with and without the KL term."""
    frame, table = tables.training(profile), tables.table1(profile)
    window = max(1, profile.rl["max_steps"] // 10)
    methods = [m for m in ("grpo", "grpo_no_kl") if m in profile.methods]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 2.3), width_ratios=[3, 2])
        for method in methods:
            runs = np.stack(
                [
                    _smooth(g["reward"].to_numpy(), window)
                    for _, g in frame[frame["method"] == method].groupby("seed")
                ]
            )
            steps = np.arange(1, runs.shape[1] + 1)
            left.plot(
                steps,
                runs.mean(0),
                label=tables.label(profile, method),
                markevery=max(1, len(steps) // 8),
                **look(profile, method),
            )
            left.fill_between(
                steps,
                runs.min(0),
                runs.max(0),
                color=look(profile, method)["color"],
                alpha=0.15,
                linewidth=0,
            )
        left.set(
            xlabel="RL step",
            ylabel="training reward",
            title=f"mean over {window} steps; bands: all {len(profile.seeds)} seed(s)",
        )
        left.legend()
        for position, method in enumerate(["base", *methods]):
            row = table[
                (table["row"] == tables.label(profile, method))
                & (table["dataset"] == "Avg")
                & (table["metric"] == "pass@1")
            ].iloc[0]
            right.errorbar(
                position,
                row["mean"],
                yerr=[[row["mean"] - row["low"]], [row["high"] - row["mean"]]],
                capsize=3,
                **{**look(profile, method), "linestyle": "none"},
            )
        right.set(
            xticks=range(len(methods) + 1),
            xticklabels=["base", *(tables.label(profile, m) for m in methods)],
            ylabel="held-out pass@1",
            xlim=(-0.5, len(methods) + 0.5),
            ylim=(0, None),
            title=f"{row['problems']} problems x {profile.evaluation.samples}; bars: 95 %",
        )
    return figure


def figure3(
    profile: Profile, methods: tuple[str, ...] = ("base", "grpo", "grpo_branch"), ood: bool = False
) -> Figure:
    """Figure 3: pass@k by k for each data set, with 95 % bootstrap bands over problems (seeds averaged first).

    With ``ood``, Figure 4: the same on the data outside Table 1, Knights and Knaves where the profile's model can read them.
    """
    frame, settings = tables.evaluations(profile, ood), profile.evaluation
    methods = tuple(m for m in methods if m == "base" or m in evaluated(profile))
    datasets = list(dict.fromkeys(frame["dataset"]))
    columns = min(len(datasets), 4)
    lines = -(-len(datasets) // columns)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            lines,
            columns,
            figsize=(WIDE if columns > 1 else NARROW + 0.6, 0.7 + 1.8 * lines),
            sharey=True,
            squeeze=False,
        )
        for axis, dataset in zip(axes.flat, datasets, strict=False):
            for method in methods:
                curves, _ = tables.curves(frame[frame["dataset"] == dataset], method, settings.ks)
                low, high = metrics.bootstrap_interval(curves, settings.resamples, settings.seed)
                axis.plot(
                    settings.ks,
                    curves.mean(0),
                    label=tables.label(profile, method),
                    **look(profile, method),
                )
                axis.fill_between(
                    settings.ks,
                    low,
                    high,
                    color=look(profile, method)["color"],
                    alpha=0.15,
                    linewidth=0,
                )
            axis.set(
                xlabel="k",
                title=f"{dataset.replace('_', ' ')} ({curves.shape[0]} problems)",
                ylim=(-0.02, 1.02),
            )
            axis.set_xscale("log", base=2)
            axis.set_xticks(settings.ks[::2], [str(k) for k in settings.ks[::2]])
        for axis in axes.flat[len(datasets) :]:
            axis.axis("off")
        for axis in axes[:, 0]:
            axis.set_ylabel("pass@k")
        runs = frame[frame["method"] == methods[-1]]["run"].nunique()
        figure.suptitle(
            f"{profile.name}: {settings.samples} samples a problem, {runs} seed(s); bands: 95 % over problems",
            fontsize=8,
        )
        figure.legend(
            *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(methods)
        )
    return figure


def mode_shares(profile: Profile) -> Figure:
    """The rare way's share of samples and the share of problems solved validly both ways, by method."""
    frame = tables.modes(profile)
    keys = ["base", *evaluated(profile)]
    panels = [
        ("rare_share", "rare_low", "rare_high", "rare way, share of samples"),
        ("both_ways", "both_ways_low", "both_ways_high", "problems solved both ways"),
    ]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, 2.3 if len(keys) < 5 else 3.2))
        for axis, (mean, low, high, name) in zip(axes, panels, strict=True):
            for position, (method, (_, row)) in enumerate(zip(keys, frame.iterrows(), strict=True)):
                axis.errorbar(
                    position,
                    row[mean],
                    yerr=[[max(row[mean] - row[low], 0)], [max(row[high] - row[mean], 0)]],
                    capsize=3,
                    **{**look(profile, method), "linestyle": "none"},
                )
            top = max(frame[high].max() * 1.1, 0.01)  # a row of zeros still needs an axis
            axis.set(
                xticks=range(len(keys)),
                xticklabels=frame["row"],
                ylabel=name,
                ylim=(-0.03 * top, top),
                xlim=(-0.5, len(keys) - 0.5),
            )
            axis.tick_params(axis="x", rotation=15 if len(keys) < 5 else 60)
        figure.suptitle(
            f"{profile.name}: {profile.evaluation.samples} samples a problem, {len(profile.seeds)} seed(s); bars: 95 % over problems",
            fontsize=8,
        )
    return figure
