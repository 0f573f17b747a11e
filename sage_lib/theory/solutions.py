"""Closed-form solutions of RLVR on a tree, and an independent gradient ascent.

Everything is float64. Policies, rewards and guides of completions have shape (L,).
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from sage_lib.errors import SageError
from sage_lib.theory.tree import Tree

Objective = Callable[[Tensor], Tensor]


def tilted(reference: Tensor, reward: Tensor, beta: float, guide: Tensor | None = None) -> Tensor:
    """Return eq. 2, or with a guide eq. 4: pi(y) ∝ q(y) pi_ref(y) exp(R(y)/beta).

    Args:
        reference: pi_ref of each completion, shape (L,).
        reward: of each completion, shape (L,).
        beta: coefficient of the KL.
        guide: q of each completion, shape (L,); None: no guide.

    Returns:
        The policy, shape (L,). SageError unless beta > 0.
    """
    if not beta > 0:
        raise SageError(
            f"beta must be positive, not {beta}: without a KL term there is no closed form"
        )
    log_q = 0 if guide is None else guide.log()
    return torch.softmax(reference.log() + reward / beta + log_q, dim=-1)


def entropy_bonus(reference: Tensor, reward: Tensor, beta: float, strength: float) -> Tensor:
    """Return eq. 21: pi ∝ pi_ref^(beta/(beta+lambda)) exp(R/(beta+lambda)), shape (L,).

    The bonus is a temperature: it has no direction.

    Args:
        reference: pi_ref of each completion, shape (L,).
        reward: of each completion, shape (L,).
        beta: coefficient of the KL.
        strength: lambda, coefficient of the entropy.
    """
    return torch.softmax((beta * reference.log() + reward) / (beta + strength), dim=-1)


def forward_kl(reference: Tensor, reward: Tensor, beta: float) -> tuple[Tensor, float]:
    """Return eq. 27: pi(y) = beta pi_ref(y)/(Lambda - R(y)), shape (L,), and Lambda.

    The multiplier Lambda > max R is the root that makes pi sum to 1. The arguments are as in
    :func:`tilted`.
    """
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

    Args:
        tree: its completions.
        reward: of each completion, shape (L,).
        log_reference: log pi_ref of each edge, shape (E,).
        beta: the KL coefficient.
        log_q: log q_t of each edge, shape (E,), a constant to the gradient; None: no guide.

    Returns:
        log pi of each edge, shape (E,), and V, the expected reward from each state on, shape (S,).
    """
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


def pseudo_kl(policy: Tensor, anchor: Tensor) -> Tensor:
    """Return eq. 5, sum_y pi(y) log(pi(y)/p(y)), for a positive p, normalised or not. It can be
    negative.

    Where pi is 0 a completion adds 0; the sum is infinite where p alone is 0.
    """
    nothing = policy == 0
    ratio = policy.masked_fill(nothing, 1) / anchor.masked_fill(nothing, 1)
    divergence: Tensor = torch.special.xlogy(policy, ratio).sum()
    return divergence


def support(policy: Tensor, reward: Tensor, epsilon: float) -> Tensor:
    """Return the support of Definition 4.1: the correct completions more probable than epsilon.

    Args:
        policy: pi of each completion, shape (L,).
        reward: 0 or 1, shape (L,).
        epsilon: the least probability.

    Returns:
        bool of shape (L,).
    """
    return (reward == 1) & (policy > epsilon)


def theorem_4_3(rlvr: Tensor, guide: Tensor, epsilon: float) -> Tensor:
    """Return whether Theorem 4.3's condition q(y)/E_RLVR[q] > epsilon/pi_RLVR(y) holds.

    The formula is lost in the paper's text. It is restored from the theorem's words and eq. 24. For
    a correct y it is equivalent to y in supp_eps(pi_SAGE).

    Args:
        rlvr: the policy of eq. 2, shape (L,).
        guide: q of each completion, shape (L,).
        epsilon: of Definition 4.1.

    Returns:
        bool of shape (L,).
    """
    return guide / (rlvr * guide).sum() > epsilon / rlvr


