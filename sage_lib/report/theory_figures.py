"""Figures of the exact notebooks, in the companion's style: arrays in, a matplotlib Figure out."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from sage_lib.algorithm.guides import HIGH
from sage_lib.report.style import GLYPHS, NARROW, STYLE, WIDE, describe, line, points, series
from sage_lib.theory import solutions, two_path
from sage_lib.theory.estimators import LABELS, OFFERED
from sage_lib.theory.objectives import CLAIMS
from sage_lib.theory.tree import Completion, Tree
from sage_lib.theory.two_path import Example

if TYPE_CHECKING:
    import ipywidgets

#: Size of the words in the columns beside a tree.
COLUMN_FONT = 6.5
#: Labels of the anchors for titles, without whose they are.
SHORT = {anchor: label.split(" (")[0] for anchor, label in LABELS.items()}
#: Policies of objectives.fixed_points whose places are compared, in this order.
LED = ("reference", "eq. 4", *OFFERED)
#: An anchor that rests this close to eq. 4 meets it: the optimiser settles no more digits.
MEETS = 1e-5
#: A claim holds where it fails by less than this, relatively.
HOLDS = 1e-6
#: Relative differences below this are rounding.
ROUNDING = 1e-13
#: reference, reward and entropies, as two_path.margins takes them.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def fixed_points(tables: Mapping[str, pd.DataFrame], completion: str) -> Figure:
    """Probability of one completion under the reference, the closed forms and each anchor.

    ``tables``: kind of guide -> objectives.fixed_points.
    """
    policies = ["reference", "eq. 4", "eq. 27 (forward KL)", *OFFERED]
    rows = {kind: table.set_index("completion").loc[completion] for kind, table in tables.items()}
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(WIDE, 2.9))
        for i, policy in enumerate(policies):
            x = np.arange(len(rows)) + (i - 2.5) * 0.09
            values = [float(row[policy]) for row in rows.values()]
            axis.plot(x, values, **points(series(i)), label=LABELS.get(policy, policy))
        axis.set(
            xticks=range(len(rows)),
            xticklabels=[f"guide: {kind}" for kind in rows],
            ylabel=f"probability of “{completion}”",
            ylim=(0, None),
        )
        figure.legend(loc="outside lower center", ncols=3)
        off = {
            anchor: max(abs(float(row[anchor]) - float(row["eq. 4"])) for row in rows.values())
            for anchor in OFFERED
        }
        meets = [SHORT[anchor] for anchor, distance in off.items() if distance < MEETS]
        farthest = max(off, key=off.__getitem__)
        describe(
            figure,
            f"At rest where eq. 4 says: {', '.join(meets) or 'no anchor'}; farthest off, by "
            f"{off[farthest]:.2g}: {SHORT[farthest]}",
            "Exact, nothing sampled, summed over tokens",
        )
    return figure


def claims(frame: pd.DataFrame) -> Figure:
    """By how much each claim fails under each loss: a panel per claim, a point per tree.

    ``frame``: objectives.claims; trees on which all completions have one length are left out. The
    bar is the median; what is below 1e-13 is rounding, another one on another machine, and drawn
    there.
    """
    frame = frame[frame["unequal"]]
    names = list(dict.fromkeys(frame["loss"]))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(CLAIMS), figsize=(WIDE, 2.3), sharey=True)
        for axis, (claim, title) in zip(axes, CLAIMS.items(), strict=True):
            of_claim = frame[frame["claim"] == claim]
            for i, name in enumerate(names):
                found = of_claim.loc[of_claim["loss"] == name, "difference"]
                values = found.clip(lower=ROUNDING).map(lambda value: float(f"{value:.6g}"))
                x = i + np.linspace(-0.25, 0.25, len(values))
                axis.plot(x, values, **{**points(series(i)), "markersize": 2})
                axis.hlines(values.median(), i - 0.38, i + 0.38, color="black", linewidth=1)
            axis.axhline(ROUNDING, color="0.4", linewidth=0.6, linestyle=":")
            axis.set(yscale="log", xticks=range(len(names)), title=fill(title, 26))
            axis.set_xticklabels(names, rotation=60)
            axis.grid(axis="x", visible=False)
        trees = frame["seed"].nunique()
        axes[0].set_ylabel("relative difference")
        worst = frame.groupby("loss", sort=False)["difference"].max()
        hold = ", ".join(worst.index[worst < HOLDS]) or "no loss"
        fail = ", ".join(worst.index[worst >= HOLDS]) or "no loss"
        describe(
            figure,
            f"All claims hold on every tree under {hold}; not all do under {fail}",
            f"Exact, {trees} trees with completions of unequal length",
            "a point per tree, bars: medians, dotted: rounding",
        )
    return figure


def distances(frame: pd.DataFrame) -> Figure:
    """Total variation between where each anchor leads and eq. 4.

    A panel per depth by beta, and one by entropy. ``frame``: objectives.distances. Points are means
    over trees, bars their range; of 6 decimals, which the optimiser settles.
    """
    frame = frame.round({"distance": 6})
    depths = sorted(frame["depth"].unique())
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(depths) + 1, figsize=(WIDE, 2.7), sharey=True)
        for axis, depth in zip(axes, depths, strict=False):
            _distances_by_beta(axis, frame[frame["depth"] == depth])
            trees = frame[frame["depth"] == depth].groupby(["sharpness", "seed"]).ngroups
            axis.set(xlabel="beta", xscale="log", title=f"depth {depth}, {trees} trees")
        _distances_by_entropy(axes[-1], frame[frame["depth"] == depths[-1]])
        axes[-1].set(
            xlabel="mean token entropy of $\\pi_{ref}$ (nats)",
            title=f"depth {depths[-1]}, mean over beta",
        )
        axes[0].set_ylabel("total variation to eq. 4")
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3)
        deepest = frame[frame["depth"] == depths[-1]].groupby("estimator")["distance"].max()
        worst = ", ".join(f"{SHORT[anchor]} {deepest[anchor]:.2g}" for anchor in OFFERED)
        describe(
            figure,
            f"Largest distance at depth {depths[-1]}: {worst}",
            "Exact, nothing sampled",
            "lines: means over trees, bars: from the nearest to the farthest tree",
        )
    return figure


def _distances_by_beta(axis: Axes, frame: pd.DataFrame) -> None:
    for i, anchor in enumerate(OFFERED):
        by_beta = frame[frame["estimator"] == anchor].groupby("beta")["distance"]
        mean = by_beta.mean()
        spread = np.maximum([mean - by_beta.min(), by_beta.max() - mean], 0)
        label, look = LABELS[anchor], series(i + 3)
        axis.errorbar(mean.index, mean, yerr=spread, capsize=2, label=label, **look)


def _distances_by_entropy(axis: Axes, frame: pd.DataFrame) -> None:
    for i, anchor in enumerate(OFFERED):
        by_tree = frame[frame["estimator"] == anchor].groupby(["sharpness", "seed"])
        mean = by_tree[["entropy", "distance"]].mean()
        axis.plot(mean["entropy"], mean["distance"], **points(series(i + 3)))


#: The paper's ratio of the branch guide (Table 8).
RATIO = 0.3


def branch_ratio(frame: pd.DataFrame, completion: str, most: float | None = None) -> Figure:
    """Probability of one completion at each anchor's fixed point against the guide's ratio.

    ``frame``: objectives.by_ratio. ``most``: the ratio from which on q would be clamped.
    """
    looks = {"eq. 4": series(1)}
    looks.update({anchor: series(i + 3) for i, anchor in enumerate(OFFERED)})
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.4, 2.9))
        for policy, look in looks.items():
            relative = frame[policy] / frame[policy].iloc[0]
            label = LABELS.get(policy, policy)
            axis.plot(frame["ratio"], relative, label=label, markevery=2, **look)
        axis.set(
            xlabel="ratio of the branch guide (eq. 11)",
            ylabel=f"“{completion}”,\nrelative to ratio 0",
        )
        if most is not None:
            axis.axvline(most, color="0.3", linewidth=0.8, linestyle=":")
        figure.legend(loc="outside lower center", ncols=1)
        paper = frame.iloc[(frame["ratio"] - RATIO).abs().argmin()]
        gains = {policy: paper[policy] / frame[policy].iloc[0] for policy in looks}
        least = min(gains, key=gains.__getitem__)
        describe(
            figure,
            f"Ratio {paper['ratio']:.2g}: eq. 4 multiplies it by {gains['eq. 4']:.2f}, "
            f"{SHORT.get(least, least)} by {gains[least]:.2f}",
            "Exact for a sum over tokens, q not clamped"
            + (f"; right of the dotted line it would be, at {HIGH:g}" if most else ""),
        )
    return figure


def two_path_probabilities(example: Example, fork: float = 0.05, spread: int = 6) -> Figure:
    """Appendix C in numbers: the rare correct completion under pi_ref, eq. 2 and eq. 4.

    Once as in the example, once on the tree with that ``fork`` and ``spread``.
    """
    cases = {
        "as in Appendix C": two_path.example_inputs(example),
        "on the tree": two_path.tree_inputs(fork, spread),
    }
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.6, 2.5))
        reached = [
            _rare_bars(axis, place, example, inputs) for place, inputs in enumerate(cases.values())
        ]
        axis.axhline(
            example.epsilon,
            color="0.2",
            linestyle="--",
            zorder=0,
            label=f"epsilon = {example.epsilon}",
        )
        settings = f"beta {example.beta}, threshold {example.threshold}, ratio {example.ratio}"
        axis.set(
            xticks=range(len(cases)),
            xticklabels=list(cases),
            ylabel="probability of\nthe rare solution",
        )
        axis.set_ylim(0, axis.get_ylim()[1] * 1.08)
        axis.grid(axis="x", visible=False)
        figure.legend(loc="outside lower center", ncols=2)
        values = [f"{value:.4f} {name}" for name, value in zip(cases, reached, strict=True)]
        describe(
            figure,
            f"$\\pi_{{SAGE}}$ against epsilon {example.epsilon:g}: {', '.join(values)}",
            f"Exact, {settings}",
        )
    return figure


def _rare_bars(axis: Axes, place: int, example: Example, inputs: Inputs) -> float:
    """Three bars around x = ``place``, each with its number above; named in the legend once.

    Returns the last one's height, pi_SAGE."""
    reference, reward, entropies = inputs
    q = two_path.branch_q(entropies, example.threshold, example.ratio).prod(-1)
    policies = {
        "$\\pi_{ref}$": reference,
        "$\\pi_{RLVR}$ (eq. 2)": solutions.tilted(reference, reward, example.beta),
        "$\\pi_{SAGE}$ (eq. 4)": solutions.tilted(reference, reward, example.beta, q),
    }
    for i, (name, policy) in enumerate(policies.items()):
        x, height = place + (i - 1) * 0.26, float(policy[1])
        axis.bar(
            x,
            height,
            width=0.24,
            color=series(i + 1)["color"],
            hatch=("", "//", "xx")[i],
            edgecolor="white",
            label=name if place == 0 else None,
        )
        axis.annotate(
            f"{height:.4f}",
            (x, height),
            ha="center",
            va="bottom",
            fontsize=6,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        )
    return height


