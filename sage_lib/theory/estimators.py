"""What each KL estimator really descends: expected gradients by enumeration on token trees, and where they lead.

Notation of eq. 38: d_t = log(q_t pi_ref(y_t)) - log pi(y_t). An estimator is a term k(d_t) for every sampled token, and
its gradient is taken on-policy: the samples come from pi, and only the terms are differentiated.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from scipy.optimize import root

from sage_lib.errors import SageError
from sage_lib.theory.tree import Tree

Estimator = Literal["k1_loss", "k2", "k3", "k3_corrected", "sequence"]
ESTIMATORS: tuple[Estimator, ...] = ("k1_loss", "k2", "k3", "k3_corrected", "sequence")
#: How each is known; the names of the companion's anchors are k3, k3_corrected and sequence.
LABELS = {
    "k1_loss": "k1 as a loss",
    "k2": "k2 as a loss",
    "k3": "k3 as a loss (the paper's code)",
    "k3_corrected": "k3, bias-corrected (TRL's default)",
    "sequence": "k1 in the return (eq. 8)",
}


def token_terms(estimator: Estimator, d: torch.Tensor, log_pi: torch.Tensor) -> torch.Tensor:
    """The differentiable term of every token, like ``d``; ``log_pi`` is log pi(y_t). Not for "sequence"."""
    if estimator == "k1_loss":
        return -d
    if estimator == "k2":
        return d**2 / 2
    if estimator == "k3":
        return d.exp() - d - 1
    if estimator == "k3_corrected":
        return (log_pi - log_pi.detach()).exp() * (d.exp() - d - 1)
    raise SageError(
        f"there is no per-token estimator {estimator!r}: choose one of {', '.join(ESTIMATORS[:-1])}"
    )


def kl_gradient(
    tree: Tree,
    estimator: Estimator,
    logits: torch.Tensor,
    log_reference: torch.Tensor,
    log_q: torch.Tensor | None = None,
) -> torch.Tensor:
    """Expected gradient of the estimator in the logits, shape (E,): the sum over the tokens of a completion.

    Args:
        logits, log_reference: of every edge, shape (E,).
        log_q: log q_t of every edge, shape (E,), or (draws, E) for a guide that is noise, averaged over the draws.
    """
    logits = logits.detach().clone().requires_grad_()
    log_pi = tree.log_policy(logits)
    log_q = torch.zeros_like(log_pi) if log_q is None else log_q
    d = log_reference + log_q - log_pi
    if estimator == "sequence":
        # The whole sequence's -d is a cost of every token before it: the gradient of E_pi[-sum_t d_t] itself.
        value = -(
            tree.completion_probabilities(log_pi)
            * (tree.paths @ d.reshape(-1, d.shape[-1]).mean(0))
        ).sum()
    else:
        taken = tree.visits(log_pi).detach()
        value = (taken * token_terms(estimator, d, log_pi).reshape(-1, d.shape[-1]).mean(0)).sum()
    return torch.autograd.grad(value, logits)[0]


def reverse_kl_gradient(
    tree: Tree, logits: torch.Tensor, log_reference: torch.Tensor, log_q: torch.Tensor
) -> torch.Tensor:
    """Gradient of sum_s visits(s) KL(pi_s ‖ q_s pi_ref,s), the visits held fixed; pseudo-KL of eq. 5 at every state."""
    return _state_divergence(
        tree, logits, lambda log_pi: log_pi.exp() * (log_pi - log_reference - log_q)
    )


def forward_kl_gradient(
    tree: Tree, logits: torch.Tensor, log_reference: torch.Tensor, log_q: torch.Tensor
) -> torch.Tensor:
    """Gradient of sum_s visits(s) KL(q_s pi_ref,s ‖ pi_s), the visits held fixed."""
    weight = (log_reference + log_q).exp()
    return _state_divergence(tree, logits, lambda log_pi: weight * (weight.log() - log_pi))


def _state_divergence(
    tree: Tree, logits: torch.Tensor, term: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    logits = logits.detach().clone().requires_grad_()
    log_pi = tree.log_policy(logits)
    at_state = torch.zeros(len(tree.states), dtype=log_pi.dtype).index_add(
        0, tree.state_of, tree.visits(log_pi).detach()
    )
    return torch.autograd.grad((at_state[tree.state_of] * term(log_pi)).sum(), logits)[0]


def reward_gradient(tree: Tree, logits: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    """Gradient of E_pi[R] in the logits, shape (E,)."""
    logits = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(
        (tree.completion_probabilities(tree.log_policy(logits)) * reward).sum(), logits
    )[0]


def fixed_point(
    tree: Tree,
    estimator: Estimator,
    reward: torch.Tensor,
    log_reference: torch.Tensor,
    beta: float,
    log_q: torch.Tensor | None = None,
) -> torch.Tensor:
    """Where ascending E_pi[R] - beta·(estimator) comes to rest, from the reference: log pi of every edge, shape (E,).

    The field of a per-token estimator need not be the gradient of anything, so this looks for its zero: gradient steps
    to come near, then Powell's hybrid method. Raises SageError when it ends anywhere else.
    """
    logits = log_reference.clone()
    for _ in range(150):
        step = reward_gradient(tree, logits, reward) - beta * kl_gradient(
            tree, estimator, logits, log_reference, log_q
        )
        # By the visits: a rare state learns as fast as a common one, which moves no fixed point.
        logits = tree.log_policy(
            logits + step / (beta * tree.visits(logits).clamp(min=1e-12)).clamp(min=1e-9) * 0.1
        )

    def field(free: np.ndarray) -> np.ndarray:
        x = torch.as_tensor(free)
        log_pi = tree.log_policy(x)
        g = reward_gradient(tree, log_pi, reward) - beta * kl_gradient(
            tree, estimator, log_pi, log_reference, log_q
        )
        at_state = torch.zeros(len(tree.states), dtype=g.dtype).index_add(
            0, tree.state_of, tree.visits(log_pi)
        )
        mean = torch.zeros(len(tree.states), dtype=g.dtype).index_add(
            0, tree.state_of, x
        ) / torch.bincount(tree.state_of)
        return (
            g / at_state[tree.state_of] + mean[tree.state_of]
        ).numpy()  # the mean logit of a state is free: pin it at 0

    centred = (
        logits
        - (
            torch.zeros(len(tree.states), dtype=logits.dtype).index_add(0, tree.state_of, logits)
            / torch.bincount(tree.state_of)
        )[tree.state_of]
    )
    found = root(field, centred.numpy(), method="hybr", tol=1e-12)
    if np.abs(found.fun).max() > 1e-8:
        raise SageError(
            f"no fixed point of {estimator} was found (residual {np.abs(found.fun).max():.1e}): use a larger beta or a smaller tree"
        )
    return tree.log_policy(torch.as_tensor(found.x))
