"""Anchors: what the KL term of a trained policy is taken to, and how it is estimated.

An anchor is a class: what it requires of the trainer, how it shapes a batch before TRL's loss reads
it, what it adds beside that loss, and what the trainer's canary must find after the first batch.
Anchors hold no state. This module loads without torch; tensors have shape (batch, time) unless
said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sage_lib.errors import SageError

if TYPE_CHECKING:
    import torch

#: Loss types whose reduction over tokens :func:`reduce` knows.
REDUCTIONS = ("grpo", "bnpo", "dr_grpo", "dapo")


# -- what an anchor sees and gives -----------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What an anchor or an advantage may require of the trainer that it shapes; names as in
    GRPOConfig."""

    beta: float
    loss_type: str
    importance_sampling_level: str
    use_liger_kernel: bool
    masks_tokens: bool  # TRL takes tokens out of its loss, and leaves their KL in
    guided: bool  # there is a guide
    sharded: bool  # no process has whole weights: FSDP or ZeRO
    at_scoring: bool  # the batch is shaped when the reference is scored, before the loss
    masks_off_policy: bool  # TRL takes completions far from the policy that drew them out
    on_policy: bool  # each batch is used for one update, by the policy that drew it
    generations: int  # completions of a group
    whole_groups: bool  # no group is spread over processes


@dataclass(frozen=True)
class Vocabulary:
    """What gives the distributions over the whole vocabulary before each completion token."""

    hidden: torch.Tensor  # last hidden states of the policy, shape (batch, time, width)
    reference_hidden: torch.Tensor  # the same of the reference
    # From hidden states to logits, with whatever the model scales or caps them by.
    head: Callable[[torch.Tensor], torch.Tensor]
    reference_head: Callable[[torch.Tensor], torch.Tensor]
    temperature: float
    drawn: torch.Tensor  # ids of the sampled tokens, shape (batch, time)
    head_trained: bool = True  # whether weights of the policy's head take a gradient


@dataclass(frozen=True)
class Tokens:
    """A batch as the policy's forward pass left it. Only ``live_logps`` and ``vocabulary`` have a
    gradient."""

    live_logps: torch.Tensor  # log pi of the sampled tokens
    logps: torch.Tensor  # the same as a constant
    reference: torch.Tensor  # log pi_ref of them
    log_q: torch.Tensor | None  # of the guide, fixed while the batch is optimised
    credit: torch.Tensor | None  # of :meth:`Anchor.credit`, fixed with it
    advantages: torch.Tensor  # shape (batch,) or (batch, time)
    beta: float
    vocabulary: Vocabulary | None  # for an anchor that keeps hidden states

    def to_anchor(self) -> torch.Tensor:
        """log(pi / (q·pi_ref)) of the sampled tokens."""
        ratio = self.logps - self.reference
        return ratio if self.log_q is None else ratio - self.log_q


@dataclass(frozen=True)
class Shaped:
    """What an anchor made of a batch."""

    reference: torch.Tensor  # what TRL's loss reads as log pi_ref
    kl: torch.Tensor  # the divergence that the loss has, per token, without a gradient
    advantages: torch.Tensor | None = None  # where they change: shape (batch, time)
    beside: torch.Tensor | None = None  # beta times this is added to TRL's loss, per token
    # log pi_ref of the sampled tokens, from an anchor that scores the reference.
    scored_reference: torch.Tensor | None = None


# -- the anchors -----------------------------------------------------------------------------------


class Anchor:
    """Base of the anchors. The defaults are those of the plain per-token KL."""

    name: ClassVar[str]
    #: TRL multiplies its KL by the importance ratio.
    bias_corrected: ClassVar[bool] = False
    #: TRL's own metric "kl" is this anchor's divergence; otherwise the trainer logs it instead.
    kl_is_trls: ClassVar[bool] = True
    #: The trainer keeps the last hidden states of policy and reference for :class:`Vocabulary`.
    keeps_hidden: ClassVar[bool] = False
    #: It keeps hidden states and makes of them log pi_ref of the sampled tokens, too: ``reference``
    #: of :class:`Tokens` is not a number once the canary has compared the two.
    scores_reference: ClassVar[bool] = False
    #: It can be shaped before the loss: all that it changes is the reference.
    works_at_scoring: ClassVar[bool] = False

    def requires(self, setting: Setting) -> Iterator[str]:
        """Why this anchor cannot work in that setting, a sentence for each reason."""
        if setting.use_liger_kernel:
            yield (
                "the anchor cannot be shaped inside Liger's kernel: set use_liger_kernel to False"
            )
        if setting.at_scoring and not self.works_at_scoring:
            working = [repr(anchor.name) for anchor in ANCHORS.values() if anchor.works_at_scoring]
            yield (
                f"Unsloth's GPU trainer has the loss of the anchor {' and '.join(working)} only, "
                f"not of {self.name!r}: use plain TRL for it"
            )

    def credit(
        self,
        logps: torch.Tensor,
        reference: torch.Tensor,
        log_q: torch.Tensor | None,
        mask: torch.Tensor,
    ) -> torch.Tensor | None:
        """What the anchor fixes, with log q, when a batch is first seen."""
        return None

    def shape(self, tokens: Tokens) -> Shaped:
        """The reference becomes q·pi_ref: TRL's own k3 is then the one to it."""
        reference = tokens.reference
        if tokens.log_q is not None:
            reference = reference + tokens.log_q
        return Shaped(reference, kl=k3(reference, tokens.logps))

    def first_loss(self, shaped: Shaped) -> torch.Tensor | None:
        """The per-token loss of the first batch, where the policy is its own old policy and the
        loss has no other terms; None where its KL says enough."""
        return None


class K3(Anchor):
    """Eq. 38 per token, as the paper's code."""

    name = "k3"
    works_at_scoring = True