def two_path_region(
    example: Example, rares: tuple[float, ...] = (0.0070, 0.0075, 0.0079, 0.0083), spread: int = 6
) -> Figure:
    """Which (ratio, threshold, pi_ref) satisfy Theorem 4.3: inside each boundary, for that pi_ref.

    Left as in Appendix C, right on the tree, whose fork is set so that the rare solution has the
    same pi_ref.
    """

    def in_example(rare: float) -> Inputs:
        return two_path.example_inputs(replace(example, rare=rare))

    def on_tree(rare: float) -> Inputs:
        return two_path.tree_inputs(rare * spread, spread)

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, 3.0), sharey=True)
        _region(axes[0], example, rares, in_example)
        _region(axes[1], example, rares, on_tree)
        axes[0].set(title="as in Appendix C", ylabel="ratio")
        axes[1].set(title="on the tree")
        star = f"star: threshold {example.threshold}, ratio {example.ratio}"
        figure.suptitle(
            f"Theorem 4.3 holds inside each boundary (grey: pi_ref = {example.rare}; {star}); "
            f"epsilon {example.epsilon}, beta {example.beta}",
            fontsize=7,
        )
    return figure


def _region(
    axis: Axes, example: Example, rares: tuple[float, ...], inputs: Callable[[float], Inputs]
) -> None:
    """A boundary for each pi_ref of the rare solution; the example's own region in grey."""
    thresholds = torch.linspace(0, 2, 121, dtype=torch.float64)
    ratios = torch.linspace(0, 1, 101, dtype=torch.float64)

    def margin(rare: float) -> np.ndarray:
        beta, epsilon = example.beta, example.epsilon
        return two_path.margins(*inputs(rare), beta, epsilon, thresholds, ratios).numpy()

    for i, rare in enumerate(rares):
        values = margin(rare)
        look = line(series(i + 1))
        if values.max() <= 0:
            note = ": nowhere"
        elif values.min() >= 0:
            note = ": everywhere"
        else:
            note = ""
            axis.contour(
                thresholds,
                ratios,
                values,
                levels=[0],
                colors=[look["color"]],
                linestyles=[look["linestyle"]],
                linewidths=1.4,
            )
        axis.plot([], [], **look, label=f"$\\pi_{{ref}}$ = {rare}{note}")
    own = margin(example.rare)
    axis.contourf(thresholds, ratios, own, levels=[0, np.inf], colors=["0.9"])
    axis.plot(
        example.threshold,
        example.ratio,
        marker="*",
        color="black",
        markersize=8,
        linestyle="none",
    )
    axis.set(xlabel="threshold (nats)")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)


