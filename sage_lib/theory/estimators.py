"""Expected gradients of each KL estimator by enumeration, and their fixed points.

With d_t = log(q_t pi_ref(y_t)) - log pi(y_t) (eq. 38), an estimator is a term k(d_t) for every
sampled token. Its gradient is taken on-policy: completions come from pi, and only the terms are
differentiated. A :class:`~sage_lib.theory.losses.Loss` says how completions are weighed; the
default is a plain sum over tokens.

``logits``, ``log_reference``, ``log_q`` (no guide is None) and gradients have shape (E,),
``reward`` has shape (L,).
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import root
from torch import Tensor

from sage_lib.algorithm import kl_forms
from sage_lib.errors import SageError
from sage_lib.theory.losses import PLAIN, Loss, weights
from sage_lib.theory.optimum import check_beta
from sage_lib.theory.tree import Tree

Term = Callable[[Tensor, Tensor], Tensor]
#: Each estimator and its label.
LABELS = {
    "k1_loss": "k1 as a loss",
    "k2": "k2 as a loss",
    kl_forms.K3.name: "k3 as a loss (the paper's code)",
    kl_forms.K3Corrected.name: "k3, bias-corrected (TRL's default)",
    kl_forms.Sequence.name: "k1 in the return (eq. 8)",
}
ESTIMATORS = tuple(LABELS)
#: The estimators that SageTrainer offers. Its forward KL is exact and estimates nothing.
OFFERED = tuple(name for name in ESTIMATORS if name in kl_forms.KL_FORMS)
#: The differentiable term of each token, from d and log pi(y_t); eq. 8 has none.
TERMS: dict[str, Term] = {
    "k1_loss": lambda d, lp: -d,
    "k2": lambda d, lp: d**2 / 2,
    kl_forms.K3.name: lambda d, lp: d.exp() - d - 1,
    kl_forms.K3Corrected.name: lambda d, lp: (lp - lp.detach()).exp() * (d.exp() - d - 1),
}


def _check_finite(log_p: Tensor, log_other: Tensor, name: str, other: str) -> None:
    """Raise SageError where KL(p ‖ other) is infinite, from the log-probabilities of edges."""
    if ((log_other == -torch.inf) & (log_p > -torch.inf)).any():
        raise SageError(
            f"the {name} has a token that the {other} gives probability 0: the divergence is "
            f"infinite there; give the {name} the logit -inf for it, too"
        )


def mean_over_draws(values: Tensor) -> Tensor:
    """Return the mean over the draws of a random guide: (draws, E) to (E,); (E,) stays."""
    return values.reshape(-1, values.shape[-1]).mean(0)


def kl_gradient(
    tree: Tree,
    estimator: str,
    logits: Tensor,
    log_reference: Tensor,
    log_q: Tensor | None = None,
    loss: Loss = PLAIN,
) -> Tensor:
    """Compute the expected gradient of one of ESTIMATORS in the logits of the policy. Of a random
    guide ``log_q`` has shape (draws, E). SageError where the divergence is infinite."""
    tree.check_edges(log_reference, "log_reference")
    logits = logits.detach().clone().requires_grad_()
    log_pi = tree.log_policy(logits)
    log_q = torch.zeros_like(log_pi) if log_q is None else log_q
    tree.check_edges(log_q, "log_q")
    never = log_pi.detach() == -torch.inf
    _check_finite(log_pi, log_reference, "policy", "reference")
    # A token that is never drawn adds nothing; its log-probability is no number to reckon with.
    d = (log_reference + log_q - log_pi).masked_fill(never, 0)
    if estimator != kl_forms.Sequence.name:
        kl_weights, _ = weights(tree, log_pi, loss)
        visits = tree.paths.T @ kl_weights
        terms = TERMS[estimator](d, log_pi.masked_fill(never, 0))
        value = (visits * mean_over_draws(terms)).sum()
    elif loss.normaliser == "sum":
        # The gradient of E_pi[-sum_t d_t]: the sequence's -d is a cost of all tokens before it.
        sums = tree.paths @ mean_over_draws(d)
        value = -(tree.completion_probabilities(log_pi) * sums).sum()
    else:
        # Not the gradient of a function: each token's score times its -d and all later ones.
        kl_weights, _ = weights(tree, log_pi, loss)
        depths = torch.tensor([len(state) for state, _ in tree.edges])
        not_before = (depths <= depths[:, None]).to(d.dtype)
        to_come = tree.paths * ((tree.paths * -mean_over_draws(d).detach()) @ not_before)  # (L, E)
        value = ((kl_weights @ to_come) * log_pi.masked_fill(never, 0)).sum()
    return torch.autograd.grad(value, logits)[0]


def reverse_kl_gradient(
    tree: Tree, logits: Tensor, log_reference: Tensor, log_q: Tensor, loss: Loss = PLAIN
) -> Tensor:
    """Return the gradient of sum_s visits(s) KL(pi_s ‖ q_s pi_ref,s), eq. 5; the visits are
    constants. SageError where the divergence is infinite."""

    def term(log_pi: Tensor, log_anchor: Tensor) -> Tensor:
        _check_finite(log_pi, log_anchor, "policy", "reference")
        never = log_pi.detach() == -torch.inf  # 0 log 0 is 0
        return log_pi.exp() * (log_pi - log_anchor).masked_fill(never, 0)

    return _divergence_gradient(tree, logits, log_reference, log_q, term, loss)


def forward_kl_gradient(
    tree: Tree, logits: Tensor, log_reference: Tensor, log_q: Tensor, loss: Loss = PLAIN
) -> Tensor:
    """Return the gradient of sum_s visits(s) KL(q_s pi_ref,s ‖ pi_s); the visits are constants.

    With a trainer's loss and q = 1 this is the expected gradient of the KL form forward_kl.
    SageError where the divergence is infinite.
    """

    def term(log_pi: Tensor, log_anchor: Tensor) -> Tensor:
        _check_finite(log_anchor, log_pi, "reference", "policy")
        weight = log_anchor.exp()
        return weight * (weight.log() - log_pi)

    return _divergence_gradient(tree, logits, log_reference, log_q, term, loss)


def _divergence_gradient(
    tree: Tree, logits: Tensor, log_reference: Tensor, log_q: Tensor, term: Term, loss: Loss
) -> Tensor:
    """Return the gradient of sum_s visits(s) sum_a term(log pi, log q pi_ref), visits constant."""
    tree.check_edges(log_reference, "log_reference")
    tree.check_edges(log_q, "log_q")
    logits = logits.detach().clone().requires_grad_()
    log_pi = tree.log_policy(logits)
    kl_weights, _ = weights(tree, log_pi, loss)
    state_visits = tree.sum_by_state(tree.paths.T @ kl_weights)
    value = (state_visits[tree.state_of] * term(log_pi, log_reference + log_q)).sum()
    return torch.autograd.grad(value, logits)[0]


def reward_gradient(tree: Tree, logits: Tensor, reward: Tensor, loss: Loss = PLAIN) -> Tensor:
    """Compute the gradient of E_pi[R] in the logits. Another loss than the plain one gives the
    expected policy gradient, each token's score times the advantage."""
    if reward.shape != tree.lengths.shape:
        raise SageError(
            f"reward must be of each of the tree's {len(tree.lengths)} completions, "
            f"not {tuple(reward.shape)}"
        )
    logits = logits.detach().clone().requires_grad_()
    log_pi = tree.log_policy(logits)
    if loss == PLAIN:
        value = (tree.completion_probabilities(log_pi) * reward).sum()
    else:
        _, advantage_weights = weights(tree, log_pi, loss, reward)
        log_p = log_pi.masked_fill(log_pi.detach() == -torch.inf, 0)  # never drawn
        value = advantage_weights @ (tree.paths @ log_p)
    return torch.autograd.grad(value, logits)[0]


