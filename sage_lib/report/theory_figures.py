"""Figures of the exact notebooks, in the companion's style: arrays in, a matplotlib Figure out."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from sage_lib.report.figures import NARROW, STYLE, WIDE, series
from sage_lib.theory import solutions, two_path
from sage_lib.theory.estimators import LABELS
from sage_lib.theory.tree import Tree
from sage_lib.theory.two_path import Example

#: One look per anchor in every figure.
ANCHORS = ("k3", "k3_corrected", "sequence")


def fixed_points(tables: dict[str, pd.DataFrame], completion: str) -> Figure:
    """Probability of one completion at the reference, in the closed forms and where each anchor leads, by guide.

    ``tables``: guide name -> findings.fixed_points.
    """
    policies = ["reference", "eq. 4", "eq. 27 (forward KL)", *ANCHORS]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(WIDE, 2.4))
        for i, policy in enumerate(policies):
            values = [
                float(t.loc[t["completion"] == completion, policy].iloc[0]) for t in tables.values()
            ]
            axis.plot(
                np.arange(len(tables)) + (i - 2.5) * 0.09,
                values,
                **{**series(i), "linestyle": "none"},
                label=LABELS.get(policy, policy),
            )
        axis.set(
            xticks=range(len(tables)),
            xticklabels=[f"guide: {g}" for g in tables],
            ylabel=f"probability of “{completion}”",
            ylim=(0, None),
            title="exact, no sampling",
        )
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def distances(frame: pd.DataFrame) -> Figure:
    """Total variation between where each anchor leads and eq. 4, by beta (one panel per depth) and by entropy.

    ``frame``: findings.distances. Points are means over instances, bars their standard deviation.
    """
    depths = sorted(frame["depth"].unique())
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(depths) + 1, figsize=(WIDE, 2.4), sharey=True)
        for axis, depth in zip(axes, depths, strict=False):
            for i, anchor in enumerate(ANCHORS):
                by = frame[(frame["depth"] == depth) & (frame["estimator"] == anchor)].groupby(
                    "beta"
                )["distance"]
                axis.errorbar(
                    by.mean().index,
                    by.mean(),
                    yerr=by.std(),
                    capsize=2,
                    label=LABELS[anchor],
                    **series(i + 3),
                )
            n = frame[frame["depth"] == depth].groupby(["sharpness", "seed"]).ngroups
            axis.set(xlabel="beta", xscale="log", title=f"depth {depth}, {n} trees")
        deepest = frame[frame["depth"] == depths[-1]]
        for i, anchor in enumerate(ANCHORS):
            points = (
                deepest[deepest["estimator"] == anchor]
                .groupby(["sharpness", "seed"])[["entropy", "distance"]]
                .mean()
            )
            axes[-1].plot(
                points["entropy"], points["distance"], **{**series(i + 3), "linestyle": "none"}
            )
        axes[-1].set(
            xlabel="mean token entropy of $\\pi_{ref}$ (nats)",
            title=f"depth {depths[-1]}, mean over beta",
        )
        axes[0].set_ylabel("distance to eq. 4 (total variation)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def ratios(frame: pd.DataFrame, completion: str) -> Figure:
    """Probability of one completion at each anchor's fixed point against the guide's ratio.

    ``frame``: columns ratio, "eq. 4" and one per anchor.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.4, 2.6))
        for i, column in enumerate(["eq. 4", *ANCHORS]):
            axis.plot(
                frame["ratio"],
                frame[column] / frame[column].iloc[0],
                label=LABELS.get(column, column),
                markevery=2,
                **series(i + (1 if i == 0 else 2)),
            )
        axis.set(
            xlabel="ratio of the branch guide (eq. 11)",
            ylabel=f"“{completion}”, relative to ratio 0",
            title="exact, no sampling; q not clamped",
        )
        figure.legend(loc="outside lower center", ncols=1)
    return figure