def explore_two_path(
    rare: float, beta: float, epsilon: float, threshold: float, ratio: float
) -> Figure:
    """:func:`two_path_region` with every number as an argument, for sliders.

    Its caption says eq. 36 in words.
    """
    example = Example(rare=rare, beta=beta, epsilon=epsilon, threshold=threshold, ratio=ratio)
    figure = two_path_region(example, (rare,))
    last = two_path.conditions(example).iloc[-1]
    side = "above" if last["holds"] else "not above"
    figure.supxlabel(
        f"as in Appendix C: pi_SAGE(rare) = {last['value']:.5f}, {side} epsilon = {epsilon:.4f}",
        fontsize=8,
    )
    plt.close(figure)  # shown once, as the value
    return figure


def two_path_sliders(example: Example) -> ipywidgets.VBox:
    """Sliders for the numbers of :func:`explore_two_path` and its figure below, drawn anew at each
    move; they start at ``example``'s.

    The figure is a picture of its own (the last child) and not a cell's output: JupyterLab has no
    cell to put the output of a moved slider in.
    """
    import ipywidgets  # a notebook's: results are read without it

    ranges: dict[str, dict[str, Any]] = {
        "rare": {"min": 0.004, "max": 0.012, "step": 0.0001, "readout_format": ".4f"},
        "beta": {"min": 0.05, "max": 2, "step": 0.05},
        "epsilon": {"min": 0.005, "max": 0.02, "step": 0.0005, "readout_format": ".4f"},
        "threshold": {"min": 0, "max": 2, "step": 0.05},
        "ratio": {"min": 0, "max": 1, "step": 0.05},
    }
    sliders = {
        name: ipywidgets.FloatSlider(
            getattr(example, name), description=name, continuous_update=False, **of_slider
        )
        for name, of_slider in ranges.items()
    }
    picture = ipywidgets.Image(format="png")

    def draw(_: object = None) -> None:
        figure = explore_two_path(**{name: slider.value for name, slider in sliders.items()})
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=150)
        picture.value = drawn.getvalue()

    for slider in sliders.values():
        slider.observe(draw, names="value")
    draw()
    return ipywidgets.VBox([*sliders.values(), picture])