def fixed_point(
    tree: Tree,
    estimator: str,
    reward: Tensor,
    log_reference: Tensor,
    beta: float,
    log_q: Tensor | None = None,
    loss: Loss = PLAIN,
) -> Tensor:
    """Return log pi, shape (E,), where ascent of E_pi[R] - beta·(estimator) comes to rest.

    The field need not be the gradient of a function, so its zero is sought: gradient steps from the
    reference come near, then Powell's hybrid method finds it. SageError unless beta > 0, and where
    no zero is found.
    """
    check_beta(beta)

    def field(log_pi: Tensor) -> Tensor:
        pull = kl_gradient(tree, estimator, log_pi, log_reference, log_q, loss)
        return reward_gradient(tree, log_pi, reward, loss) - beta * pull

    # A token that the reference never has stays at -inf; where it never comes, nothing pulls.
    never = log_reference == -torch.inf
    unreached_states = tree.sum_by_state(tree.visits(log_reference)) == 0
    pinned = never | unreached_states[tree.state_of]
    scale = 1.0 if loss == PLAIN else float(weights(tree, log_reference, loss)[0].sum())

    def policy(free: Tensor) -> Tensor:
        return tree.log_policy(free.masked_fill(never, -torch.inf))

    def residual(free: np.ndarray) -> np.ndarray:
        logits = torch.as_tensor(free)
        log_pi = policy(logits)
        state_visits = tree.sum_by_state(tree.visits(log_pi)).masked_fill(unreached_states, 1)
        at_rest = field(log_pi) / scale / state_visits[tree.state_of]
        # The mean logit of a state is free: pinned at 0.
        centre = tree.mean_by_state(logits)[tree.state_of]
        return torch.where(pinned, logits - start, at_rest + centre).numpy()

    iterate, size = log_reference.clone(), float("inf")
    for number in range(150):
        # By the visits: a rare state learns as fast as a common one, which moves no fixed point.
        inertia = (beta * tree.visits(iterate).clamp(min=1e-12)).clamp(min=1e-9)
        step = field(iterate) / inertia * 0.1
        iterate = tree.log_policy(iterate + step)
        # Powell's steps are larger from here on. Steps that grow leave an unstable point.
        last_size, size = size, float(step.abs().max())
        if number >= 20 and size < min(1e-3, last_size):
            break
    finite = iterate.masked_fill(never, 0)
    start = finite - tree.mean_by_state(finite)[tree.state_of]
    zero = root(residual, start.numpy(), method="hybr", tol=1e-12)
    worst = np.abs(zero.fun).max()
    if not worst <= 1e-8:
        raise SageError(
            f"no fixed point of {estimator} was found (residual {worst:.1e}): use a larger beta or "
            "a smaller tree"
        )
    return policy(torch.as_tensor(zero.x))
