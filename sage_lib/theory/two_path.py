"""Appendix C: the two-path example, and the smallest tree that can produce its entropies.

The text copy of the paper lost the numbers of eq. 33-37. Those here were chosen so that every
condition that its prose states holds; each is an argument.
"""

import math
from dataclasses import dataclass

import pandas as pd
import torch

from sage_lib.algorithm.guides import HIGH, LOW
from sage_lib.errors import SageError
from sage_lib.theory import solutions
from sage_lib.theory.tree import Edge, Tree


@dataclass(frozen=True)
class Example:
    """Eq. 33-34 with chosen numbers: two correct completions, and everything wrong as a third.

    ``common`` and ``rare`` are pi_ref of the two; the entropies (nats) are those of their two
    tokens; ``epsilon`` is that of Definition 4.1; ``threshold`` (nats) and ``ratio`` are those of
    eq. 11.
    """

    common: float = 0.9
    rare: float = 0.0083
    common_entropies: tuple[float, float] = (0.2, 0.3)
    rare_entropies: tuple[float, float] = (1.8, 0.2)
    beta: float = 0.5
    epsilon: float = 0.01
    threshold: float = 1.2
    ratio: float = 0.3

    def __post_init__(self) -> None:
        if not (0 < self.rare < self.common and self.common + self.rare < 1):
            raise SageError(
                "the example needs 0 < rare < common and room for wrong completions, not "
                f"rare={self.rare}, common={self.common}"
            )

    @property
    def reference(self) -> torch.Tensor:
        """pi_ref of common, rare, wrong; shape (3,)."""
        wrong = 1 - self.common - self.rare
        return torch.tensor([self.common, self.rare, wrong], dtype=torch.float64)

    @property
    def reward(self) -> torch.Tensor:
        """1 for common and rare, 0 for wrong; shape (3,)."""
        return torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)

    @property
    def guide(self) -> torch.Tensor:
        """Eq. 34, q of common, rare, wrong (whose entropies the paper does not give: 1)."""
        q = [
            math.prod(float(branch_q(h, self.threshold, self.ratio)) for h in entropies)
            for entropies in (self.common_entropies, self.rare_entropies)
        ]
        return torch.tensor([*q, 1.0], dtype=torch.float64)


def branch_q(
    entropy: float | torch.Tensor, threshold: float | torch.Tensor, ratio: float | torch.Tensor
) -> torch.Tensor:
    """Eq. 11 with the authors' clamp: q_t from a token's entropy (nats); shapes broadcast."""
    excess = (torch.as_tensor(entropy, dtype=torch.float64) - threshold).clamp(min=0)
    return (1 + ratio * excess).clamp(LOW, HIGH)


def conditions(example: Example) -> pd.DataFrame:
    """What Appendix C states, line by line: columns equation, statement, value, bound, holds."""
    rlvr = solutions.tilted(example.reference, example.reward, example.beta)
    sage = solutions.tilted(example.reference, example.reward, example.beta, example.guide)
    epsilon = example.epsilon
    mean_q = float((rlvr * example.guide).sum())
    q_common, q_rare = example.guide[:2].tolist()
    rlvr_rare, sage_rare = float(rlvr[1]), float(sage[1])
    theorem = bool(solutions.theorem_4_3(rlvr, example.guide, epsilon)[1])
    lift, needed = q_rare / mean_q, epsilon / rlvr_rare
    below = "pi_ref(rare) is below epsilon"
    still_below = "so is pi_RLVR(rare): reward alone does not lift it over"
    common_alone = "the guide leaves the common path alone, q = 1"
    on_rare = "the guide acts on the rare path, q > 1"
    rows = [
        ("33", below, example.rare, epsilon, example.rare < epsilon),
        ("33", still_below, rlvr_rare, epsilon, rlvr_rare < epsilon),
        ("34", common_alone, q_common, 1.0, q_common == 1),
        ("34", on_rare, q_rare, 1.0, q_rare > 1),
        ("35", "E_RLVR[q] stays below q(rare)", mean_q, q_rare, mean_q < q_rare),
        ("36-37", "q(rare)/E_RLVR[q] exceeds epsilon/pi_RLVR(rare)", lift, needed, theorem),
        ("Thm. 4.3", "pi_SAGE(rare) exceeds epsilon", sage_rare, epsilon, sage_rare > epsilon),
    ]
    return pd.DataFrame(rows, columns=["equation", "statement", "value", "bound", "holds"])


