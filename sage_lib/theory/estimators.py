"""What each KL estimator really descends: expected gradients by enumeration, and where they lead.

Notation of eq. 38: d_t = log(q_t pi_ref(y_t)) - log pi(y_t). An estimator is a term k(d_t) for
every sampled token, and its gradient is taken on-policy: the samples come from pi, and only the
terms are differentiated.

How the terms of a completion are weighed, how rewards become advantages and what is cut off when
sampling is a :class:`~sage_lib.theory.losses.Loss`; without one it is a plain sum over tokens of
completions drawn from pi, for which alone the estimators are gradients of a known divergence.
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import root

from sage_lib.algorithm import anchors
from sage_lib.errors import SageError
from sage_lib.theory.losses import PLAIN, Loss, weights
from sage_lib.theory.tree import Tree

#: Every estimator and how it is known.
LABELS = {
    "k1_loss": "k1 as a loss",
    "k2": "k2 as a loss",
    anchors.K3.name: "k3 as a loss (the paper's code)",
    anchors.K3Corrected.name: "k3, bias-corrected (TRL's default)",
    anchors.Sequence.name: "k1 in the return (eq. 8)",
}
ESTIMATORS = tuple(LABELS)
#: Those that SageTrainer offers as anchors. Its forward KL is exact and estimates nothing.
OFFERED = tuple(name for name in ESTIMATORS if name in anchors.ANCHORS)


def _k3(d: torch.Tensor) -> torch.Tensor:
    return d.exp() - d - 1


#: The differentiable term of every token, from d and log pi(y_t); eq. 8 has none.
TERMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1_loss": lambda d, log_pi: -d,
    "k2": lambda d, log_pi: d**2 / 2,
    anchors.K3.name: lambda d, log_pi: _k3(d),
    anchors.K3Corrected.name: lambda d, log_pi: (log_pi - log_pi.detach()).exp() * _k3(d),
}


def token_terms(estimator: str, d: torch.Tensor, log_pi: torch.Tensor) -> torch.Tensor:
    """The differentiable term of every token, like ``d``; ``log_pi`` is log pi(y_t).

    Raises SageError for an unknown estimator, and for that of eq. 8, which is no sum of such terms.
    """
    if estimator not in TERMS:
        raise SageError(
            f"there is no per-token estimator {estimator!r}: choose one of {', '.join(TERMS)}"
        )
    return TERMS[estimator](d, log_pi)


def mean_over_draws(values: torch.Tensor) -> torch.Tensor:
    """Mean over the draws of a guide that is noise: (draws, E) to (E,); (E,) stays as it is."""
    return values.reshape(-1, values.shape[-1]).mean(0)


def kl_gradient(
    tree: Tree,
    estimator: str,
    logits: torch.Tensor,
    log_reference: torch.Tensor,
    log_q: torch.Tensor | None = None,
    loss: Loss = PLAIN,
) -> torch.Tensor:
    """Expected gradient of the estimator in the logits, shape (E,), as the loss weighs completions.

    Args:
        estimator: one of ESTIMATORS.
        logits, log_reference: of every edge, shape (E,).
        log_q: log q_t of every edge, shape (E,), or (draws, E) for a guide that is noise, averaged
            over the draws.
    Raises:
        SageError where the policy gives a token some probability and the reference none.
    """
    tree.check_edges(log_reference, "log_reference")
    logits = logits.detach().clone().requires_grad_()
    log_pi = tree.log_policy(logits)
    log_q = torch.zeros_like(log_pi) if log_q is None else log_q
    tree.check_edges(log_q, "log_q")
    never = log_pi.detach() == -torch.inf
    if ((log_reference == -torch.inf) & ~never).any():
        raise SageError(
            "the policy has a token that the reference gives probability 0: the divergence is "
            "infinite there; give the policy the logit -inf for it, too"
        )
    # A token that is never drawn adds nothing; its log-probability is no number to reckon with.
    d = (log_reference + log_q - log_pi).masked_fill(never, 0)
    if estimator != anchors.Sequence.name:
        of_completions, _ = weights(tree, log_pi, loss)
        taken = tree.paths.T @ of_completions
        terms = token_terms(estimator, d, log_pi.masked_fill(never, 0))
        value = (taken * mean_over_draws(terms)).sum()
    elif loss.plain:
        # The whole sequence's -d is a cost of every token before it: this is the gradient of
        # E_pi[-sum_t d_t] itself.
        of_completion = tree.paths @ mean_over_draws(d)
        value = -(tree.completion_probabilities(log_pi) * of_completion).sum()
    else:
        # No gradient of anything: each token's score times the -d of itself and all later ones.
        of_completions, _ = weights(tree, log_pi, loss)
        to_come = _from_here_on(tree, -mean_over_draws(d).detach())
        value = ((of_completions @ to_come) * log_pi.masked_fill(never, 0)).sum()
    return torch.autograd.grad(value, logits)[0]


def _from_here_on(tree: Tree, values: torch.Tensor) -> torch.Tensor:
    """A quantity of every edge, (E,), summed from each edge of a completion to its end, (L, E)."""
    not_before = (tree.depths[:, None] <= tree.depths).to(values.dtype)  # row: the edge summed for
    return tree.paths * ((tree.paths * values) @ not_before.T)


def reverse_kl_gradient(
    tree: Tree,
    logits: torch.Tensor,
    log_reference: torch.Tensor,
    log_q: torch.Tensor,
    loss: Loss = PLAIN,
) -> torch.Tensor:
    """Gradient of sum_s visits(s) KL(pi_s ‖ q_s pi_ref,s), the visits held fixed; shape (E,).

    At every state it is the pseudo-KL of eq. 5. ``loss`` weighs the visits.
    """
    tree.check_edges(log_reference, "log_reference")
    tree.check_edges(log_q, "log_q")

    def term(log_pi: torch.Tensor) -> torch.Tensor:
        never = log_pi.detach() == -torch.inf  # 0 log 0 is 0
        return log_pi.exp() * (log_pi - log_reference - log_q).masked_fill(never, 0)

    return _state_divergence_gradient(tree, logits, term, loss)


def forward_kl_gradient(
    tree: Tree,
    logits: torch.Tensor,
    log_reference: torch.Tensor,
    log_q: torch.Tensor,
    loss: Loss = PLAIN,
) -> torch.Tensor:
    """Gradient of sum_s visits(s) KL(q_s pi_ref,s ‖ pi_s), the visits held fixed; shape (E,).

    ``loss`` weighs the visits: with the loss that is trained, and q = 1, it is the expected
    gradient of the trainer's anchor forward_kl.
    """
    tree.check_edges(log_reference, "log_reference")
    tree.check_edges(log_q, "log_q")
    weight = (log_reference + log_q).exp()

    def term(log_pi: torch.Tensor) -> torch.Tensor:
        return weight * (weight.log() - log_pi)

    return _state_divergence_gradient(tree, logits, term, loss)


def _state_divergence_gradient(
    tree: Tree, logits: torch.Tensor, term: Callable[[torch.Tensor], torch.Tensor], loss: Loss
) -> torch.Tensor:
    """Gradient of sum_s visits(s) sum_a term(s, a), the visits held fixed."""
    logits = logits.detach().clone().requires_grad_()
    log_pi = tree.log_policy(logits)
    of_completions, _ = weights(tree, log_pi, loss)
    state_visits = tree.sum_by_state(tree.paths.T @ of_completions)
    value = (state_visits[tree.state_of] * term(log_pi)).sum()
    return torch.autograd.grad(value, logits)[0]


def reward_gradient(
    tree: Tree, logits: torch.Tensor, reward: torch.Tensor, loss: Loss = PLAIN
) -> torch.Tensor:
    """Gradient of E_pi[R] in the logits, shape (E,); with another loss, the expectation of the
    policy gradient that it takes, the score of every token times the completion's advantage."""
    tree.check_completions(reward, "reward")
    logits = logits.detach().clone().requires_grad_()
    log_pi = tree.log_policy(logits)
    if loss == PLAIN:
        value = (tree.completion_probabilities(log_pi) * reward).sum()
    else:
        _, of_advantages = weights(tree, log_pi, loss, reward)
        log_p = log_pi.masked_fill(log_pi.detach() == -torch.inf, 0)  # never drawn
        value = of_advantages @ (tree.paths @ log_p)
    return torch.autograd.grad(value, logits)[0]