def two_path_probabilities(example: Example, fork: float = 0.05, spread: int = 6) -> Figure:
    """Appendix C in numbers: the rare correct completion under pi_ref, eq. 2 and eq. 4, in the example and on the tree."""
    cases = [
        ("as in Appendix C", *two_path.example_inputs(example)),
        ("on the tree", *two_path.tree_inputs(fork, spread)),
    ]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.6, 2.5))
        for case, (_, reference, reward, entropies) in enumerate(cases):
            q = two_path.branch(entropies, example.threshold, example.ratio).prod(-1)
            policies = {
                "$\\pi_{ref}$": reference,
                "$\\pi_{RLVR}$ (eq. 2)": solutions.tilted(reference, reward, example.beta),
                "$\\pi_{SAGE}$ (eq. 4)": solutions.tilted(reference, reward, example.beta, q),
            }
            for i, (name, policy) in enumerate(policies.items()):
                axis.bar(
                    case + (i - 1) * 0.26,
                    float(policy[1]),
                    width=0.24,
                    color=series(i + 1)["color"],
                    hatch=("", "//", "xx")[i],
                    edgecolor="white",
                    label=name if case == 0 else None,
                )
                axis.annotate(
                    f"{float(policy[1]):.4f}",
                    (case + (i - 1) * 0.26, float(policy[1])),
                    ha="center",
                    va="bottom",
                    fontsize=6,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
                )
        axis.axhline(
            example.epsilon,
            color="0.2",
            linestyle="--",
            zorder=0,
            label=f"epsilon = {example.epsilon}",
        )
        axis.set(
            xticks=range(2),
            xticklabels=[c[0] for c in cases],
            ylabel="probability of the rare solution",
            title=f"exact; beta {example.beta}, threshold {example.threshold}, ratio {example.ratio}",
        )
        axis.set_ylim(0, axis.get_ylim()[1] * 1.08)
        axis.grid(axis="x", visible=False)
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def two_path_region(
    example: Example, rares: tuple[float, ...] = (0.0070, 0.0075, 0.0079, 0.0083), spread: int = 6
) -> Figure:
    """Which (ratio, threshold, pi_ref) satisfy Theorem 4.3: inside each boundary, for that pi_ref of the rare solution.

    Left as in Appendix C, right on the tree (whose fork is set so that the rare solution has the same pi_ref).
    """
    thresholds, ratios = (
        torch.linspace(0, 2, 121, dtype=torch.float64),
        torch.linspace(0, 1, 101, dtype=torch.float64),
    )
    panels = [
        (
            "as in Appendix C",
            lambda rare: two_path.example_inputs(Example(**{**vars(example), "rare": rare})),
        ),
        ("on the tree", lambda rare: two_path.tree_inputs(rare * spread, spread)),
    ]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, 3.0), sharey=True)
        for axis, (name, inputs) in zip(axes, panels, strict=True):
            for i, rare in enumerate(rares):
                margin = two_path.margins(
                    *inputs(rare), example.beta, example.epsilon, thresholds, ratios
                ).numpy()
                look = {k: v for k, v in series(i + 1).items() if k in ("color", "linestyle")}
                if margin.min() < 0 < margin.max():
                    axis.contour(
                        thresholds,
                        ratios,
                        margin,
                        levels=[0],
                        colors=[look["color"]],
                        linestyles=[look["linestyle"]],
                        linewidths=1.4,
                    )
                note = (
                    ": nowhere"
                    if margin.max() <= 0
                    else ": everywhere"
                    if margin.min() >= 0
                    else ""
                )
                axis.plot([], [], **look, label=f"$\\pi_{{ref}}$ = {rare}{note}")
            margin = two_path.margins(
                *inputs(example.rare), example.beta, example.epsilon, thresholds, ratios
            ).numpy()
            axis.contourf(thresholds, ratios, margin, levels=[0, np.inf], colors=["0.9"])
            axis.plot(
                example.threshold,
                example.ratio,
                marker="*",
                color="black",
                markersize=8,
                linestyle="none",
            )
            axis.set(xlabel="threshold (nats)", title=name)
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
        axes[0].set_ylabel("ratio")
        figure.suptitle(
            f"Theorem 4.3 holds inside each boundary (grey: pi_ref = {example.rare}; star: threshold {example.threshold}, ratio {example.ratio}); epsilon {example.epsilon}, beta {example.beta}",
            fontsize=7,
        )
    return figure


