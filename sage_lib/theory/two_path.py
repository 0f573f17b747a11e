"""Appendix C: the two-path example, and the smallest tree that could really produce its entropies.

The text copy of the paper lost the numbers of eq. 33-37. Those here were chosen so that every condition that its prose
states holds; each is an argument.
"""

import math
from dataclasses import dataclass

import pandas as pd
import torch

from sage_lib.algorithm.guides import HIGH, LOW
from sage_lib.errors import SageError
from sage_lib.theory import solutions
from sage_lib.theory.tree import Tree


@dataclass(frozen=True)
class Example:
    """Eq. 33-34 with chosen numbers: two correct completions of two tokens, and everything wrong as a third.

    ``common`` and ``rare`` are pi_ref of the two; the entropies (nats) are those of their two tokens; ``epsilon`` is the
    threshold of Definition 4.1; ``threshold`` and ``ratio`` are those of eq. 11.
    """

    common: float = 0.9
    rare: float = 0.0083
    common_entropies: tuple[float, float] = (0.2, 0.3)
    rare_entropies: tuple[float, float] = (1.8, 0.2)
    beta: float = 0.5
    epsilon: float = 0.01
    threshold: float = 1.2
    ratio: float = 0.3

    def __post_init__(self):
        if not (0 < self.rare < self.common and self.common + self.rare < 1):
            raise SageError(
                f"the example needs 0 < rare < common and room for wrong completions, not rare={self.rare}, common={self.common}"
            )

    @property
    def reference(self) -> torch.Tensor:
        """pi_ref of common, rare, wrong; shape (3,)."""
        return torch.tensor(
            [self.common, self.rare, 1 - self.common - self.rare], dtype=torch.float64
        )

    @property
    def reward(self) -> torch.Tensor:
        return torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)

    @property
    def guide(self) -> torch.Tensor:
        """Eq. 34, q of common, rare, wrong (whose entropies the paper does not give: 1); shape (3,)."""
        q = [
            math.prod(float(branch(h, self.threshold, self.ratio)) for h in path)
            for path in (self.common_entropies, self.rare_entropies)
        ]
        return torch.tensor([*q, 1.0], dtype=torch.float64)


def branch(
    entropy: float | torch.Tensor, threshold: float | torch.Tensor, ratio: float | torch.Tensor
) -> torch.Tensor:
    """Eq. 11 with the authors' clamp."""
    return (
        1 + ratio * (torch.as_tensor(entropy, dtype=torch.float64) - threshold).clamp(min=0)
    ).clamp(LOW, HIGH)


def conditions(example: Example) -> pd.DataFrame:
    """What Appendix C states, line by line: columns equation, statement, value, bound, holds."""
    rlvr = solutions.tilted(example.reference, example.reward, example.beta)
    sage = solutions.tilted(example.reference, example.reward, example.beta, example.guide)
    q, eps = example.guide, example.epsilon
    mean_q = float((rlvr * q).sum())
    rows = [
        ("33", "pi_ref(rare) is below epsilon", example.rare, eps, example.rare < eps),
        (
            "33",
            "so is pi_RLVR(rare): reward alone does not lift it over",
            float(rlvr[1]),
            eps,
            bool(rlvr[1] < eps),
        ),
        ("34", "the guide leaves the common path alone, q = 1", float(q[0]), 1.0, bool(q[0] == 1)),
        ("34", "the guide acts on the rare path, q > 1", float(q[1]), 1.0, bool(q[1] > 1)),
        ("35", "E_RLVR[q] stays below q(rare)", mean_q, float(q[1]), mean_q < float(q[1])),
        (
            "36-37",
            "q(rare)/E_RLVR[q] exceeds epsilon/pi_RLVR(rare)",
            float(q[1]) / mean_q,
            eps / float(rlvr[1]),
            bool(solutions.theorem_4_3(rlvr, q, eps)[1]),
        ),
        ("Thm. 4.3", "pi_SAGE(rare) exceeds epsilon", float(sage[1]), eps, bool(sage[1] > eps)),
    ]
    return pd.DataFrame(rows, columns=["equation", "statement", "value", "bound", "holds"])


