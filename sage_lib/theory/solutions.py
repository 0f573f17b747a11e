"""The closed-form solutions of RLVR on a tree, and the ascent that finds them without knowing them; float64 throughout."""

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import brentq

from sage_lib.errors import SageError
from sage_lib.theory.tree import Tree


def _normalised(log_weights: torch.Tensor) -> torch.Tensor:
    return torch.softmax(log_weights, dim=-1)


def tilted(
    reference: torch.Tensor, reward: torch.Tensor, beta: float, guide: torch.Tensor | None = None
) -> torch.Tensor:
    """Eq. 2, and with a guide eq. 4: pi(y) ∝ q(y) pi_ref(y) exp(R(y)/beta). All of shape (L,), beta > 0."""
    if not beta > 0:
        raise SageError(
            f"beta must be positive, not {beta}: without a KL term there is no closed form"
        )
    return _normalised(reference.log() + reward / beta + (0 if guide is None else guide.log()))


def entropy_bonus(
    reference: torch.Tensor, reward: torch.Tensor, beta: float, bonus: float
) -> torch.Tensor:
    """Eq. 21: pi ∝ pi_ref^(beta/(beta+lambda)) exp(R/(beta+lambda)), a temperature without a direction. Shape (L,)."""
    return _normalised((beta * reference.log() + reward) / (beta + bonus))


def forward_kl(
    reference: torch.Tensor, reward: torch.Tensor, beta: float
) -> tuple[torch.Tensor, float]:
    """Eq. 27: pi(y) = beta pi_ref(y)/(L - R(y)) and L > max R, the root that makes it sum to 1. Shape (L,)."""
    ref, r = reference.numpy(), reward.numpy()
    top = r[ref > 0].max()
    below, most = top - r, ref[r == top].sum()
    # Solved for the gap L - max R, which can be tiny beside L. The sum falls from at least 1 at beta·most to at most 1 at beta.
    gap = brentq(
        lambda g: beta * np.sum(ref / (g + below)) - 1,
        beta * most * (1 - 1e-12),
        beta * (1 + 1e-12),
        xtol=1e-300,
        rtol=1e-14,
    )
    return torch.as_tensor(beta * ref / (gap + below)), float(top + gap)


def pseudo_kl(policy: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Eq. 5: sum_y pi(y) log(pi(y)/p(y)) for any positive p, normalised or not; it can be negative."""
    return torch.special.xlogy(policy, policy / anchor).sum()


def support(policy: torch.Tensor, reward: torch.Tensor, threshold: float) -> torch.Tensor:
    """Definition 4.1: which correct completions have probability above ``threshold``; bool of shape (L,)."""
    return (reward == 1) & (policy > threshold)


def theorem_4_3(rlvr: torch.Tensor, guide: torch.Tensor, threshold: float) -> torch.Tensor:
    """The condition of Theorem 4.3 for every completion, q(y)/E_RLVR[q] > eps/pi_RLVR(y); bool of shape (L,).

    ``rlvr`` is the tilted policy of eq. 2. With eq. 24 the two sides are pi_SAGE(y) and eps, divided by pi_RLVR(y): for a
    correct completion the condition is not only sufficient but the same statement as y in supp_eps(pi_SAGE).
    """
    return guide / (rlvr * guide).sum() > threshold / rlvr


def detection_probability(probability: torch.Tensor | float, rollouts: int) -> torch.Tensor:
    """What a finite budget does in Theorem 4.2: the chance that a completion shows among ``rollouts`` samples."""
    return 1 - (1 - torch.as_tensor(probability, dtype=torch.float64)) ** rollouts


def product_guide(tree: Tree, log_q: torch.Tensor) -> torch.Tensor:
    """Eq. 7: q(y) = prod_t q_t, shape (L,), from log q_t of every edge, shape (E,)."""
    return (tree.paths @ log_q).exp()


def ascend(
    tree: Tree,
    objective: Callable[[torch.Tensor], torch.Tensor],
    logits: torch.Tensor,
    tolerance: float = 1e-9,
) -> torch.Tensor:
    """Maximise ``objective(pi)`` (pi of shape (L,)) over policies by gradient ascent from ``logits``; returns pi.

    First the natural gradient (each logit's gradient divided by its edge's visits, so that a rare completion learns as fast
    as a common one and no plateau holds it up), then L-BFGS. Raises SageError when the gradient has not vanished.
    """
    logits, size = tree.log_policy(logits.detach().double()), 1.0

    def value(x: torch.Tensor) -> torch.Tensor:
        return objective(tree.completion_probabilities(tree.log_policy(x)))

    for _ in range(100):
        logits.requires_grad_()
        current = value(logits)
        gradient = torch.autograd.grad(current, logits)[0]
        if gradient.abs().max() < tolerance:
            break
        with torch.no_grad():
            direction, size = (
                gradient / tree.visits(tree.log_policy(logits)).clamp(min=1e-300),
                2 * size,
            )
            step = (size * direction).clamp(-5, 5)  # a factor of e^5 at a time
            # Half of what the slope promises: a longer step would swing around the maximum.
            while value(logits + step) < current + 0.5 * gradient @ step - 1e-15 and size > 1e-12:
                size /= 2
                step = (size * direction).clamp(-5, 5)
            logits = tree.log_policy(logits + step)
    logits = logits.detach().requires_grad_()
    for _ in range(10):  # afresh where its line search gave up
        optimiser = torch.optim.LBFGS(
            [logits],
            max_iter=500,
            max_eval=2000,
            tolerance_grad=tolerance,
            tolerance_change=0,
            history_size=30,
            line_search_fn="strong_wolfe",
        )

        def closure(optimiser: torch.optim.Optimizer = optimiser) -> torch.Tensor:
            optimiser.zero_grad()
            loss = -value(logits)
            loss.backward()
            return loss

        optimiser.step(closure)
        gradient = torch.autograd.grad(value(logits), logits)[0].abs().max()
        if gradient < 50 * tolerance:  # what double precision leaves of it
            return tree.completion_probabilities(tree.log_policy(logits)).detach()
    raise SageError(f"ascent did not come to rest (largest gradient {gradient:.1e})")


def separation(
    guide: torch.Tensor, reward: torch.Tensor, beta: float, lagrange: float
) -> tuple[bool, bool]:
    """Eq. 30 and its sufficient condition eq. 32: (sup over wrong of w < inf over correct of w, the bound on q alone)."""
    weight = guide * (reward / beta).exp() * (lagrange - reward)
    right = reward == 1
    if right.all() or not right.any():
        raise SageError(
            "the separation condition compares correct with wrong completions: both must be there"
        )
    exact = bool(weight[~right].max() < weight[right].min())
    bound = np.exp(1 / beta) * (lagrange - 1) / lagrange
    return exact, bool(guide[~right].max() / guide[right].min() < bound)
