"""Signals of a distribution over the next token: branching, mass, size of the update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

if TYPE_CHECKING:  # so that reading results does not wait for it
    import torch

#: The quantiles of a signal that a guide's threshold can be taken from.
QUANTILES = (0.5, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
BINS = 60


def gradient_norm(
    weight: ArrayLike, logits: ArrayLike, drawn: ArrayLike, hidden: ArrayLike
) -> NDArray[np.float64]:
    """Return G_t of the exploration report (eq. 4, 14): |alpha_t| · ‖e(o_t) - pi‖ · ‖h_t‖.

    It is the Frobenius norm of a token's gradient in the output matrix. The weight alpha, the ids
    of the drawn tokens and the norms have shape (tokens,), logits (tokens, vocabulary), and the
    last hidden states (tokens, width).
    """
    ids = np.asarray(drawn)
    difference = -softmax(np.asarray(logits, dtype=np.float64), axis=-1)
    difference[np.arange(len(ids)), ids] += 1
    length = np.linalg.norm(difference, axis=-1)
    return np.abs(weight) * length * np.linalg.norm(hidden, axis=-1)


def runner_up(logits: ArrayLike, drawn: ArrayLike) -> NDArray[np.int64]:
    """Return the most likely token besides the drawn one (exploration report, eq. 5).

    Shapes are as in :func:`gradient_norm`.
    """
    ids = np.asarray(drawn)
    others = np.array(logits, dtype=np.float64)
    others[np.arange(len(ids)), ids] = -np.inf
    return others.argmax(axis=-1)


def perplexity(log_probabilities: ArrayLike) -> float:
    """Return eq. 39 of a completion, NaN without tokens, from their log-probabilities (nats)."""
    values = np.asarray(log_probabilities, dtype=np.float64)
    return float(np.exp(-values.mean())) if values.size else float("nan")


def summary(values: NDArray[Any]) -> dict[str, Any]:
    """Return number, mean, quantiles and histogram of a signal, shape (tokens,)."""
    counts, edges = np.histogram(values, bins=BINS)
    return {
        "tokens": int(values.size),
        "mean": float(values.mean()),
        "quantiles": {str(q): float(np.quantile(values, q)) for q in QUANTILES},
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }


def branching_factor(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the rollout branching factor (exploration report, 2.2), whole numbers of shape (...).

    It is the number of tokens, likeliest first, that together hold 95 % of the mass.
    ``probabilities`` have shape (..., vocabulary).
    """
    ordered = probabilities.double().sort(-1, descending=True).values
    return (ordered.cumsum(-1) < 0.95 - 1e-12).sum(-1) + 1


def kept_mass(log_pi: torch.Tensor, min_p: float) -> torch.Tensor:
    """Return the mass that min-p can draw: tokens of at least ``min_p`` times the likeliest."""
    pi = log_pi.exp()
    return (pi * (pi >= min_p * pi.amax(-1, keepdim=True))).sum(-1)