def token_tree(
    tree: Tree,
    log_policy: torch.Tensor,
    title: str,
    leaves: Mapping[str, torch.Tensor] | None = None,
) -> Figure:
    """A tree with its probabilities on the edges and H_t (nats) in the states.

    ``leaves``: name -> a number for each completion, shape (L,): columns beside the leaves.
    """
    columns = leaves or {}
    height = _heights(tree)
    depth = max(map(len, tree.completions))
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(WIDE, 0.6 + 0.3 * len(tree.completions)))
        _draw_edges(axis, tree, log_policy, height)
        _draw_states(axis, tree, log_policy, height)
        edge = depth + 0.15
        for (name, values), width in zip(columns.items(), _widths(columns, depth), strict=True):
            x, edge = edge + width / 2, edge + width
            axis.annotate(name, (x, 0.7), ha="center", fontsize=COLUMN_FONT)
            for completion, value in zip(tree.completions, values.tolist(), strict=True):
                place = (x, height[completion])
                word = f"{value:.4f}"
                axis.annotate(word, place, ha="center", va="center", fontsize=COLUMN_FONT)
        axis.set(xlim=(-0.25, edge), ylim=(-len(tree.completions) + 0.4, 1.1), title=title)
        axis.axis("off")
    return figure


def _widths(columns: Mapping[str, torch.Tensor], depth: int) -> list[float]:
    """How wide the columns beside a tree of that depth are, in its tokens: what their words take,
    and a gap, of the figure's width."""
    gap, numbers = 10.0, 28.0  # points
    headers = [TextPath((0, 0), name, size=COLUMN_FONT).get_extents().width for name in columns]
    needed = [max(width, numbers) + gap for width in headers]
    for_tree = max(WIDE * 72 - 20 - sum(needed), 100.0)
    return [width * (depth + 0.4) / for_tree for width in needed]


