"""Forms of the KL term: how the divergence from the anchor q·pi_ref is estimated in training.

A form says what it requires of the trainer, how it changes a batch before TRL's loss reads it, and
what it adds to that loss. It holds no state. Tensors have shape (batch, time) unless a comment says
otherwise. This module loads without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sage_lib.algorithm.guided_trainer import is_sharded
from sage_lib.validation import pick

if TYPE_CHECKING:
    import torch

    from sage_lib.algorithm.guided_trainer import GuidedTrainer

#: Values of TRL's loss_type whose mean over tokens ``Rollouts._reduced`` computes.
REDUCTIONS = ("grpo", "bnpo", "dr_grpo", "dapo")


# -- inputs and outputs of a form ------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """Hidden states and heads, which give the distribution before each completion token."""

    hidden: torch.Tensor  # last hidden states of the policy, shape (batch, time, width)
    ref_hidden: torch.Tensor  # the same of the reference
    # A head makes logits from hidden states, with the scale or cap of the model.
    head: Callable[[torch.Tensor], torch.Tensor]
    ref_head: Callable[[torch.Tensor], torch.Tensor]
    temperature: float
    head_trained: bool = True  # whether weights of the policy's head have a gradient


@dataclass(frozen=True)
class Tokens:
    """A batch after the policy's forward pass. Only ``live_logps`` and ``vocabulary`` have a
    gradient."""

    live_logps: torch.Tensor  # log pi of the sampled tokens
    logps: torch.Tensor  # the same without a gradient
    ref_logps: torch.Tensor  # log pi_ref of the sampled tokens
    log_q: torch.Tensor | None  # of the guide; it stays while the batch is optimised
    credit: torch.Tensor | None  # of :func:`return_credit`; it stays as well
    advantages: torch.Tensor  # shape (batch,) or (batch, time)
    beta: float
    vocabulary: Vocabulary | None  # for a form that keeps hidden states


@dataclass(frozen=True)
class Shaped:
    """The result of a form for a batch."""

    ref_logps: torch.Tensor  # TRL's loss reads these as log pi_ref
    kl: torch.Tensor  # the divergence in the loss, per token, without a gradient
    advantages: torch.Tensor | None = None  # new ones, shape (batch, time); None: TRL's stay
    extra_loss: torch.Tensor | None = None  # beta times this is added to TRL's loss, per token


# -- the forms -------------------------------------------------------------------------------------


class KlForm:
    """Base of the forms. Its defaults belong to the plain per-token KL."""

    name: ClassVar[str]
    bias_corrected: ClassVar[bool] = False  # TRL multiplies its KL by the importance ratio
    kl_is_trls: ClassVar[bool] = True  # TRL logs the KL of this form; else we log it as "kl"
    keeps_hidden: ClassVar[bool] = False  # it reads :class:`Vocabulary`
    works_at_scoring: ClassVar[bool] = False  # it changes nothing but ref_logps
    credits_returns: ClassVar[bool] = False  # it reads ``credit`` of :class:`Tokens`

    def requires(self, trainer: GuidedTrainer) -> Iterator[str]:
        """Yield a sentence for each reason why this form cannot work in a trainer."""
        if trainer.shaped_at_scoring and not self.works_at_scoring:
            yield f"Unsloth's GPU trainer has no KL form {self.name!r}: use plain TRL for it"

    def shape(self, tokens: Tokens) -> Shaped:
        """Replace pi_ref by the anchor q·pi_ref: TRL computes its k3 to what stands there."""
        log_anchor = tokens.ref_logps
        if tokens.log_q is not None:
            log_anchor = log_anchor + tokens.log_q
        return Shaped(log_anchor, kl=k3(log_anchor, tokens.logps))

    def first_loss(self, shaped: Shaped) -> torch.Tensor | None:
        """Return the per-token loss of the first batch; None where a check of the KL suffices."""
        return None


class K3(KlForm):
    """Eq. 38 per token, as in the paper's code; TRL's KL with ``use_bias_correction_kl=False``."""

    name = "k3"
    works_at_scoring = True


class K3Corrected(K3):
    """Eq. 38 per token, multiplied by the token's importance ratio: TRL's own default.

    The expected gradient does not depend on a guide of the state, if tokens are drawn from the
    policy untruncated and all have the same weight (loss_type "dr_grpo").
    """

    name = "k3_corrected"
    bias_corrected = True


class SeparateKl(KlForm):
    """Base of the forms whose KL is not TRL's. They show TRL a reference equal to the policy, and
    put their KL into the advantages, or add it to the loss."""

    kl_is_trls = False

    def requires(self, trainer: GuidedTrainer) -> Iterator[str]:
        yield from super().requires(trainer)
        if trainer.beta == 0 or trainer.loss_type not in REDUCTIONS:
            yield f"the KL form {self.name!r} needs beta > 0, and loss_type {', '.join(REDUCTIONS)}"


class Sequence(SeparateKl):
    """The log-ratio of the completion, credited through the advantages: :func:`return_credit`."""

    name = "sequence"
    credits_returns = True

    def requires(self, trainer: GuidedTrainer) -> Iterator[str]:
        yield from super().requires(trainer)
        if trainer.importance_sampling_level != "token" or masks_tokens(trainer):
            yield (
                "the KL form 'sequence' is in the advantages of all tokens: set "
                "importance_sampling_level to token, top_entropy_quantile to 1 and "
                "off_policy_mask_threshold to None"
            )

    def shape(self, tokens: Tokens) -> Shaped:
        assert tokens.credit is not None
        advantages, log_ratio = tokens.advantages, tokens.logps - tokens.ref_logps
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        return Shaped(
            ref_logps=tokens.logps,
            kl=log_ratio if tokens.log_q is None else log_ratio - tokens.log_q,
            advantages=advantages + tokens.beta * tokens.credit,
        )

    def first_loss(self, shaped: Shaped) -> torch.Tensor | None:
        """Return minus the advantages: on-policy the importance ratio is 1."""
        assert shaped.advantages is not None
        return -shaped.advantages


class ForwardKL(SeparateKl):
    """KL(pi_ref ‖ pi) per token (Section A.4), summed over the whole vocabulary, without a guide.

    It is exact after each prefix, where k3 estimates from one token. The policy draws the prefixes.
    """

    name = "forward_kl"
    keeps_hidden = True

    def requires(self, trainer: GuidedTrainer) -> Iterator[str]:
        yield from super().requires(trainer)
        if trainer.guide is not None:
            yield "the forward KL has no sampled token for a guide to act on: use the KL form k3"
        if is_sharded(trainer):
            yield "the forward KL needs whole weights on every process: train without FSDP or ZeRO"

    def shape(self, tokens: Tokens) -> Shaped:
        from sage_lib.algorithm.forward_kl import exact_forward_kl

        assert tokens.vocabulary is not None
        divergence = exact_forward_kl(tokens.vocabulary)
        return Shaped(tokens.logps, kl=divergence.detach(), extra_loss=divergence)


#: Each form by its name in a profile.
KL_FORMS: dict[str, type[KlForm]] = {
    form.name: form for form in (K3, K3Corrected, Sequence, ForwardKL)
}


def build_kl_form(form: str | KlForm, where: str = "kl_form") -> KlForm:
    """Return the form of a name; a SageError that begins with ``where`` for an unknown one. An
    instance is returned as it is."""
    return form if isinstance(form, KlForm) else pick(form, KL_FORMS, where, "KL form")()


# -- formulas --------------------------------------------------------------------------------------


def masks_tokens(trainer: GuidedTrainer) -> bool:
    """Return whether TRL masks the advantages of some tokens in its loss, but not their KL."""
    return trainer.top_entropy_quantile < 1 or trainer.off_policy_mask_threshold is not None


def k3(log_anchor: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """Return eq. 38 per token: exp(d) - d - 1, d = log q·pi_ref - log pi of the sampled tokens."""
    difference = log_anchor - logps
    return difference.exp() - difference - 1


def return_credit(
    logps: torch.Tensor, ref_logps: torch.Tensor, log_q: torch.Tensor | None, mask: torch.Tensor
) -> torch.Tensor:
    """Return minus the log-ratio to q·pi_ref (eq. 8), summed from each token to the end.

    Beta times the result is added to the advantages. Their expected policy gradient then gains the
    gradient of -beta·K~L(pi ‖ q·pi_ref) of whole completions. This holds where tokens are drawn
    from the policy untruncated and weigh a constant (loss_type "dr_grpo"). ``mask`` is 1 on counted
    tokens; the result has no gradient.
    """
    log_ratio = logps - ref_logps
    if log_q is not None:
        log_ratio = log_ratio - log_q
    log_ratio = log_ratio.detach() * mask
    return -log_ratio.flip(1).cumsum(1).flip(1)
