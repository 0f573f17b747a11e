"""Anchors: what the KL term of a trained policy is taken to, and how it is estimated.

An anchor says what it requires of the trainer, how it shapes a batch before TRL's loss reads it,
and what it adds beside that loss. It holds no state. Tensors have shape (batch, time) unless said
otherwise. This module loads without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sage_lib.errors import SageError

if TYPE_CHECKING:
    import torch

#: Loss types whose reduction over tokens :func:`reduce` knows.
REDUCTIONS = ("grpo", "bnpo", "dr_grpo", "dapo")


# -- what an anchor sees and gives -----------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """What gives the distributions over the whole vocabulary before each completion token."""

    hidden: torch.Tensor  # last hidden states of the policy, shape (batch, time, width)
    reference_hidden: torch.Tensor  # the same of the reference
    # From hidden states to logits, with whatever the model scales or caps them by.
    head: Callable[[torch.Tensor], torch.Tensor]
    reference_head: Callable[[torch.Tensor], torch.Tensor]
    temperature: float
    head_trained: bool = True  # whether weights of the policy's head take a gradient


@dataclass(frozen=True)
class Tokens:
    """A batch after the policy's forward pass. Only ``live_logps`` and ``vocabulary`` have a
    gradient."""

    live_logps: torch.Tensor  # log pi of the sampled tokens
    logps: torch.Tensor  # the same as a constant
    reference: torch.Tensor  # log pi_ref of them
    log_q: torch.Tensor | None  # of the guide, fixed while the batch is optimised
    credit: torch.Tensor | None  # of :func:`return_credit`, fixed with it
    advantages: torch.Tensor  # shape (batch,) or (batch, time)
    beta: float
    vocabulary: Vocabulary | None  # for an anchor that keeps hidden states


@dataclass(frozen=True)
class Shaped:
    """What an anchor made of a batch."""

    reference: torch.Tensor  # what TRL's loss reads as log pi_ref
    kl: torch.Tensor  # the divergence that the loss has, per token, without a gradient
    advantages: torch.Tensor | None = None  # where they change: shape (batch, time)
    beside: torch.Tensor | None = None  # beta times this is added to TRL's loss, per token


# -- the anchors -----------------------------------------------------------------------------------


class Anchor:
    """Base of the anchors. The defaults are those of the plain per-token KL."""

    name: ClassVar[str]
    bias_corrected: ClassVar[bool] = False  # TRL multiplies its KL by the importance ratio
    kl_is_trls: ClassVar[bool] = True  # TRL's metric "kl" is this anchor's; else it is replaced
    keeps_hidden: ClassVar[bool] = False  # it reads :class:`Vocabulary`
    works_at_scoring: ClassVar[bool] = False  # all that it changes is the reference
    credits_returns: ClassVar[bool] = False  # it reads ``credit`` of :class:`Tokens`

    def requires(self, t: Any) -> Iterator[str]:
        """Why this anchor cannot work in the SageTrainer ``t``, a sentence for each reason."""
        if t.args.use_liger_kernel:
            yield "the anchor cannot be shaped inside Liger's kernel: set use_liger_kernel to False"
        if t.shaped_at_scoring and not self.works_at_scoring:
            yield f"Unsloth's GPU trainer has no anchor {self.name!r}: use plain TRL for it"

    def shape(self, tokens: Tokens) -> Shaped:
        """The reference becomes q·pi_ref: TRL's own k3 is then the one to it."""
        reference = tokens.reference
        if tokens.log_q is not None:
            reference = reference + tokens.log_q
        return Shaped(reference, kl=k3(reference, tokens.logps))

    def first_loss(self, shaped: Shaped) -> torch.Tensor | None:
        """The per-token loss of the first batch; None where its KL says enough."""
        return None


class K3(Anchor):
    """Eq. 38 per token, as the paper's code; TRL's KL with ``use_bias_correction_kl=False``."""

    name = "k3"
    works_at_scoring = True


class K3Corrected(K3):
    """Eq. 38 per token, multiplied by the token's importance ratio: TRL's own default.

    A guide of the state alone cancels in expectation if tokens are drawn from the policy
    untruncated and weigh a constant (loss_type "dr_grpo"), not with weights by lengths.
    """

    name = "k3_corrected"
    bias_corrected = True


class BesideTrl(Anchor):
    """Base of the anchors whose KL is not TRL's. They show TRL a reference equal to the policy, and
    put their own KL into the advantages or beside the loss."""

    kl_is_trls = False

    def requires(self, t: Any) -> Iterator[str]:
        yield from super().requires(t)
        if t.beta == 0 or t.loss_type not in REDUCTIONS:
            known = ", ".join(REDUCTIONS)
            yield f"the anchor {self.name!r} needs beta > 0, and loss_type {known}"