def explore_two_path(
    rare: float, beta: float, epsilon: float, threshold: float, ratio: float
) -> Figure:
    """:func:`two_path_region` with every number as an argument, for sliders; eq. 36 in words as its caption."""
    example = Example(rare=rare, beta=beta, epsilon=epsilon, threshold=threshold, ratio=ratio)
    figure = two_path_region(example, (rare,))
    last = two_path.conditions(example).iloc[-1]
    figure.supxlabel(
        f"as in Appendix C: pi_SAGE(rare) = {last['value']:.5f}, {'above' if last['holds'] else 'not above'} epsilon = {epsilon:.4f}",
        fontsize=8,
    )
    plt.close(figure)  # shown once, as the value
    return figure


def tree(
    tree: Tree, log_policy: torch.Tensor, title: str, leaves: dict[str, torch.Tensor] | None = None
) -> Figure:
    """A tree with its probabilities on the edges and H_t (nats) in the states; ``leaves``: columns of numbers beside the leaves."""
    order = sorted(
        range(len(tree.completions)),
        key=lambda i: [
            tree.edges.index((tree.completions[i][:t], tree.completions[i][t]))
            for t in range(len(tree.completions[i]))
        ],
    )
    height = {tree.completions[i]: -row for row, i in enumerate(order)}
    for state in sorted(tree.states, key=len, reverse=True):
        height[state] = float(
            np.mean([height[(*state, token)] for s, token in tree.edges if s == state])
        )
    depth, entropy = (
        max(map(len, tree.completions)),
        dict(zip(tree.states, tree.entropies(log_policy).tolist(), strict=True)),
    )
    columns = leaves or {}
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(WIDE, 0.6 + 0.3 * len(tree.completions)))
        for (state, token), log_p in zip(tree.edges, log_policy.tolist(), strict=True):
            (x0, y0), (x1, y1) = (
                (len(state), height[state]),
                (len(state) + 1, height[(*state, token)]),
            )
            axis.plot(
                [x0, x1], [y0, y1], color="0.4", linewidth=0.4 + 2.2 * np.exp(log_p), zorder=1
            )
            axis.annotate(
                f"{token} {np.exp(log_p):.3g}",
                (x0 + 0.62 * (x1 - x0), y0 + 0.62 * (y1 - y0)),
                ha="center",
                va="bottom",
                fontsize=6,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8},
            )
        for state, h in entropy.items():
            axis.annotate(
                f"H={h:.2f}",
                (len(state), height[state]),
                ha="center",
                va="center",
                fontsize=6.5,
                bbox={
                    "boxstyle": "round",
                    "facecolor": plt.cm.Blues(0.08 + 0.4 * min(h / 2, 1)),
                    "edgecolor": "0.3",
                    "linewidth": 0.5,
                },
            )
        for c, (name, values) in enumerate(columns.items()):
            axis.annotate(name, (depth + 0.3 + 0.42 * c, 0.7), ha="center", fontsize=6.5)
            for completion, value in zip(tree.completions, values.tolist(), strict=True):
                axis.annotate(
                    f"{value:.4f}",
                    (depth + 0.3 + 0.42 * c, height[completion]),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                )
        axis.set(
            xlim=(-0.25, depth + 0.2 + 0.42 * len(columns)),
            ylim=(-len(order) + 0.4, 1.1),
            title=title,
        )
        axis.axis("off")
    return figure


