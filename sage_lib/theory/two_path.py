"""Appendix C: the two-path example, and the smallest tree that can produce its entropies.

The paper's text copy lost the numbers of eq. 33-37. The numbers here were chosen so that all
conditions of its prose hold, with a wrong completion and without; each is an argument.
"""

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sage_lib.algorithm.guides import HIGH, LOW
from sage_lib.errors import SageError
from sage_lib.theory import solutions
from sage_lib.theory.tree import Edge, Tree


@dataclass(frozen=True)
class Example:
    """Eq. 33-34 with chosen numbers: two correct completions, and everything wrong as a third.

    The wrong completion, which is not in the paper's prose, is absent where common + rare is 1.
    """

    common: float = 0.9  # pi_ref of the common and of the rare completion
    rare: float = 0.0087
    common_entropies: tuple[float, ...] = (0.2, 0.3)  # nats, of their tokens
    rare_entropies: tuple[float, ...] = (1.8, 0.2)
    beta: float = 0.5
    epsilon: float = 0.01  # Definition 4.1
    threshold: float = 1.2  # eq. 11, nats
    ratio: float = 0.3  # eq. 11
    most: float = HIGH  # q_t is clamped to this, as in the authors' code; inf: as eq. 11 has it
    reward = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)  # of common, rare, wrong

    def __post_init__(self) -> None:
        if not (0 < self.rare < self.common and self.common + self.rare <= 1):
            raise SageError(f"the example needs 0 < rare < common, together at most 1, not {self}")

    @property
    def reference(self) -> Tensor:
        """pi_ref of common, rare, wrong; shape (3,)."""
        wrong = max(0.0, 1 - self.common - self.rare)
        return torch.tensor([self.common, self.rare, wrong], dtype=torch.float64)

    @property
    def entropies(self) -> Tensor:
        """Entropy of each token (nats), 0 where there is none (q = 1); shape (3, T)."""
        rows = (self.common_entropies, self.rare_entropies, (0.0,))
        return pad_sequence([torch.tensor(h, dtype=torch.float64) for h in rows], batch_first=True)

    @property
    def guide(self) -> Tensor:
        """Eq. 34, q of common, rare and wrong (whose entropies the paper does not give: q = 1)."""
        return branch_q(self.entropies, self.threshold, self.ratio, self.most).prod(-1)


def branch_q(
    entropy: Tensor, threshold: Tensor | float, ratio: Tensor | float, most: float = HIGH
) -> Tensor:
    """Return eq. 11 with the authors' clamp, whose upper end is ``most``. Entropy and threshold are
    in nats; shapes broadcast."""
    return (1 + ratio * (entropy - threshold).clamp(min=0)).clamp(LOW, most)


def conditions(example: Example) -> pd.DataFrame:
    """Check the statements of Appendix C: columns equation, statement, value, bound, holds."""
    guide, epsilon, rare = example.guide, example.epsilon, example.rare
    rlvr = solutions.tilted(example.reference, example.reward, example.beta)
    sage = solutions.tilted(example.reference, example.reward, example.beta, guide)
    mean_q = 1 + float(rlvr @ (guide - 1))  # exactly 1 where every q is
    rlvr_rare, sage_rare = float(rlvr[1]), float(sage[1])
    q_common, q_rare = guide[:2].tolist()
    lift, needed = q_rare / mean_q, epsilon / rlvr_rare
    theorem = bool(solutions.theorem_4_3(rlvr, guide, epsilon)[1])
    rows = [
        ("33", "pi_ref(rare) is below epsilon", rare, epsilon, rare < epsilon),
        ("33", "so is pi_RLVR(rare)", rlvr_rare, epsilon, rlvr_rare < epsilon),
        ("34", "the guide leaves the common path alone, q = 1", q_common, 1.0, q_common == 1),
        ("34", "the guide acts on the rare path, q > 1", q_rare, 1.0, q_rare > 1),
        ("35", "E_RLVR[q] stays below q(rare)", mean_q, q_rare, mean_q < q_rare),
        ("36-37", "q(rare)/E_RLVR[q] exceeds epsilon/pi_RLVR(rare)", lift, needed, theorem),
        ("Thm. 4.3", "pi_SAGE(rare) exceeds epsilon", sage_rare, epsilon, sage_rare > epsilon),
    ]
    return pd.DataFrame(rows, columns=["equation", "statement", "value", "bound", "holds"])


def branch_tree(rare: float = 0.05, spread: int = 6) -> tuple[Tree, Tensor, Tensor]:
    """Return the smallest tree with the example's entropies, log pi_ref (E,) and the reward (L,).

    The fork comes first and is nearly certain: ``rare`` is pi_ref of its rare branch. Only this
    branch leads to a state with ``spread`` equally likely tokens. The first ends correctly.
    """
    right, wrong = ("common", "on", "right"), ("common", "on", "wrong")
    rare_right, *others = (("rare", f"b{i}", "end") for i in range(spread))
    tree = Tree((right, rare_right, wrong, *others))
    conditional: dict[Edge, float] = {
        ((), "common"): 1 - rare,
        ((), "rare"): rare,
        (("common", "on"), "right"): 0.9,
        (("common", "on"), "wrong"): 0.1,
        **{(("rare",), f"b{i}"): 1 / spread for i in range(spread)},
    }
    correct = [float(c in (right, rare_right)) for c in tree.completions]
    reward = torch.tensor(correct, dtype=torch.float64)
    return tree, tree.by_edge(conditional, otherwise=1.0).log(), reward


def tree_guide(
    tree: Tree, log_policy: Tensor, threshold: float, ratio: float, most: float = HIGH
) -> Tensor:
    """Return q of each completion by eq. 7 and 11, shape (L,), from the entropies of a policy with
    log pi of each edge, shape (E,). The other arguments are as in :func:`branch_q`."""
    q = branch_q(tree.entropies(log_policy), threshold, ratio, most)
    return solutions.product_guide(tree, q.log()[tree.state_of])