def _heights(tree: Tree) -> dict[Completion, float]:
    """y of every completion, top to bottom in the order of the edges, and of every state.

    A state stands at the mean height of what follows it.
    """

    def edges_of(completion: Completion) -> list[int]:
        return [tree.edges.index((completion[:t], completion[t])) for t in range(len(completion))]

    ordered = sorted(tree.completions, key=edges_of)
    height = {completion: float(-row) for row, completion in enumerate(ordered)}
    for state in sorted(tree.states, key=len, reverse=True):
        following = [(*state, token) for before, token in tree.edges if before == state]
        height[state] = float(np.mean([height[node] for node in following]))
    return height


def _draw_edges(
    axis: Axes, tree: Tree, log_policy: torch.Tensor, height: Mapping[Completion, float]
) -> None:
    for (state, token), log_p in zip(tree.edges, log_policy.tolist(), strict=True):
        probability = np.exp(log_p)
        x0, y0 = len(state), height[state]
        x1, y1 = x0 + 1, height[(*state, token)]
        width = 0.4 + 2.2 * probability
        axis.plot([x0, x1], [y0, y1], color="0.4", linewidth=width, zorder=1)
        axis.annotate(
            f"{token} {probability:.3g}",
            (x0 + 0.62 * (x1 - x0), y0 + 0.62 * (y1 - y0)),
            ha="center",
            va="bottom",
            fontsize=6,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8},
        )


