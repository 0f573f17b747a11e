"""Weights of completions in a training loss, in exact expectation.

TRL draws groups of completions of a prompt from the policy, turns rewards into advantages within a
group and divides the sum over tokens. A :class:`Loss` says how, and :func:`weights` takes the
expectation over the rest of the batch, by counting.

Simplified: every group of a batch answers the same prompt; completions come from the whole policy,
not truncated by min-p; one update per batch, on-policy, so no ratio is clipped; no completion is
cut at the longest length.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.signal import convolve
from torch import Tensor

from sage_lib.algorithm import kl_forms
from sage_lib.errors import SageError
from sage_lib.theory.tree import Tree

#: Divisors of the sum over tokens: none ("sum"), or as in TRL's loss_type of that name.
NORMALISERS = ("sum", *kl_forms.REDUCTIONS)
#: TRL adds this to a group's standard deviation.
EPSILON = 1e-4


@dataclass(frozen=True)
class Loss:
    """Assumptions of the analysis about the loss; by default a plain sum over tokens.

    A loss is a mean over completions: of the sum over tokens ("sum"), of that sum divided by
    the completion's tokens ("grpo"), by ``longest`` ("dr_grpo"), or by the mean number of tokens of
    the ``batch`` completions drawn together ("bnpo": the micro-batch; "dapo": the whole batch).
    """

    normaliser: str = "sum"
    group: int | None = None  # completions of a prompt; None: the reward itself is the advantage
    scaled: bool = True  # a group's advantages are divided by its standard deviation
    batch: int = 8  # completions whose tokens bnpo and dapo count together: whole groups
    longest: int = 1  # what dr_grpo divides by: max_completion_length, tokens

    def __post_init__(self) -> None:
        whole_groups = self.batch >= 1 and self.batch % (self.group or 1) == 0
        limits = self.longest >= 1 and (self.group or 2) >= 2
        if self.normaliser not in NORMALISERS or not (whole_groups and limits):
            raise SageError(
                f"a loss needs a normaliser of {', '.join(NORMALISERS)}, groups of at least 2, a "
                f"batch of whole groups and longest >= 1, not {self}"
            )


#: The plain sum with the reward as the advantage, which the closed forms assume.
PLAIN = Loss()


def check_group(group: int) -> None:
    """Raise SageError for a group of fewer than two completions, whose rewards have no spread."""
    if not group >= 2:
        raise SageError(f"a group needs at least 2 completions, not {group}: they are compared")


def kappa(success: float, group: int) -> float:
    """Return the factor of group advantages in the gradient of E[R], for rewards of 0 and 1.

    It is E[A | R = 1] - E[A | R = 0], for groups of so many completions, of which each is right
    with probability ``success``. The KL term has no such factor, so eq. 2 and 4 hold at beta
    divided by it. SageError for a group of fewer than two.
    """
    check_group(group)
    right, wrong = _mean_advantages(success, group, scaled=True)
    return right - wrong


def _mean_advantages(success: float, group: int, scaled: bool) -> tuple[float, float]:
    """Return the expected advantages of a right and of a wrong completion."""
    others = _repeated(np.array([1 - success, success]), group - 1)
    right, wrong = (float(others @ advantages) for advantages in _advantages(group, scaled))
    return right, wrong


def _advantages(group: int, scaled: bool) -> np.ndarray:
    """Return the advantages of a right and a wrong completion, by the number of other right ones,
    shape (2, group)."""
    reward = np.array([[1], [0]])
    correct = np.arange(group) + reward
    advantages: np.ndarray = reward - correct / group
    if scaled:  # by the standard deviation with n - 1, as TRL
        deviation = np.sqrt(correct * (group - correct) / (group * (group - 1)))
        advantages = advantages / (deviation + EPSILON)
    return advantages


def _repeated(distribution: np.ndarray, times: int) -> np.ndarray:
    """Return the distribution of a sum of independent draws from a distribution (any axes)."""
    if not times:
        return np.ones([1] * distribution.ndim)
    half = _repeated(distribution, times // 2)
    total: np.ndarray = convolve(half, half, method="direct")
    return convolve(total, distribution, method="direct") if times % 2 else total


def weights(
    tree: Tree, log_policy: Tensor, loss: Loss, reward: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the expected weights of completions, without gradients: the probability of being
    drawn times the weight in the loss.

    ``log_policy`` has shape (E,). ``reward`` has shape (L,), is 0 or 1 where the loss has groups,
    and 0 by default.

    Returns:
        The weights of KL terms and of advantages, both of shape (L,). For the plain loss they
        are pi(y) and pi(y) R(y).
    """
    log_policy = log_policy.detach()
    drawn = tree.completion_probabilities(log_policy)
    reward = torch.zeros_like(drawn) if reward is None else reward
    if loss.group is not None and not bool(((reward == 0) | (reward == 1)).all()):
        raise SageError("the expectation over groups is for rewards of 0 and 1")
    if loss.normaliser in ("bnpo", "dapo"):
        return _in_a_batch(tree, drawn, loss, reward)
    success = float(drawn @ reward)
    if loss.normaliser == "grpo":
        drawn = drawn / tree.lengths
    elif loss.normaliser == "dr_grpo":
        drawn = drawn / loss.longest
    if loss.group is None:
        return drawn, drawn * reward
    right, wrong = _mean_advantages(success, loss.group, loss.scaled)
    return drawn, drawn * torch.where(reward == 1, right, wrong)


def _in_a_batch(tree: Tree, drawn: Tensor, loss: Loss, reward: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`weights` where the tokens of a batch are the divisor.

    It uses the distribution of the group's other completions (tokens, number of right ones) and of
    the other groups' tokens.
    """
    lengths, right = tree.lengths.numpy(), (reward == 1).numpy().astype(int)
    completion = np.zeros((lengths.max() + 1, 2))  # tokens, right ones
    np.add.at(completion, (lengths, right), drawn.numpy())
    group = loss.group or 1
    others = _repeated(completion, group - 1)
    other_groups = _repeated(completion.sum(1), loss.batch - group)
    tokens = np.arange(len(others))[:, None] + np.arange(len(other_groups))  # of all but this one
    by_length = {n: ((loss.batch / (n + tokens)) @ other_groups) @ others for n in set(lengths)}
    shares = np.array([by_length[n] for n in lengths])  # by the number of other right ones
    kl = drawn * torch.as_tensor(shares.sum(1))
    if loss.group is None:
        return kl, kl * reward
    advantages = _advantages(group, loss.scaled)[1 - right]
    return kl, drawn * torch.as_tensor((shares * advantages).sum(1))