def detection_probability(probability: Tensor | float, rollouts: int) -> Tensor:
    """Return the chance that a completion is among ``rollouts`` samples (Theorem 4.2)."""
    chance: Tensor = 1 - (1 - torch.as_tensor(probability, dtype=torch.float64)) ** rollouts
    return chance


def product_guide(tree: Tree, log_q: Tensor) -> Tensor:
    """Return eq. 7, q(y) = prod_t q_t, shape (L,), from log q_t of each edge, shape (E,)."""
    return tree.along_paths(log_q).exp()


def separation(guide: Tensor, reward: Tensor, beta: float, lagrange: float) -> tuple[bool, bool]:
    """Return whether the separation condition holds: eq. 30, and eq. 32, which suffices for it.

    Eq. 30 compares sup over wrong of w with inf over correct of w; eq. 32 bounds q alone.

    Args:
        guide: q of each completion, shape (L,).
        reward: 0 or 1, shape (L,); both must occur.
        beta: coefficient of the KL.
        lagrange: the multiplier that :func:`forward_kl` returns.
    """
    right = reward == 1
    if right.all() or not right.any():
        raise SageError(
            "the separation condition compares correct with wrong completions: both must be there"
        )
    weight = guide * (reward / beta).exp() * (lagrange - reward)
    eq_30 = bool(weight[~right].max() < weight[right].min())
    bound = np.exp(1 / beta) * (lagrange - 1) / lagrange
    eq_32 = bool(guide[~right].max() / guide[right].min() < bound)
    return eq_30, eq_32


def ascend(tree: Tree, objective: Objective, logits: Tensor, tolerance: float = 1e-9) -> Tensor:
    """Maximise an objective by gradient ascent.

    Args:
        tree: its completions.
        objective: of pi, shape (L,).
        logits: the start, shape (E,).
        tolerance: bound of the gradient at the maximum.

    Returns:
        pi, shape (L,). SageError where the gradient does not vanish.
    """

    def value(x: Tensor) -> Tensor:
        return objective(tree.completion_probabilities(tree.log_policy(x)))

    x = _natural_ascent(tree, value, tree.log_policy(logits.detach().double()), tolerance)
    x.requires_grad_()

    def loss() -> float:
        loss = -value(x)
        x.grad = torch.autograd.grad(loss, x)[0]
        return float(loss.detach())

    for _ in range(10):  # a new search where the last one gave up
        optimiser: torch.optim.Optimizer = torch.optim.LBFGS(
            [x],
            max_iter=500,
            max_eval=2000,
            tolerance_grad=tolerance,
            tolerance_change=0,
            history_size=30,
            line_search_fn="strong_wolfe",
        )
        optimiser.step(loss)
        steepest = torch.autograd.grad(value(x), x)[0].abs().max()
        if steepest < 50 * tolerance:  # the rounding of double precision
            return tree.completion_probabilities(tree.log_policy(x)).detach()
    raise SageError(
        f"ascent did not come to rest (largest gradient {steepest:.1e}): start elsewhere, or "
        "choose a larger beta"
    )


def _natural_ascent(tree: Tree, value: Objective, logits: Tensor, tolerance: float) -> Tensor:
    """Take 100 steps along the natural gradient: a logit's gradient over its edge's visits.

    So a rare completion learns as fast as a common one, and no plateau holds it up.
    """
    size = 1.0
    for _ in range(100):
        logits.requires_grad_()
        current = value(logits)
        gradient = torch.autograd.grad(current, logits)[0]
        if gradient.abs().max() < tolerance:
            break
        with torch.no_grad():
            visits = tree.visits(tree.log_policy(logits))
            direction = gradient / visits.clamp(min=1e-300)
            size = 2 * size
            step = (size * direction).clamp(-5, 5)  # a factor of e^5 at a time
            # Half of what the slope promises: a longer step would swing around the maximum.
            while value(logits + step) < current + 0.5 * gradient @ step - 1e-15 and size > 1e-12:
                size /= 2
                step = (size * direction).clamp(-5, 5)
            logits = tree.log_policy(logits + step)
    return logits.detach()