def _draw_states(
    axis: Axes, tree: Tree, log_policy: torch.Tensor, height: Mapping[Completion, float]
) -> None:
    for state, entropy in zip(tree.states, tree.entropies(log_policy).tolist(), strict=True):
        shade = plt.get_cmap("Blues")(0.08 + 0.4 * min(entropy / 2, 1))
        axis.annotate(
            f"H={entropy:.2f}",
            (len(state), height[state]),
            ha="center",
            va="center",
            fontsize=6.5,
            bbox={
                "boxstyle": "round",
                "facecolor": shade,
                "edgecolor": "0.3",
                "linewidth": 0.5,
            },
        )


def detection(frame: pd.DataFrame, marks: Mapping[str, float]) -> Figure:
    """Theorem 4.2 as a budget: the chance to see a completion at all, by its probability.

    ``frame``: checks.detection; ``marks``: name -> a probability to mark.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.6, 2.6))
        for i, rollouts in enumerate(frame.columns[1:]):
            label, look = f"{rollouts:,} rollouts", series(i + 1)
            axis.plot(frame["probability"], frame[rollouts], label=label, markevery=12, **look)
        dashes = ((0, (1, 2)), (0, (4, 2)), "-")
        for i, (name, p) in enumerate(marks.items()):
            label = f"{name}: {p:.4f}"
            axis.axvline(p, color="0.3", linewidth=0.8, linestyle=dashes[i % 3], label=label)
        axis.set(
            xscale="log",
            xlabel="probability of a completion",
            ylabel="chance of at least one",
            ylim=(0, 1.04),
        )
        figure.legend(loc="outside lower center", ncols=2)
        needed = [f"{name}: {np.log(0.5) / np.log1p(-p):,.0f}" for name, p in marks.items()]
        describe(
            figure,
            f"Rollouts for an even chance to see it once: {', '.join(needed)}",
            "Exact, nothing sampled",
        )
    return figure


def entropy_bonus(bonus: pd.DataFrame, guided: pd.DataFrame, names: Mapping[int, str]) -> Figure:
    """A.2: what an entropy bonus (left) and a guide (right) do to the same completions.

    Relative to no bonus, no guide. ``bonus``: checks.bonuses; ``guided``: checks.guided;
    ``names``: number of a completion -> label.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, 2.5), sharey=True)
        for axis, frame, column in ((axes[0], bonus, "lambda"), (axes[1], guided, "q")):
            for i, (completion, name) in enumerate(names.items()):
                relative = frame[completion] / frame[completion].iloc[0]
                axis.plot(frame[column], relative, label=name, **series(i + 1))
            axis.set(yscale="log")
            axis.axhline(1, color="0.4", linewidth=0.7)
        axes[0].set(
            xlabel="entropy bonus lambda",
            ylabel="probability, relative to eq. 2",
            title="eq. 21: a temperature",
        )
        axes[1].set(xlabel="q of the rare correct completion", title="eq. 4: a direction")
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(names))
    return figure


def tilting(
    reference: torch.Tensor,
    reward: torch.Tensor,
    guide: torch.Tensor,
    names: Mapping[int, str],
    beta: float,
) -> Figure:
    """Some completions under pi_ref, eq. 2 and eq. 4 at one beta.

    ``reference``, ``reward``, ``guide``: of every completion, shape (L,); ``names``: number of a
    completion -> label. The axis is the same at every beta.
    """
    columns = {
        r"$\pi_{ref}$": reference,
        r"$\pi_{RLVR}$ (eq. 2)": solutions.tilted(reference, reward, beta),
        r"$\pi_{SAGE}$ (eq. 4)": solutions.tilted(reference, reward, beta, guide),
    }
    shown = {
        label: [float(policy[completion]) for completion in names]
        for label, policy in columns.items()
    }
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.9, 2.7))
        _bars(axis, shown, list(names.values()), first=1)
        axis.set(yscale="log", ylim=(1e-5, 1.5), ylabel="probability", title=f"beta = {beta:g}")
        figure.legend(loc="outside lower center", ncols=len(columns))
    return figure


