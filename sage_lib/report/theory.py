"""The drawing of a token tree, for the notebooks of the theory."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from sage_lib.report.style import STYLE, describe
from sage_lib.theory.tree import Completion, Tree

#: Width of a column of numbers beside the leaves, in tokens.
COLUMN = 0.45


def token_tree(
    tree: Tree, log_policy: Tensor, title: str, leaves: Mapping[str, Tensor] | None = None
) -> Figure:
    """Draw a tree with its probabilities on the edges and H_t (nats) in the states.

    ``leaves`` names numbers, one for each completion, that are written beside the leaves.
    """
    columns = leaves or {}
    heights = _heights(tree)
    edge = max(map(len, tree.completions)) + 0.3
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6.75, 0.6 + 0.3 * len(tree.completions)))
        _draw_edges(axis, tree, log_policy, heights)
        _draw_states(axis, tree, log_policy, heights)
        for place, (name, values) in enumerate(columns.items()):
            x = edge + COLUMN * place
            axis.text(x, 0.7, name, ha="center", fontsize=6.5)
            for completion, value in zip(tree.completions, values.tolist(), strict=True):
                axis.text(
                    x, heights[completion], f"{value:.4f}", ha="center", va="center", size=6.5
                )
        right = edge + COLUMN * len(columns) - 0.2
        axis.set(xlim=(-0.25, right), ylim=(0.4 - len(tree.completions), 1.1))
        axis.axis("off")
        describe(figure, title)
    return figure


def _heights(tree: Tree) -> dict[Completion, float]:
    """Return y of completions, in the order of the edges, and of states, between their children."""
    number = {edge: i for i, edge in enumerate(tree.edges)}
    ordered = sorted(tree.completions, key=lambda c: [number[c[:t], c[t]] for t in range(len(c))])
    heights = {completion: float(-row) for row, completion in enumerate(ordered)}
    for state in sorted(tree.states, key=len, reverse=True):
        following = [(*state, token) for before, token in tree.edges if before == state]
        heights[state] = float(np.mean([heights[node] for node in following]))
    return heights


def _draw_edges(
    axis: Axes, tree: Tree, log_policy: Tensor, heights: Mapping[Completion, float]
) -> None:
    for (state, token), probability in zip(tree.edges, log_policy.exp().tolist(), strict=True):
        x, y0, y1 = len(state), heights[state], heights[(*state, token)]
        axis.plot([x, x + 1], [y0, y1], color="0.4", linewidth=0.4 + 2.2 * probability, zorder=1)
        place = x + 0.62, y0 + 0.62 * (y1 - y0)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8}
        word = f"{token} {probability:.3g}"
        axis.text(*place, word, ha="center", va="bottom", fontsize=6, bbox=box)


def _draw_states(
    axis: Axes, tree: Tree, log_policy: Tensor, heights: Mapping[Completion, float]
) -> None:
    for state, entropy in zip(tree.states, tree.entropies(log_policy).tolist(), strict=True):
        shade = plt.get_cmap("Blues")(0.08 + 0.4 * min(entropy / 2, 1))
        box = {"boxstyle": "round", "facecolor": shade, "edgecolor": "0.3", "linewidth": 0.5}
        place = len(state), heights[state]
        axis.text(*place, f"H={entropy:.2f}", ha="center", va="center", fontsize=6.5, bbox=box)
