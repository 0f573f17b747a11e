"""How a training loss weighs completions: normaliser, group, truncation; their expectations, exact.

TRL's losses draw groups of completions of a prompt from the (truncated) policy, turn rewards into
advantages within a group, and divide the sum over tokens by something: here each is a number of
:class:`Loss`, and :func:`weights` takes the expectation over everything that else is in the batch,
by counting and not by sampling.

What is simplified: every group of a batch answers the same prompt, the tree (in training the other
groups' lengths are those of other prompts); one update per batch, on-policy, so no ratio is
clipped; no completion is cut at the longest length.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.signal import convolve

from sage_lib.algorithm import anchors
from sage_lib.errors import SageError
from sage_lib.theory.solutions import tilted
from sage_lib.theory.tree import Tree

#: What the sum over tokens is divided by: nothing, or as TRL's loss_type of that name.
NORMALISERS = ("sum", *anchors.REDUCTIONS)
#: Those whose divisor is a number of the whole batch.
BY_BATCH = ("bnpo", "dapo")
#: TRL adds this to a group's standard deviation.
EPSILON = 1e-4


@dataclass(frozen=True)
class Loss:
    """What the exact analysis supposes of the loss. The default is a plain sum over tokens.

    Every loss is a mean over completions; of the sum over a completion's tokens ("sum"), of that
    sum divided by |o|, its number of tokens ("grpo"), by ``longest`` ("dr_grpo"), or by the mean
    number of tokens of the ``batch`` completions that it is drawn with ("bnpo", where they are the
    micro-batch; "dapo", where they are the whole generation batch).
    """

    normaliser: str = "sum"
    group: int | None = None  # completions of a prompt; None: the reward itself is the advantage
    scaled: bool = True  # a group's advantages are divided by its standard deviation
    batch: int = 8  # completions whose tokens bnpo and dapo count together: whole groups
    longest: int = 1  # what dr_grpo divides by: max_completion_length, tokens
    min_p: float = 0.0  # tokens less probable than this times the most probable are not sampled

    def __post_init__(self) -> None:
        if self.normaliser not in NORMALISERS:
            known = ", ".join(NORMALISERS)
            raise SageError(f"there is no normaliser {self.normaliser!r}: choose one of {known}")
        if self.group is not None and self.group < 2:
            raise SageError(f"a group needs at least 2 completions, not {self.group}")
        if self.batch < 1 or self.batch % (self.group or 1):
            raise SageError(
                f"a batch holds whole groups: choose a multiple of {self.group or 1}, "
                f"not {self.batch}"
            )
        if not (self.longest >= 1 and 0 <= self.min_p < 1):
            raise SageError(
                f"a loss needs longest >= 1 and min_p in [0, 1), not longest={self.longest}, "
                f"min_p={self.min_p}"
            )

    @property
    def plain(self) -> bool:
        """A sum over tokens of completions drawn from the policy itself: where nothing is weighed,
        expectations are gradients of one function."""
        return self.normaliser == "sum" and not self.min_p


#: The plain sum with the reward itself: what the closed forms are about.
PLAIN = Loss()


def kappa(success: float, group: int, scaled: bool = True) -> float:
    """What the advantage of groups multiplies the gradient of E[R] by, rewards being 0 and 1.

    E[A | R = 1] - E[A | R = 0] over the other ``group`` - 1 completions, each right with
    probability ``success``. It is (group - 1)/group where ``scaled`` is False; the KL term has no
    such factor, so eq. 2 and 4 hold at beta divided by it.
    """
    right, wrong = _advantages(group, scaled)
    others = _repeated(np.array([1 - success, success]), group - 1)
    return float(others @ (right - wrong))


def tilted_by_groups(
    reference: torch.Tensor,
    reward: torch.Tensor,
    beta: float,
    group: int,
    guide: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float]:
    """Eq. 2, and with a guide eq. 4, for rewards divided by their group's standard deviation.

    The policy, shape (L,), is the tilted one at beta/kappa, where kappa is that of its own success
    probability; found by iteration from the reference's. Returns it with its kappa; raises
    SageError where the iteration does not settle.
    """
    policy = reference
    factor = 0.0
    for _ in range(500):
        before, factor = factor, kappa(float(policy @ reward), group)
        policy = tilted(reference, reward, beta / factor, guide)
        if abs(factor - before) < 1e-14:
            return policy, factor
    raise SageError(f"kappa did not settle at beta {beta}: choose a larger beta")


def _advantages(group: int, scaled: bool) -> tuple[np.ndarray, np.ndarray]:
    """The advantage of a right and of a wrong completion, by how many of the others are right.

    Shapes (group,). TRL's standard deviation is the one with n - 1.
    """
    others = np.arange(group)
    sides = []
    for own in (1, 0):
        correct = others + own
        advantage = own - correct / group
        if scaled:
            deviation = np.sqrt(correct * (group - correct) / (group * (group - 1)))
            advantage = advantage / (deviation + EPSILON)
        sides.append(advantage)
    return sides[0], sides[1]


def _repeated(distribution: np.ndarray, times: int) -> np.ndarray:
    """The distribution of a sum of ``times`` independent draws, from that of one (any axes)."""
    if not times:
        return np.ones([1] * distribution.ndim)
    half = _repeated(distribution, times // 2)
    total: np.ndarray = convolve(half, half, method="direct")
    if times % 2:
        total = convolve(total, distribution, method="direct")
    return total


def sampled_policy(tree: Tree, log_policy: torch.Tensor, min_p: float) -> torch.Tensor:
    """log of what min-p leaves of a policy, renormalised in every state; both of shape (E,)."""
    if not min_p:
        return log_policy
    kept = log_policy >= tree.max_by_state(log_policy)[tree.state_of] + np.log(min_p)
    return tree.log_policy(log_policy.masked_fill(~kept, -torch.inf))


def weights(
    tree: Tree, log_policy: torch.Tensor, loss: Loss, reward: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each completion is drawn times what it then weighs, in expectation; no gradients.

    Args:
        log_policy: log pi of every edge, shape (E,).
        reward: of every completion, shape (L,); 0 and 1 where the loss has groups. None: 0.
    Returns:
        of a completion's KL terms and of its advantage, both of shape (L,). For the plain loss they
        are pi(y) and pi(y) R(y).
    """
    log_policy = log_policy.detach()
    drawn = tree.completion_probabilities(sampled_policy(tree, log_policy, loss.min_p))
    reward = torch.zeros_like(drawn) if reward is None else reward
    if loss.group is not None and not bool(((reward == 0) | (reward == 1)).all()):
        raise SageError("the expectation over groups is for rewards of 0 and 1")
    success = float(drawn @ reward)
    if loss.normaliser in BY_BATCH:
        return _in_a_batch(tree, drawn, loss, reward)
    if loss.normaliser == "grpo":
        drawn = drawn / tree.lengths
    elif loss.normaliser == "dr_grpo":
        drawn = drawn / loss.longest
    if loss.group is None:
        return drawn, drawn * reward
    others = _repeated(np.array([1 - success, success]), loss.group - 1)
    right, wrong = (float(others @ side) for side in _advantages(loss.group, loss.scaled))
    return drawn, drawn * torch.where(reward == 1, right, wrong)


def _in_a_batch(
    tree: Tree, drawn: torch.Tensor, loss: Loss, reward: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`weights` where the divisor is the batch's: by the distribution of the group's other
    completions (their tokens, how many are right) and of the other groups' tokens."""
    lengths, right = tree.lengths.numpy(), (reward == 1).numpy().astype(int)
    one = np.zeros((lengths.max() + 1, 2))  # tokens, right ones
    np.add.at(one, (lengths, right), drawn.numpy())
    group = loss.group or 1
    others = _repeated(one, group - 1)
    elsewhere = _repeated(one.sum(1), loss.batch - group)
    beside = np.arange(len(others))[:, None] + np.arange(len(elsewhere))  # the others' tokens
    of_length = {n: ((loss.batch / (n + beside)) @ elsewhere) @ others for n in set(lengths)}
    shares = np.array([of_length[n] for n in lengths])  # by how many of the others are right
    kl = drawn * torch.as_tensor(shares.sum(1))
    if loss.group is None:
        return kl, kl * reward
    advantages = np.array(_advantages(group, loss.scaled))[1 - right]
    return kl, drawn * torch.as_tensor((shares * advantages).sum(1))
