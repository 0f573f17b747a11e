"""The forward KL over the whole vocabulary (Section A.4), a few tokens' logits at a time. A hook
takes the last hidden states from the passes that TRL makes anyway."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm.backend import Batch, counted_tokens
from sage_lib.algorithm.kl_forms import Vocabulary
from sage_lib.errors import SageError

#: Logits (tokens x vocabulary) of a chunk: 268 MB in float32. On a processor 21 MB: three copies
#: exist at once, and glibc keeps 64 MB of freed memory for reuse.
CHUNK_LOGITS, PROCESSOR_CHUNK_LOGITS = 2**26, 5 * 2**20
#: Added to TRL's batch: the reference's hidden states, shape (batch, time, width). TRL shuffles and
#: splits its batch after scoring, and they must stay with their rows.
REF_HIDDEN = "ref_hidden"
#: Largest mean difference between our log-probabilities and TRL's: in float32, and where one of the
#: two is rounded to bfloat16.
SINGLE_GAP, HALF_GAP = 1e-3, 0.15
#: Tokens of a completion that :func:`require_same` compares in the first batch.
CHECKED_TOKENS = 64


def exact_forward_kl(v: Vocabulary) -> torch.Tensor:
    """Return KL(pi_ref ‖ pi) at each token with its gradient, nats: float32 of (batch, time).

    If the head is not trained, as below an adapter, the forward pass also computes the gradient in
    the hidden states. If it is trained, the backward pass computes the logits once more. The
    reference's logits are overwritten.
    """
    with torch.no_grad():
        vocabulary_size = v.head(v.hidden[:1, :1]).shape[-1]
    on_processor = v.hidden.device.type == "cpu"
    size = max(1, (PROCESSOR_CHUNK_LOGITS if on_processor else CHUNK_LOGITS) // vocabulary_size)
    states, ref_states = v.hidden.flatten(0, 1), v.ref_hidden.flatten(0, 1)
    if not v.head_trained:
        divergences: torch.Tensor = _WithSlopes.apply(  # type: ignore[no-untyped-call]
            states, ref_states, v, size
        )
        return divergences.view(v.hidden.shape[:2])

    def of_chunk(hidden: torch.Tensor, ref_hidden: torch.Tensor) -> torch.Tensor:
        log_pi = probs.log_probabilities(v.head(hidden[None])[0], v.temperature)
        with torch.no_grad():
            log_ref = probs.log_probabilities(v.ref_head(ref_hidden[None])[0], v.temperature)
        terms = torch.nn.functional.kl_div(log_pi, log_ref, reduction="none", log_target=True)
        return terms.sum(-1)

    chunks = zip(states.split(size), ref_states.split(size), strict=True)
    parts = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat(parts).view(v.hidden.shape[:2])


class _WithSlopes(torch.autograd.Function):
    """Computes the divergence of each token from hidden states, shape (tokens, width). The forward
    pass also computes the gradient in these states; the backward pass only multiplies it."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, ref_states: torch.Tensor, v: Vocabulary, size: int
    ) -> torch.Tensor:
        # Allocated before the chunks: allocated between two of them, they would split free memory
        # into parts that are too small for the next chunk.
        slopes = torch.empty_like(states)
        divergences = torch.empty(len(states), dtype=torch.float32, device=states.device)
        for first in range(0, len(states), size):
            rows = slice(first, first + size)
            divergences[rows], slopes[rows] = _with_slopes(states[rows], ref_states[rows], v)
        ctx.save_for_backward(slopes)
        return divergences

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (grad_output.unsqueeze(-1) * slopes).to(slopes.dtype), None, None, None


