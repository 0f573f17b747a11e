"""The forward KL over the whole vocabulary, a few tokens' logits at a time (Section A.4)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from sage_lib.algorithm.token_probabilities import log_probabilities

#: From hidden states of shape (batch, time, width) to logits (batch, time, vocabulary).
Head = Callable[[torch.Tensor], torch.Tensor]
#: Logits (tokens x vocabulary) of which a few copies are held at once: 55 tokens of a vocabulary of
#: 152,064. In float32 they take just less than 32 MiB, above which malloc asks the system for every
#: tensor anew, and a processor spends as long on that as on the arithmetic.
CHUNK_LOGITS = 2**23


def exact_forward_kl(
    hidden: torch.Tensor,
    reference_hidden: torch.Tensor,
    head: Head,
    reference_head: Head,
    temperature: float = 1.0,
    head_trained: bool = True,
) -> torch.Tensor:
    """KL(pi_ref ‖ pi) at every token, with its gradient: a sum over the whole vocabulary, not an
    estimate from the sampled token.

    No more than :data:`CHUNK_LOGITS` are made at a time. Where the head is not trained, as below an
    adapter, the gradient by the hidden states is taken with them, and no logits are made twice;
    where it is, they are made once more on the way back. Both are the same up to rounding.

    Args: as in ``anchors.Vocabulary``.

    Returns:
        float32 of shape (batch, time), nats.
    """
    with torch.no_grad():
        words = head(hidden[:1, :1]).shape[-1]
    size = max(1, CHUNK_LOGITS // words)
    states, references = (
        hidden.flatten(0, 1).split(size),
        reference_hidden.flatten(0, 1).split(size),
    )

    def of_tokens(h: torch.Tensor, r: torch.Tensor) -> Any:
        if not head_trained:
            return _WithSlopes.apply(h, r, head, reference_head, temperature)  # type: ignore[no-untyped-call]
        log_pi = log_probabilities(_logits(head, h), temperature)
        with torch.no_grad():
            log_ref = log_probabilities(_logits(reference_head, r), temperature)
        terms = torch.nn.functional.kl_div(log_pi, log_ref, reduction="none", log_target=True)
        return terms.sum(-1)

    parts = []
    for h, r in zip(states, references, strict=True):
        again = head_trained and torch.is_grad_enabled()
        parts.append(checkpoint(of_tokens, h, r, use_reentrant=False) if again else of_tokens(h, r))
    return torch.cat(parts).view(hidden.shape[:2])


def _logits(head: Head, states: torch.Tensor) -> torch.Tensor:
    """From states of shape (tokens, width)."""
    return head(states.unsqueeze(0)).squeeze(0)


class _WithSlopes(torch.autograd.Function):
    """The divergence of each token, and its gradient by the token's hidden state: by the logits it
    is (pi - pi_ref) / temperature, and each token depends on its own state alone, so that it only
    remains to multiply it by what arrives."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        references: torch.Tensor,
        head: Head,
        reference_head: Head,
        temperature: float,
    ) -> torch.Tensor:
        with torch.enable_grad():
            leaf = states.detach().requires_grad_()
            logits = _logits(head, leaf)
        log_ref = log_probabilities(_logits(reference_head, references), temperature)
        log_pi = log_probabilities(logits.detach(), temperature)
        pi_ref = log_ref.exp()
        divergences = log_ref.sub_(log_pi).mul_(pi_ref).sum(-1)
        by_logits = log_pi.exp_().sub_(pi_ref).div_(temperature).to(logits.dtype)
        (slopes,) = torch.autograd.grad(logits, leaf, by_logits)
        ctx.save_for_backward(slopes)
        return divergences

    @staticmethod
    def backward(ctx: Any, *arrived: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (arrived[0].unsqueeze(-1) * slopes).to(slopes.dtype), None, None, None, None
