"""The forward KL over the whole vocabulary, a few tokens' logits at a time (Section A.4)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from sage_lib.algorithm.token_probabilities import (
    at_temperature,
    drawn_log_probabilities,
    log_probabilities,
)

#: From hidden states of shape (batch, time, width) to logits (batch, time, vocabulary).
Head = Callable[[torch.Tensor], torch.Tensor]
#: Logits (tokens x vocabulary) of which a few copies are held at once: 441 tokens of a vocabulary
#: of 152,064, 268 MB in float32; on a processor 34 tokens, 21 MB: fewer read the output matrix more
#: often, and three copies of more are over the 64 MB that glibc keeps, to be had anew page by page.
CHUNK_LOGITS, PROCESSOR_CHUNK_LOGITS = 2**26, 5 * 2**20


def exact_forward_kl(
    hidden: torch.Tensor,
    reference_hidden: torch.Tensor,
    head: Head,
    reference_head: Head,
    temperature: float = 1.0,
    head_trained: bool = True,
    *,
    drawn: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(pi_ref ‖ pi) at every token, with its gradient: a sum over the whole vocabulary, not an
    estimate from the sampled token.

    The logits of a few tokens are made at a time, :data:`CHUNK_LOGITS`. Where the head is not
    trained, as below an adapter, the gradient by the hidden states is taken with them, and no
    logits are made twice; where it is, they are made once more on the way back. Both are the same
    up to rounding.

    Args: as in ``anchors.Vocabulary``. The reference's logits are written over.

    Returns:
        float32 of shape (batch, time), nats; and log pi_ref of the ``drawn`` tokens, of that shape.
    """
    with torch.no_grad():
        words = head(hidden[:1, :1]).shape[-1]
    on_processor = hidden.device.type == "cpu"
    size = max(1, (PROCESSOR_CHUNK_LOGITS if on_processor else CHUNK_LOGITS) // words)
    states, references = hidden.flatten(0, 1), reference_hidden.flatten(0, 1)
    drawn = drawn.flatten()
    if not head_trained:
        found, log_ref_drawn = _WithSlopes.apply(  # type: ignore[no-untyped-call]
            states, references, drawn, head, reference_head, temperature, size
        )
        return found.view(hidden.shape[:2]), log_ref_drawn.view(hidden.shape[:2])

    def of_tokens(
        h: torch.Tensor, r: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_pi = log_probabilities(_logits(head, h), temperature)
        with torch.no_grad():
            log_ref = log_probabilities(_logits(reference_head, r), temperature)
        terms = torch.nn.functional.kl_div(log_pi, log_ref, reduction="none", log_target=True)
        return terms.sum(-1), drawn_log_probabilities(log_ref, tokens)

    chunks = zip(states.split(size), references.split(size), drawn.split(size), strict=True)
    parts = [checkpoint(of_tokens, *chunk, use_reentrant=False) for chunk in chunks]
    divergences, log_refs = zip(*parts, strict=True)
    return torch.cat(divergences).view(hidden.shape[:2]), torch.cat(log_refs).view(hidden.shape[:2])


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
        drawn: torch.Tensor,
        head: Head,
        reference_head: Head,
        temperature: float,
        size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Made before the chunks: what is kept between large tensors that come and go leaves holes
        # in the heap which the next ones do not fit.
        slopes = torch.empty_like(states)
        divergences = torch.empty(len(states), dtype=torch.float32, device=states.device)
        log_refs = torch.empty_like(divergences)
        for first in range(0, len(states), size):
            rows = slice(first, first + size)
            divergences[rows], log_refs[rows], slopes[rows] = _with_slopes(
                states[rows], references[rows], drawn[rows], head, reference_head, temperature
            )
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(log_refs)
        return divergences, log_refs

    @staticmethod
    def backward(ctx: Any, *arrived: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (arrived[0].unsqueeze(-1) * slopes).to(slopes.dtype), *([None] * 6)


def _with_slopes(
    states: torch.Tensor,
    references: torch.Tensor,
    drawn: torch.Tensor,
    head: Head,
    reference_head: Head,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a chunk. What it made is gone before the next one's logits are: three copies at once."""
    with torch.enable_grad():
        leaf = states.detach().requires_grad_()
        logits = _logits(head, leaf)
    scores = at_temperature(logits.detach(), temperature)
    gaps = at_temperature(_logits(reference_head, references), temperature)
    pi_ref = gaps.softmax(-1)
    # log pi = score - highest + log pi(highest): one exponential for each logit, where
    # log-probabilities cost a second one. The highest are taken off before the sum: where all
    # scores of one side lie elsewhere than the other's, they would cost it digits.
    top_ref = gaps.amax(-1, keepdim=True)
    below_ref = drawn_log_probabilities(gaps, drawn) - top_ref.squeeze(-1)
    shift = top_ref - scores.amax(-1, keepdim=True)
    expected = gaps.sub_(scores).sub_(shift).mul_(pi_ref).sum(-1)
    pi = torch.softmax(scores, -1, out=gaps)  # in memory that is at hand
    # Over a large vocabulary softmax sums to 1 within a few 1e-6, and its sum knows by how much.
    total_ref = pi_ref.sum(-1)
    highest_ref, highest = pi_ref.amax(-1) / total_ref, pi.amax(-1) / pi.sum(-1)
    divergences = expected / total_ref + (highest_ref / highest).log()
    by_scores = pi.sub_(pi_ref).to(logits.dtype)
    (slopes,) = torch.autograd.grad(logits, leaf, by_scores)
    return divergences, below_ref + highest_ref.log(), slopes.div_(temperature)