def fork_first(common: float = 0.9, rare: float = 0.0083) -> tuple[Tree, torch.Tensor]:
    """The example read as one policy that forks at its first token: tree and log pi_ref, (E,).

    Whatever the probabilities, both paths take their first token in the same state: they share H_1.
    """
    tree = Tree((("common", "on"), ("common", "wrong"), ("rare", "on"), ("rare", "wrong")))
    fork = rare / (common + rare)
    conditional = {
        ((), "common"): 1 - fork,
        ((), "rare"): fork,
        (("common",), "on"): 0.9,
        (("common",), "wrong"): 0.1,
        (("rare",), "on"): 0.9,
        (("rare",), "wrong"): 0.1,
    }
    return tree, tree.by_edge(conditional, otherwise=1.0).log()


def branch_tree(
    rare: float = 0.05, spread: int = 6, longer: int = 0
) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """The tree that the example needs: tree, log pi_ref (E,), reward (L,).

    The fork comes first and is nearly certain; the rare way alone leads to a state with ``spread``
    equally likely tokens, one of which ends correctly. Every completion has three tokens, the rare
    correct one ``longer`` more.
    """
    right, wrong = ("common", "on", "right"), ("common", "on", "wrong")
    branches = [f"b{i}" for i in range(spread)]
    rare_right = ("rare", "b0", *["on"] * longer, "end")
    tree = Tree((right, wrong, rare_right, *(("rare", b, "end") for b in branches[1:])))
    conditional: dict[Edge, float] = {
        ((), "common"): 1 - rare,
        ((), "rare"): rare,
        (("common", "on"), "right"): 0.9,
        (("common", "on"), "wrong"): 0.1,
    }
    for branch in branches:
        conditional[("rare",), branch] = 1 / spread
    correct = {right, rare_right}
    reward = torch.tensor([float(c in correct) for c in tree.completions], dtype=torch.float64)
    return tree, tree.by_edge(conditional, otherwise=1.0).log(), reward


def smallest_spread(threshold: float) -> int:
    """Fewest tokens that a state must offer for its entropy to exceed ``threshold`` (nats).

    n equally likely ones have log n nats.
    """
    return math.floor(math.exp(threshold)) + 1


def path_entropies(tree: Tree, log_policy: torch.Tensor) -> pd.DataFrame:
    """H_t (nats) of every token: a row per completion, columns completion, H_1, H_2, ..."""
    entropy = dict(zip(tree.states, tree.entropies(log_policy).tolist(), strict=True))
    rows = []
    for completion in tree.completions:
        row = {"completion": " ".join(completion)}
        for t in range(len(completion)):
            row[f"H_{t + 1}"] = entropy[completion[:t]]
        rows.append(row)
    return pd.DataFrame(rows)


def tree_guide(
    tree: Tree, log_policy: torch.Tensor, threshold: float, ratio: float
) -> torch.Tensor:
    """Eq. 7 and 11 on a tree: q of every completion from ``log_policy``'s entropies; (L,)."""
    q = branch_q(tree.entropies(log_policy), threshold, ratio)
    return solutions.product_guide(tree, q.log()[tree.state_of])


def margins(
    reference: torch.Tensor,
    reward: torch.Tensor,
    entropies: torch.Tensor,
    beta: float,
    epsilon: float,
    thresholds: torch.Tensor,
    ratios: torch.Tensor,
) -> torch.Tensor:
    """log of (left side / right side) of Theorem 4.3 for completion 1 on a grid.

    Positive where the condition holds.

    Args:
        reference, reward: shape (L,); completion 1 is the rare one.
        entropies: of every token of every completion (nats), 0 where it has none, shape (L, T).
        thresholds, ratios: the grid's axes, shapes (A,) and (B,).
    Returns:
        shape (B, A).
    """
    across, down = thresholds[None, :, None, None], ratios[:, None, None, None]
    q = branch_q(entropies, across, down).prod(-1)  # (B, A, L)
    rlvr = solutions.tilted(reference, reward, beta)
    left = q[..., 1] / (rlvr * q).sum(-1)
    right = epsilon / rlvr[1]
    return left.log() - right.log()


def example_inputs(example: Example) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """reference, reward and entropies of Appendix C's example, as :func:`margins` takes them."""
    entropies = [example.common_entropies, example.rare_entropies, (0.0, 0.0)]
    return example.reference, example.reward, torch.tensor(entropies, dtype=torch.float64)


def tree_inputs(rare: float, spread: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of :func:`branch_tree`, its completions ordered common, rare correct, others."""
    tree, log_reference, reward = branch_tree(rare, spread)
    table = path_entropies(tree, log_reference).drop(columns="completion").fillna(0.0)
    order = [0, tree.completions.index(("rare", "b0", "end"))]
    order += [i for i in range(len(tree.completions)) if i not in order]
    return (
        tree.completion_probabilities(log_reference)[order],
        reward[order],
        torch.as_tensor(table.to_numpy()[order]),
    )