def leads(table: pd.DataFrame, names: Mapping[str, str], beta: float) -> Figure:
    """Some completions where each anchor leads, beside the reference and eq. 4, at one beta.

    ``table``: objectives.fixed_points; ``names``: completion -> label. A policy's bars have its key
    of :func:`led` as gid. The axis is the same at every beta.
    """
    chosen = table.set_index("completion").loc[list(names)]
    shown = {policy: chosen[policy].tolist() for policy in LED}
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.9, 2.7))
        _bars(axis, shown, list(names.values()))
        for gid, bars in zip(led(), axis.containers, strict=True):
            for bar in bars.get_children():
                bar.set_gid(gid)
        axis.set(yscale="log", ylim=(1e-5, 1.5), ylabel="probability", title=f"beta = {beta:g}")
    return figure


def led() -> dict[str, tuple[str, str, str]]:
    """The policies of :func:`leads`: gid of their bars -> label, colour, mark."""
    return {
        policy.replace(" ", ""): (LABELS.get(policy, policy), str(series(i)["color"]), GLYPHS["s"])
        for i, policy in enumerate(LED)
    }


def _bars(
    axis: Axes, shown: Mapping[str, Sequence[float]], names: Sequence[str], first: int = 0
) -> None:
    """Groups of bars, one for each of ``names``: ``shown`` holds a policy's heights by its label;
    ``first``: number of the first one's colour."""
    places, width = np.arange(len(names)), 0.81 / len(shown)
    for i, (label, heights) in enumerate(shown.items()):
        x = places + width * (i - (len(shown) - 1) / 2)
        axis.bar(x, heights, 0.93 * width, label=label, color=series(first + i)["color"])
    axis.set_xticks(places, [name.replace(", ", "\n") for name in names])


def separation(frame: pd.DataFrame) -> Figure:
    """A.4: mass on wrong completions under eq. 4 against eq. 27, by whether eq. 30 holds.

    ``frame``: checks.separations.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.4, 2.9))
        for holds, group in frame.groupby("eq30"):
            colour = series(3 if holds else 2)["color"]
            axis.scatter(
                group["forward"],
                group["sage"],
                s=5,
                marker="^" if holds else "o",
                facecolor=colour if holds else "none",
                edgecolor=colour,
                linewidth=0.4,
                alpha=0.6,
                label=f"eq. 30 {'holds' if holds else 'fails'} ({len(group):,})",
            )
        axis.plot([0, 1], [0, 1], color="0.3", linewidth=0.8)
        axis.set(
            xlabel="mass on wrong completions, forward KL (eq. 27)",
            ylabel="the same, eq. 4",
            xlim=(0, 1),
            ylim=(0, 1),
        )
        axis.legend(loc="upper left")
        where = frame[frame["eq30"]]
        less = int((where["sage"] < where["forward"]).sum())
        describe(
            figure,
            f"Where eq. 30 holds, eq. 4 is below in {less:,} of {len(where):,}",
            f"{len(frame):,} random instances, exact",
        )
    return figure


def figure5(density: pd.DataFrame, fits: pd.DataFrame) -> Figure:
    """Figure 5: one Gaussian fitted to a mixture of two by the reverse and by the forward KL.

    ``fits``, ``density``: checks.gaussian_fits.
    """
    best = fits.groupby("divergence", sort=False).first()
    shown = density[density["x"].abs() < 7]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, 2.2), sharey=True)
        for i, (axis, key) in enumerate(zip(axes, ("reverse", "forward"), strict=True)):
            label = "target: two modes" if i == 0 else None
            axis.fill_between(shown["x"], shown["target"], color="0.85", label=label)
            look = line(series(i + 2))
            axis.plot(shown["x"], shown[key], label=f"best Gaussian, {key} KL", **look)
            fit = best.iloc[i]
            found = f"mean {fit['mean']:.2f}, sd {fit['sd']:.2f}, {fit['value']:.3f} nats"
            axis.set(xlabel="x", title=f"{best.index[i]}\n{found}")
        axes[0].set_ylabel("density")
        figure.legend(loc="outside lower center", ncols=3)
    return figure