def fork_first(common: float = 0.9, rare: float = 0.0083) -> tuple[Tree, torch.Tensor]:
    """The example read as one policy that forks at its first token: tree and log pi_ref of every edge.

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
    return tree, torch.tensor([conditional[edge] for edge in tree.edges], dtype=torch.float64).log()


def branch_tree(rare: float = 0.05, spread: int = 6) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """The tree that the example needs (finding 3): the fork comes first and is nearly certain; the rare way alone leads to
    a state with ``spread`` equally likely tokens, one of which ends correctly. Tree, log pi_ref of every edge, reward.
    """
    completions = [
        ("common", "on", "right"),
        ("common", "on", "wrong"),
        *(("rare", f"b{i}", "end") for i in range(spread)),
    ]
    tree = Tree(tuple(completions))
    conditional = {
        ((), "common"): 1 - rare,
        ((), "rare"): rare,
        (("common", "on"), "right"): 0.9,
        (("common", "on"), "wrong"): 0.1,
        **{(("rare",), f"b{i}"): 1 / spread for i in range(spread)},
    }
    log_reference = torch.tensor(
        [conditional.get(edge, 1.0) for edge in tree.edges], dtype=torch.float64
    ).log()
    reward = torch.tensor(
        [
            1.0 if c in (("common", "on", "right"), ("rare", "b0", "end")) else 0.0
            for c in completions
        ],
        dtype=torch.float64,
    )
    return tree, log_reference, reward


def smallest_spread(threshold: float) -> int:
    """Fewest tokens that a state must offer for its entropy to exceed ``threshold``: n equally likely ones have log n nats."""
    return math.floor(math.exp(threshold)) + 1


def path_entropies(tree: Tree, log_policy: torch.Tensor) -> pd.DataFrame:
    """H_t (nats) of every token of every completion: a row per completion, columns completion and H_1, H_2, ..."""
    entropy = dict(zip(tree.states, tree.entropies(log_policy).tolist(), strict=True))
    rows = [
        {"completion": " ".join(c), **{f"H_{t + 1}": entropy[c[:t]] for t in range(len(c))}}
        for c in tree.completions
    ]
    return pd.DataFrame(rows)


def tree_guide(
    tree: Tree, log_policy: torch.Tensor, threshold: float, ratio: float
) -> torch.Tensor:
    """Eq. 7 and 11 on a tree: q of every completion, from the entropies of ``log_policy``; shape (L,)."""
    return solutions.product_guide(
        tree, branch(tree.entropies(log_policy), threshold, ratio).log()[tree.state_of]
    )


def margins(
    reference: torch.Tensor,
    reward: torch.Tensor,
    entropies: torch.Tensor,
    beta: float,
    epsilon: float,
    thresholds: torch.Tensor,
    ratios: torch.Tensor,
) -> torch.Tensor:
    """log of (left side / right side) of Theorem 4.3 for completion 1 on a grid; positive where the condition holds.

    Args:
        reference, reward: shape (L,); completion 1 is the rare one.
        entropies: of every token of every completion, 0 where it has none, shape (L, T).
        thresholds, ratios: the grid's axes, shapes (A,) and (B,).
    Returns:
        shape (B, A).
    """
    q = branch(entropies, thresholds[None, :, None, None], ratios[:, None, None, None]).prod(-1)
    rlvr = solutions.tilted(reference, reward, beta)
    return (q[..., 1] / (rlvr * q).sum(-1)).log() - (epsilon / rlvr[1]).log()


def example_inputs(example: Example) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """reference, reward and entropies of Appendix C's example, as :func:`margins` takes them."""
    return (
        example.reference,
        example.reward,
        torch.tensor(
            [example.common_entropies, example.rare_entropies, (0.0, 0.0)], dtype=torch.float64
        ),
    )


def tree_inputs(rare: float, spread: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of :func:`branch_tree`, its completions in the order common, rare correct, all others."""
    tree, log_reference, reward = branch_tree(rare, spread)
    table = path_entropies(tree, log_reference).drop(columns="completion").fillna(0.0)
    order = [0, tree.completions.index(("rare", "b0", "end"))]
    order += [i for i in range(len(tree.completions)) if i not in order]
    return (
        tree.completion_probabilities(log_reference)[order],
        reward[order],
        torch.as_tensor(table.to_numpy()[order]),
    )
