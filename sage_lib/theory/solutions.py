"""Closed-form solutions of RLVR on a tree.

Everything is float64. Policies, rewards and guides of completions have shape (L,).
"""

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from sage_lib.errors import SageError
from sage_lib.theory.optimum import check_beta
from sage_lib.theory.tree import Tree


def tilted(reference: Tensor, reward: Tensor, beta: float, guide: Tensor | None = None) -> Tensor:
    """Return eq. 2, or with a guide eq. 4: pi(y) ∝ q(y) pi_ref(y) exp(R(y)/beta).

    The reference pi_ref, the reward, the guide q and the result have a number for each completion.
    SageError unless beta > 0.
    """
    check_beta(beta)
    log_q = 0 if guide is None else guide.log()
    return torch.softmax(reference.log() + reward / beta + log_q, dim=-1)


def entropy_bonus(reference: Tensor, reward: Tensor, beta: float, strength: float) -> Tensor:
    """Return eq. 21: pi ∝ pi_ref^(beta/(beta+lambda)) exp(R/(beta+lambda)), shape (L,).

    The ``strength`` lambda is the coefficient of the entropy. The bonus is a temperature: it has no
    direction. SageError unless beta + lambda > 0.
    """
    if not beta + strength > 0:
        raise SageError(
            f"beta + lambda must be positive, not {beta + strength}: without a KL term or an "
            "entropy there is no optimum"
        )
    return torch.softmax((beta * reference.log() + reward) / (beta + strength), dim=-1)


def forward_kl(reference: Tensor, reward: Tensor, beta: float) -> tuple[Tensor, float]:
    """Return eq. 27: pi(y) = beta pi_ref(y)/(Lambda - R(y)), shape (L,), and Lambda.

    The multiplier Lambda > max R is the root that makes pi sum to 1. The arguments and the error
    are as in :func:`tilted`.
    """
    check_beta(beta)
    ref, r = reference.numpy(), reward.numpy()
    top = r[ref > 0].max()
    below = np.where(ref > 0, top - r, 0)  # pi is 0 where pi_ref is 0
    most = ref[r == top].sum()

    def excess(gap: float) -> float:
        return float(beta * np.sum(ref / (gap + below)) - 1)

    # Solved for the gap Lambda - max R, which can be tiny compared with Lambda. The sum falls from
    # at least 1 at beta * most to at most 1 at beta.
    low, high = beta * most * (1 - 1e-12), beta * (1 + 1e-12)
    gap = brentq(excess, low, high, xtol=1e-300, rtol=1e-14)
    return torch.as_tensor(beta * ref / (gap + below)), float(top + gap)


def k3_fixed_point(
    tree: Tree, reward: Tensor, log_reference: Tensor, beta: float, log_q: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the fixed point of per-token k3 as a loss (eq. 38), summed over tokens.

    On-policy, the loss of a sampled token moves only that token's state. So each state rests at
    eq. 27 with the values Q_a of the next states as rewards: with S = sum_a q_a pi_ref(a),

        pi(a) = beta q_a pi_ref(a) / (lambda - Q_a),    value V = sum_a pi(a) Q_a = lambda - beta S.

    The reward has shape (L,), log_reference and log_q have shape (E,). q is a constant to the
    gradient. SageError unless beta > 0.

    Returns:
        log pi of each edge, shape (E,), and V, the expected reward from each state on, shape (S,).
    """
    check_beta(beta)
    tree.check_edges(log_reference, "log_reference")
    anchor = log_reference.exp() if log_q is None else (log_reference + log_q).exp()
    values = dict(zip(tree.completions, reward.tolist(), strict=True))
    log_pi = torch.empty_like(anchor)
    for number in sorted(range(len(tree.states)), key=lambda n: -len(tree.states[n])):
        edges = (tree.state_of == number).nonzero().flatten()
        following = [values[(*state, token)] for state, token in (tree.edges[e] for e in edges)]
        mass = float(anchor[edges].sum())
        next_values = torch.tensor(following, dtype=torch.float64)
        policy, multiplier = forward_kl(anchor[edges] / mass, next_values, beta * mass)
        log_pi[edges], values[tree.states[number]] = policy.log(), multiplier - beta * mass
    return log_pi, torch.tensor([values[state] for state in tree.states], dtype=torch.float64)


def theorem_4_3(rlvr: Tensor, guide: Tensor, epsilon: float) -> Tensor:
    """Return whether Theorem 4.3's condition q(y)/E_RLVR[q] > epsilon/pi_RLVR(y) holds.

    The formula is lost in the paper's text. It is restored from the theorem's words and eq. 24. For
    a correct y it is equivalent to pi_SAGE(y) > epsilon, the support of Definition 4.1. The policy
    of eq. 2, the guide's q and the result have shape (L,).
    """
    return guide / (rlvr * guide).sum() > epsilon / rlvr


def product_guide(tree: Tree, log_q: Tensor) -> Tensor:
    """Return eq. 7, q(y) = prod_t q_t, shape (L,), from log q_t of each edge, shape (E,)."""
    return tree.along_paths(log_q).exp()
