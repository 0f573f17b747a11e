"""From the optimum of eq. 2 to a policy trained on samples, for a table of each problem.

The first rungs of a ladder: the optimum, the fixed point of the loss that is trained, and the same
table trained with groups of samples. Rewards are 0 or 1. Losses are summed over tokens.

``group`` is the number of completions of a prompt whose rewards are normalised together. Of a tree,
``reward`` has shape (L,), and ``log_reference`` and ``log_q`` have shape (E,); no ``log_q`` is no
guide. SageError for a group of fewer than two, and unless beta > 0.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from sage_lib.theory.losses import EPSILON, check_group, kappa
from sage_lib.theory.optimum import check_beta, success
from sage_lib.theory.solutions import k3_fixed_point
from sage_lib.theory.tree import Tree

#: Smallest distance of a success from 0 and 1, and points at which solutions are looked for.
EDGE, POINTS = 1e-9, 400


def optimum_success(reference: float, beta: float, group: int, log_rho: float = 0.0) -> float:
    """Return the largest success p of the optimum of eq. 2 at beta/kappa(p), or with the log rho of
    a guide of eq. 4, from the success under pi_ref."""
    check_beta(beta)
    if not 0 < reference < 1:
        return reference
    return _largest(lambda p: float(success(reference, beta / kappa(p, group), log_rho)))


def k3_rest(
    tree: Tree,
    reward: Tensor,
    log_reference: Tensor,
    beta: float,
    group: int,
    log_q: Tensor | None = None,
) -> Tensor:
    """Return log pi, shape (E,), at the fixed point of k3 at beta/kappa(p) with the largest p."""
    check_beta(beta)

    def at(p: float) -> tuple[Tensor, Tensor]:
        return k3_fixed_point(tree, reward, log_reference, beta / kappa(p, group), log_q)

    p = _largest(lambda p: float(at(p)[1][0]), points=40)
    return at(p)[0]


def trained_table(
    tree: Tree,
    reward: Tensor,
    log_reference: Tensor,
    beta: float,
    group: int,
    updates: Sequence[int],
    rate: float,
    seed: int,
    log_q: Tensor | None = None,
) -> list[Tensor]:
    """Train a table with GRPO and per-token k3 by stochastic gradient ascent, from pi_ref on. Each
    update draws a group by the ``seed``. beta may be 0, and ``log_q`` is of a guide of the state.

    Returns:
        log pi, shape (E,), after each of the rising numbers of ``updates``.
    """
    check_group(group)
    rng, logits, policies = np.random.default_rng(seed), log_reference.clone(), []
    pull = beta * (torch.ones_like(log_reference) if log_q is None else log_q.exp())
    for update in range(updates[-1] + 1):
        log_pi = tree.log_policy(logits)
        if update in updates:
            policies.append(log_pi)
        p = tree.completion_probabilities(log_pi).numpy()
        drawn = torch.as_tensor(rng.choice(len(p), group, p=p / p.sum()))
        of_group = reward[drawn]
        advantage = (of_group - of_group.mean()) / (of_group.std() + EPSILON)
        paths = tree.paths[drawn]
        # The gradient of k3 in log pi is 1 - q·pi_ref/pi. Where all edges of a state have one q,
        # its mean is that of q·(1 - pi_ref/pi), which varies less.
        k3 = pull * (1 - (log_reference - log_pi).exp())
        of_edge = (paths.T @ advantage - paths.sum(0) * k3) / group
        mean = tree.sum_by_state(of_edge)[tree.state_of]
        logits = logits + rate * (of_edge - log_pi.exp() * mean)
    return policies


def _largest(following: Callable[[float], float], points: int = POINTS) -> float:
    """Return the largest p with p = following(p), by a scan from 1 down and Brent's method."""
    grid = 1 - np.geomspace(EDGE, 1 - EDGE, points)
    high = grid[0]
    if following(high) >= high:
        return float(high)
    for low in grid[1:]:
        if following(low) >= low:
            return float(brentq(lambda p: following(p) - p, low, high, xtol=1e-12))
        high = low
    return float(grid[-1])