class K3Corrected(Anchor):
    """Eq. 38 per token, multiplied by the importance ratio: TRL's own default.

    A guide of the state alone cancels in expectation if tokens are drawn from the policy
    untruncated and weigh a constant (loss_type "dr_grpo"). A weight that depends on lengths, 1/|o|
    or one by the tokens of the batch, leaves some of it: the length depends on the token.
    """

    name = "k3_corrected"
    bias_corrected = True
    works_at_scoring = True


class BesideTrl(Anchor):
    """Base of the anchors whose KL is not TRL's. They show TRL a reference equal to the policy, a
    KL of 0 without a gradient, and put their own into the advantages or beside the loss."""

    kl_is_trls = False

    def requires(self, setting: Setting) -> Iterator[str]:
        if setting.beta == 0:
            yield f"the anchor {self.name!r} needs beta > 0"
        yield from super().requires(setting)
        if setting.loss_type not in REDUCTIONS:
            yield (
                f"the anchor {self.name!r} works with loss_type {', '.join(REDUCTIONS)}, "
                f"not {setting.loss_type!r}"
            )


class Sequence(BesideTrl):
    """The log-ratio of the whole completion, credited through the advantages. When this is the
    gradient of eq. 8, :func:`return_credit` says."""

    name = "sequence"

    def requires(self, setting: Setting) -> Iterator[str]:
        yield from super().requires(setting)
        if setting.importance_sampling_level != "token":
            yield (
                f"the anchor {self.name!r} credits tokens one by one: "
                f"set importance_sampling_level to token"
            )
        if setting.masks_tokens:
            yield (
                f"the anchor {self.name!r} is in the advantages, and would go with the tokens that "
                f"are masked: set top_entropy_quantile to 1 and off_policy_mask_threshold to None"
            )

    def credit(
        self,
        logps: torch.Tensor,
        reference: torch.Tensor,
        log_q: torch.Tensor | None,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        return return_credit(logps, reference, log_q, mask)

    def shape(self, tokens: Tokens) -> Shaped:
        assert tokens.credit is not None
        advantages = tokens.advantages
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        return Shaped(
            reference=tokens.logps,
            kl=tokens.to_anchor(),
            advantages=advantages + tokens.beta * tokens.credit,
        )

    def first_loss(self, shaped: Shaped) -> torch.Tensor | None:
        """On-policy the ratio is 1 and the loss is minus the advantages, credit included."""
        assert shaped.advantages is not None
        return -shaped.advantages


class ForwardKL(BesideTrl):
    """KL(pi_ref ‖ pi) per token (Section A.4), summed over the whole vocabulary, without a guide.

    After each sampled prefix it has no noise of a sampled token; the prefixes are the policy's.
    """

    name = "forward_kl"
    keeps_hidden = True
    scores_reference = True

    def requires(self, setting: Setting) -> Iterator[str]:
        yield from super().requires(setting)
        if setting.guided:
            yield (
                "the forward KL over the vocabulary has no sampled token for a guide to act on: "
                "use the anchor k3 with it, or no guide"
            )
        if setting.sharded:
            yield (
                "the forward KL over the vocabulary needs whole weights on every process: "
                "use data parallelism without FSDP or ZeRO"
            )

    def shape(self, tokens: Tokens) -> Shaped:
        from sage_lib.algorithm.forward_kl import exact_forward_kl

        v = tokens.vocabulary
        assert v is not None
        divergence, reference = exact_forward_kl(
            v.hidden,
            v.reference_hidden,
            v.head,
            v.reference_head,
            v.temperature,
            v.head_trained,
            drawn=v.drawn,
        )
        return Shaped(
            reference=tokens.logps,
            kl=divergence.detach(),
            beside=divergence,
            scored_reference=reference,
        )


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
    if isinstance(anchor, type) and issubclass(anchor, Anchor):
        raise SageError(
            f"the anchor is the class {anchor.__name__}, not an instance: write {anchor.__name__}()"
        )
    check_anchor(anchor)
    return ANCHORS[anchor]()


# -- the pieces ------------------------------------------------------------------------------------


def k3(anchor: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """Eq. 38 per token: exp(d) - d - 1 with d = ``anchor`` - ``logps``.

    Args:
        anchor, logps: log q·pi_ref and log pi of the sampled tokens.
    """
    difference = anchor - logps
    return difference.exp() - difference - 1


def return_credit(
    logps: torch.Tensor, reference: torch.Tensor, log_q: torch.Tensor | None, mask: torch.Tensor
) -> torch.Tensor:
    """Eq. 8 as a return: minus the log-ratio to q·pi_ref of this token and all later ones.

    Beta times this, added to the advantage of every token, has as expected policy gradient that of
    -beta·K~L(pi ‖ q·pi_ref) of whole completions, where tokens are drawn from the policy
    untruncated and weigh a constant (loss_type "dr_grpo"): log q is credited to the tokens before
    it, too. Weights that depend on lengths (1/|o|, or the tokens of the batch) give another
    gradient, and a clipped ratio clips this with the reward's. A constant to the gradient.
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
    """A per-token quantity reduced as TRL reduces its loss (a number, with its gradient), so that a
    term added beside it weighs what one inside would.

    Args:
        items: TRL's num_items_in_batch, the tokens of the whole generation batch of all processes.
        accumulation: the gradient accumulation steps of this update.
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
    if loss_type == "dapo":
        assert items is not None
        of_process = items.clamp(min=1.0) / processes
        return counted.sum() / (of_process * accumulation / steps_per_generation)
    raise SageError(
        f"this anchor does not know how loss_type {loss_type!r} weighs its tokens: "
        f"choose one of {', '.join(REDUCTIONS)}"
    )