def fixed_point(
    tree: Tree,
    estimator: str,
    reward: torch.Tensor,
    log_reference: torch.Tensor,
    beta: float,
    log_q: torch.Tensor | None = None,
    loss: Loss = PLAIN,
) -> torch.Tensor:
    """Where ascending E_pi[R] - beta·(estimator), as ``loss`` weighs them, comes to rest, from the
    reference on.

    The field of a per-token estimator need not be the gradient of anything, so this looks for its
    zero: gradient steps to come near, then Powell's hybrid method. With min-p it is a zero of the
    field in which the tokens cut off there are cut off.

    Returns:
        log pi of every edge, shape (E,).
    Raises:
        SageError when the search ends anywhere else.
    """

    def field(log_pi: torch.Tensor) -> torch.Tensor:
        pull = kl_gradient(tree, estimator, log_pi, log_reference, log_q, loss)
        return reward_gradient(tree, log_pi, reward, loss) - beta * pull

    # A token that the reference never has stays at -inf; where it never comes, nothing pulls.
    never = log_reference == -torch.inf
    unreached_states = tree.sum_by_state(tree.visits(log_reference)) == 0
    pinned = never | unreached_states[tree.state_of]
    scale = 1.0 if loss == PLAIN else float(weights(tree, log_reference, loss)[0].sum())

    def policy(free: torch.Tensor) -> torch.Tensor:
        return tree.log_policy(free.masked_fill(never, -torch.inf))

    def residual(free: np.ndarray) -> np.ndarray:
        logits = torch.as_tensor(free)
        log_pi = policy(logits)
        state_visits = tree.sum_by_state(tree.visits(log_pi)).masked_fill(unreached_states, 1)
        at_rest = field(log_pi) / scale / state_visits[tree.state_of]
        # The mean logit of a state is free: pinned at 0.
        centre = tree.mean_by_state(logits)[tree.state_of]
        return torch.where(pinned, logits - start, at_rest + centre).numpy()

    near, size = log_reference.clone(), float("inf")
    for number in range(150):
        # By the visits: a rare state learns as fast as a common one, which moves no fixed point.
        inertia = (beta * tree.visits(near).clamp(min=1e-12)).clamp(min=1e-9)
        step = field(near) / inertia * 0.1
        near = tree.log_policy(near + step)
        # In nats: from here on Powell's steps are the larger ones. Steps that grow leave a point
        # that gradient steps do not come to rest at.
        before, size = size, float(step.abs().max())
        if number >= 20 and size < min(1e-3, before):
            break
    finite = near.masked_fill(never, 0)
    start = finite - tree.mean_by_state(finite)[tree.state_of]
    found = root(residual, start.numpy(), method="hybr", tol=1e-12)
    worst = np.abs(found.fun).max()
    if not worst <= 1e-8:
        raise SageError(
            f"no fixed point of {estimator} was found (residual {worst:.1e}): use a larger beta or "
            "a smaller tree"
        )
    return policy(torch.as_tensor(found.x))
