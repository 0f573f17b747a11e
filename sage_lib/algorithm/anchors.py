"""What the KL term of a trained policy is taken to, in plain torch: the pieces that SageTrainer puts into TRL's loss."""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from sage_lib.errors import SageError

#: Tokens whose logits over the whole vocabulary are held at once by :func:`exact_forward_kl`.
CHUNK_TOKENS = 2048


def k3(anchor: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """Eq. 38 per token: exp(d) - d - 1 with d = ``anchor`` - ``logps`` (log q·pi_ref and log pi of the sampled tokens)."""
    difference = anchor - logps
    return difference.exp() - difference - 1


def return_credit(
    logps: torch.Tensor, reference: torch.Tensor, log_q: torch.Tensor | None, mask: torch.Tensor
) -> torch.Tensor:
    """Eq. 8 as a return: minus the log-ratio to q·pi_ref of this token and all later ones, shape (batch, time).

    Beta times this, added to the advantage of every token, has as policy gradient the gradient of -beta·K~L(pi ‖ q·pi_ref)
    of whole completions: log q is credited to the tokens before it, too. A constant to the gradient.
    """
    ratio = (logps - reference - (0 if log_q is None else log_q)).detach() * mask
    return -ratio.flip(1).cumsum(1).flip(1)


def exact_forward_kl(
    hidden: torch.Tensor,
    reference_hidden: torch.Tensor,
    head: Callable,
    reference_head: Callable,
    temperature: float = 1.0,
) -> torch.Tensor:
    """KL(pi_ref ‖ pi) over the whole vocabulary at every token (Section A.4), shape (batch, time), with its gradient.

    Args:
        hidden, reference_hidden: last hidden states before each completion token, shape (batch, time, hidden).
        head, reference_head: from hidden states to logits.
    """

    def rows(h: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        log_pi = (head(h).float() / temperature).log_softmax(-1)
        with torch.no_grad():
            log_ref = (reference_head(r).float() / temperature).log_softmax(-1)
        return torch.nn.functional.kl_div(log_pi, log_ref, reduction="none", log_target=True).sum(
            -1
        )

    size = max(1, CHUNK_TOKENS // hidden.shape[1])
    parts = [
        checkpoint(rows, h, r, use_reentrant=False)
        for h, r in zip(hidden.split(size), reference_hidden.split(size), strict=True)
    ]
    return torch.cat(parts)


#: Loss types whose reduction over tokens :func:`reduce` knows.
REDUCTIONS = ("grpo", "bnpo", "dr_grpo", "dapo")


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
    """A per-token quantity reduced as TRL reduces its loss, so that a term added beside it weighs what one inside would."""
    if loss_type == "grpo":
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / accumulation
    if loss_type == "bnpo":
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0) / accumulation
    if loss_type == "dr_grpo":
        return (
            (per_token * mask).sum() / (per_token.shape[0] * max_completion_length) / accumulation
        )
    if loss_type == "dapo":
        return (per_token * mask).sum() / (
            items.clamp(min=1.0) / processes * accumulation / steps_per_generation
        )
    raise SageError(
        f"this anchor does not know how loss_type {loss_type!r} weighs its tokens: choose one of {', '.join(REDUCTIONS)}"
    )


def replace_rows(
    batch: dict, rows: list[int], fresh: dict, fresh_rows: list[int], pad_token: int
) -> dict:
    """``batch`` with ``rows`` taken from ``fresh_rows`` of another batch; both are padded to the longer of the two.

    Prompts are padded on the left, everything else on the right; what has no row for each completion stays as it was.
    """
    size, fresh_size = batch["completion_ids"].shape[0], fresh["completion_ids"].shape[0]
    merged = dict(batch)
    for key, value in batch.items():
        other = fresh.get(key)
        if (
            not torch.is_tensor(value)
            or value.dim() == 0
            or value.shape[0] != size
            or not torch.is_tensor(other)
            or other.shape[0] != fresh_size
        ):
            continue
        if value.dim() > 1:
            width, left = max(value.shape[1], other.shape[1]), key.startswith("prompt")
            value, other = (
                _widen(x, width, left, pad_token if key.endswith("_ids") else 0)
                for x in (value, other)
            )
        value = value.clone()
        value[rows] = other[fresh_rows]
        merged[key] = value
    return merged


def _widen(x: torch.Tensor, width: int, left: bool, fill: int) -> torch.Tensor:
    extra = x.new_full((x.shape[0], width - x.shape[1], *x.shape[2:]), fill)
    return torch.cat([extra, x] if left else [x, extra], dim=1)