class Sequence(BesideTrl):
    """The log-ratio of the completion, credited through the advantages: :func:`return_credit`."""

    name = "sequence"
    credits_returns = True

    def requires(self, t: Any) -> Iterator[str]:
        yield from super().requires(t)
        if t.importance_sampling_level != "token" or masks_tokens(t):
            yield (
                "the anchor 'sequence' is in the advantages of all tokens: set "
                "importance_sampling_level to token, top_entropy_quantile to 1 and "
                "off_policy_mask_threshold to None"
            )

    def shape(self, tokens: Tokens) -> Shaped:
        assert tokens.credit is not None
        advantages, ratio = tokens.advantages, tokens.logps - tokens.reference
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        return Shaped(
            reference=tokens.logps,
            kl=ratio if tokens.log_q is None else ratio - tokens.log_q,
            advantages=advantages + tokens.beta * tokens.credit,
        )

    def first_loss(self, shaped: Shaped) -> torch.Tensor | None:
        """On-policy the ratio is 1, and the loss is minus the advantages."""
        assert shaped.advantages is not None
        return -shaped.advantages


class ForwardKL(BesideTrl):
    """KL(pi_ref ‖ pi) per token (Section A.4), summed over the whole vocabulary, without a guide.

    After each sampled prefix it has no noise of a sampled token; the prefixes are the policy's.
    """

    name = "forward_kl"
    keeps_hidden = True

    def requires(self, t: Any) -> Iterator[str]:
        yield from super().requires(t)
        if t.guide is not None:
            yield "the forward KL has no sampled token for a guide to act on: use the anchor k3"
        if t.is_fsdp_enabled or t.is_deepspeed_enabled:
            yield "the forward KL needs whole weights on every process: train without FSDP or ZeRO"

    def shape(self, tokens: Tokens) -> Shaped:
        from sage_lib.algorithm.forward_kl import exact_forward_kl

        assert tokens.vocabulary is not None
        divergence = exact_forward_kl(tokens.vocabulary)
        return Shaped(tokens.logps, kl=divergence.detach(), beside=divergence)


#: Every anchor by the name that profiles know.
ANCHORS: dict[str, type[Anchor]] = {
    anchor.name: anchor for anchor in (K3, K3Corrected, Sequence, ForwardKL)
}


def check_anchor(name: object) -> None:
    """Raise a SageError where no anchor has that name."""
    if not isinstance(name, str) or name not in ANCHORS:
        raise SageError(f"there is no anchor {name!r}: choose one of {', '.join(ANCHORS)}")


def build_anchor(anchor: str | Anchor) -> Anchor:
    """The anchor of that name; an anchor of one's own is returned as it is."""
    if isinstance(anchor, Anchor):
        return anchor
    check_anchor(anchor)
    return ANCHORS[anchor]()


# -- the pieces ------------------------------------------------------------------------------------


def masks_tokens(t: Any) -> bool:
    """Whether TRL takes tokens out of its loss, and leaves their KL in."""
    return t.top_entropy_quantile < 1 or t.off_policy_mask_threshold is not None


def k3(anchor: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """Eq. 38 per token: exp(d) - d - 1, d = log q·pi_ref - log pi of the sampled tokens."""
    difference = anchor - logps
    return difference.exp() - difference - 1


def return_credit(
    logps: torch.Tensor, reference: torch.Tensor, log_q: torch.Tensor | None, mask: torch.Tensor
) -> torch.Tensor:
    """Eq. 8 as a return: minus the log-ratio to q·pi_ref of this token and all later ones.

    Beta times this, added to the advantage of every token, has as expected policy gradient that of
    -beta·K~L(pi ‖ q·pi_ref) of whole completions, where tokens are drawn from the policy
    untruncated and weigh a constant (loss_type "dr_grpo"). A constant to the gradient.
    """
    ratio = logps - reference
    if log_q is not None:
        ratio = ratio - log_q
    ratio = ratio.detach() * mask
    return -ratio.flip(1).cumsum(1).flip(1)


def reduce(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    loss_type: str,
    max_completion_length: int,
    items: torch.Tensor | None,
    processes: int,
    accumulation: int,
    steps_per_generation: int,
) -> torch.Tensor:
    """A per-token quantity reduced as TRL reduces its loss, with its gradient.

    Args:
        items: TRL's num_items_in_batch, the tokens of the whole generation batch of all processes.
    """
    counted = per_token * mask
    if loss_type == "grpo":
        of_sequences = counted.sum(-1) / mask.sum(-1).clamp(min=1.0)
        return of_sequences.mean() / accumulation
    if loss_type == "bnpo":
        return counted.sum() / mask.sum().clamp(min=1.0) / accumulation
    if loss_type == "dr_grpo":
        longest = per_token.shape[0] * max_completion_length
        return counted.sum() / longest / accumulation
    if loss_type != "dapo":
        raise SageError(f"loss_type {loss_type!r} is none of {', '.join(REDUCTIONS)}")
    assert items is not None
    of_process = items.clamp(min=1.0) / processes
    return counted.sum() / (of_process * accumulation / steps_per_generation)