def _with_slopes(
    states: torch.Tensor, ref_states: torch.Tensor, v: Vocabulary
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergences of a chunk and their slopes. At most three copies of its logits exist
    at once, and none when it returns."""
    with torch.enable_grad():
        leaf = states.detach().requires_grad_()
        logits = v.head(leaf[None])[0]
    scores = probs.at_temperature(logits.detach(), v.temperature)
    ref_scores = probs.at_temperature(v.ref_head(ref_states[None])[0], v.temperature)
    pi_ref = ref_scores.softmax(-1)
    # log pi = score - highest + log pi(highest): one exponential for each logit. Scores less the
    # highest keep the sum's digits, however large the scores of one model are.
    shift = ref_scores.amax(-1, keepdim=True) - scores.amax(-1, keepdim=True)
    expected = ref_scores.sub_(scores).sub_(shift).mul_(pi_ref).sum(-1)
    pi = torch.softmax(scores, -1, out=ref_scores)  # in the same memory
    # Over a large vocabulary the sum of softmax differs from 1 by a few 1e-6: divide by it.
    total_ref = pi_ref.sum(-1)
    highest_ref, highest = pi_ref.amax(-1) / total_ref, pi.amax(-1) / pi.sum(-1)
    divergences = expected / total_ref + (highest_ref / highest).log()
    by_scores = pi.sub_(pi_ref).to(logits.dtype)  # the gradient in the logits, times temperature
    (slopes,) = torch.autograd.grad(logits, leaf, by_scores)
    return divergences, slopes.div_(v.temperature)


class HiddenStates:
    """Last hidden states of the scoring passes of two plain causal models: the policy and its
    reference, which may be the same model."""

    def __init__(self, policy: Any, ref_model: Any):
        self.policy, self.ref_model = policy, ref_model
        self.last: list[torch.Tensor] | None = None  # of the last pass; None: they are not kept
        for model in {policy, ref_model}:
            model.get_decoder().register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self.last is not None:
            self.last.append(output.last_hidden_state)

    def before(self, time: int) -> torch.Tensor:
        """Return the states before each of ``time`` completion tokens, (batch, time, width)."""
        assert self.last is not None
        return torch.cat(self.last)[:, -time - 1 : -1]

    def vocabulary(self, batch: Batch, temperature: float) -> Vocabulary:
        """Return states and heads of both models for a batch, after the policy's pass over it."""
        output_matrix = self.policy.get_output_embeddings()
        return Vocabulary(
            hidden=self.before(batch["completion_ids"].shape[1]),
            ref_hidden=batch[REF_HIDDEN],
            head=probs.logits_from_hidden(self.policy),
            ref_head=probs.logits_from_hidden(self.ref_model),
            temperature=temperature,
            head_trained=any(p.requires_grad for p in output_matrix.parameters()),
        )


@torch.no_grad()
def require_same(v: Vocabulary, batch: Batch, logps: torch.Tensor, half: bool) -> None:
    """Raise SageError unless the distributions agree with TRL's log-probabilities: of the policy,
    ``logps``, and of the reference, in the batch. Either may be rounded to ``half`` precision.

    The first tokens of the longest completion are compared.
    """
    mask = counted_tokens(batch)
    row, first = int(mask.sum(1).argmax()), slice(CHECKED_TOKENS)
    mask = mask[row, first]
    models = (
        ("policy", v.hidden, v.head, logps),
        ("reference", v.ref_hidden, v.ref_head, batch["ref_per_token_logps"]),
    )
    for name, hidden, head, expected in models:
        log_pi = probs.log_probabilities(head(hidden[row, first][None])[0], v.temperature)
        computed = probs.drawn_log_probabilities(log_pi, batch["completion_ids"][row, first])
        gaps = (computed - expected[row, first]).abs() * mask
        gap = (gaps.sum() / mask.sum().clamp(min=1)).item()
        if gap > (HALF_GAP if half else SINGLE_GAP):
            raise SageError(
                f"the distributions of the forward KL are not the {name}'s in TRL's loss "
                f"(log-probabilities of the sampled tokens differ by {gap:.3g}): "
                f"use the KL form k3 with this model"
            )