def detection(frame: pd.DataFrame, marks: dict[str, float]) -> Figure:
    """Theorem 4.2 as a budget: the chance to see a completion at all, by its probability, for several numbers of rollouts."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.6, 2.6))
        for i, rollouts in enumerate(frame.columns[1:]):
            axis.plot(
                frame["probability"],
                frame[rollouts],
                label=f"{rollouts:,} rollouts",
                markevery=12,
                **series(i + 1),
            )
        for i, (name, p) in enumerate(marks.items()):
            axis.axvline(
                p,
                color="0.3",
                linewidth=0.8,
                linestyle=((0, (1, 2)), "-")[i % 2],
                label=f"{name}: {p:.4f}",
            )
        axis.set(
            xscale="log",
            xlabel="probability of a completion",
            ylabel="chance of at least one",
            ylim=(0, 1.04),
            title="exact, no sampling",
        )
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def bonus_against_guide(bonus: pd.DataFrame, guided: pd.DataFrame, names: dict[int, str]) -> Figure:
    """A.2: what an entropy bonus (left) and a guide (right) do to the same completions, relative to no bonus, no guide.

    ``bonus``: closed_forms.bonuses; ``guided``: columns strength and completion numbers; ``names``: completion -> label.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, 2.5), sharey=True)
        for axis, frame, x, label in (
            (axes[0], bonus, "lambda", "entropy bonus lambda"),
            (axes[1], guided, "strength", "q of the rare correct completion"),
        ):
            for i, (completion, name) in enumerate(names.items()):
                axis.plot(
                    frame[x],
                    frame[completion] / frame[completion].iloc[0],
                    label=name,
                    **series(i + 1),
                )
            axis.set(xlabel=label, yscale="log")
            axis.axhline(1, color="0.4", linewidth=0.7)
        axes[0].set(ylabel="probability, relative to eq. 2", title="eq. 21: a temperature")
        axes[1].set(title="eq. 4: a direction")
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names)
        )
    return figure


def separation(frame: pd.DataFrame) -> Figure:
    """A.4: mass on wrong completions under eq. 4 against eq. 27, by whether the separation condition (eq. 30) holds."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(NARROW + 0.4, 2.9))
        for i, (holds, group) in enumerate(frame.groupby("eq30")):
            axis.scatter(
                group["forward"],
                group["sage"],
                s=5,
                marker="o^"[i],
                facecolor="none" if not holds else series(i + 2)["color"],
                edgecolor=series(i + 2)["color"],
                linewidth=0.4,
                alpha=0.6,
                label=f"eq. 30 {'holds' if holds else 'fails'} ({len(group):,})",
            )
        axis.plot([0, 1], [0, 1], color="0.3", linewidth=0.8)
        axis.set(
            xlabel="mass on wrong completions, forward KL (eq. 27)",
            ylabel="the same, eq. 4",
            title=f"{len(frame):,} random instances",
            xlim=(0, 1),
            ylim=(0, 1),
        )
        axis.legend(loc="upper left")
    return figure


def figure5(density: pd.DataFrame, fits: pd.DataFrame) -> Figure:
    """Figure 5: one Gaussian fitted to a mixture of two by the reverse and by the forward KL."""
    best = fits.groupby("divergence", sort=False).first()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(WIDE, 2.2), sharey=True)
        shown = density[density["x"].abs() < 7]
        for i, (axis, key) in enumerate(zip(axes, ("reverse", "forward"), strict=True)):
            axis.fill_between(
                shown["x"],
                shown["target"],
                color="0.85",
                label="target: two modes" if i == 0 else None,
            )
            axis.plot(
                shown["x"],
                shown[key],
                **{**series(i + 2), "marker": ""},
                label=f"best Gaussian, {key} KL",
            )
            axis.set(
                xlabel="x",
                title=f"{best.index[i]}\nmean {best['mean'].iloc[i]:.2f}, sd {best['sd'].iloc[i]:.2f}, {best['value'].iloc[i]:.3f} nats",
            )
        axes[0].set_ylabel("density")
        figure.legend(loc="outside lower center", ncols=3)
    return figure
