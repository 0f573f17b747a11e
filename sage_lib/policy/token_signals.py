"""What a distribution over the next token says: branching, kept mass, size of the update.

Log-probabilities and entropies themselves come from ``sage_lib.algorithm.token_probabilities``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

if TYPE_CHECKING:  # so that reading results does not wait for it
    import torch

#: Which quantiles of a signal are kept; a profile's guide can take its threshold from any of them.
QUANTILES = (0.5, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
BINS = 60


def gradient_norm(
    weight: ArrayLike, logits: ArrayLike, drawn: ArrayLike, hidden: ArrayLike
) -> NDArray[np.float64]:
    """G_t of the exploration report (eq. 4, 14): |alpha_t| · ‖e(o_t) - pi‖ · ‖h_t‖.

    That is the Frobenius norm of a token's gradient in the output matrix, without building it.

    Args:
        weight: alpha_t, shape (tokens,).
        logits: shape (tokens, vocabulary); log-probabilities will do.
        drawn: index of the sampled token, shape (tokens,).
        hidden: last hidden state, shape (tokens, width).

    Returns:
        Shape (tokens,).
    """
    chosen = np.asarray(drawn)
    difference = -softmax(np.asarray(logits, dtype=np.float64), axis=-1)
    difference[np.arange(len(chosen)), chosen] += 1
    length = np.linalg.norm(difference, axis=-1)
    return np.abs(weight) * length * np.linalg.norm(hidden, axis=-1)


def runner_up(logits: ArrayLike, drawn: ArrayLike) -> NDArray[np.int64]:
    """The most likely token other than the drawn one (exploration report, eq. 5), shape (tokens,).

    ``logits`` has shape (tokens, vocabulary), ``drawn`` (tokens,).
    """
    chosen = np.asarray(drawn)
    others = np.array(logits, dtype=np.float64)
    others[np.arange(len(chosen)), chosen] = -np.inf
    return others.argmax(axis=-1)


def perplexity(log_probabilities: ArrayLike) -> float:
    """Eq. 39 of one completion: exp of minus the mean log-probability (nats) of its tokens.

    NaN without tokens.
    """
    values = np.asarray(log_probabilities, dtype=np.float64)
    return float(np.exp(-values.mean())) if values.size else float("nan")


def summary(values: NDArray[Any]) -> dict[str, Any]:
    """What is kept of a signal, ``values`` of shape (tokens,) in any unit.

    {"tokens": how many, "mean", "quantiles": {"0.5": value, ...} as :data:`QUANTILES`,
    "histogram": {"counts", "edges"} of :data:`BINS` equal bins}; mean, quantiles and edges are in
    the unit of ``values``.
    """
    counts, edges = np.histogram(values, bins=BINS)
    return {
        "tokens": int(values.size),
        "mean": float(values.mean()),
        "quantiles": {str(q): float(np.quantile(values, q)) for q in QUANTILES},
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }


def branching_factor(probabilities: torch.Tensor, mass: float = 0.95) -> torch.Tensor:
    """Rollout branching factor (exploration report, 2.2): the fewest tokens that hold ``mass``.

    ``probabilities`` has shape (..., vocabulary); returns whole numbers of shape (...).
    """
    ordered = probabilities.double().sort(-1, descending=True).values
    short_of_mass = ordered.cumsum(-1) < mass - 1e-12
    return short_of_mass.sum(-1) + 1


def kept_mass(log_pi: torch.Tensor, min_p: float) -> torch.Tensor:
    """Probability of the tokens that min-p sampling can draw.

    Those are the ones of at least ``min_p`` times the probability of the likeliest.

    ``log_pi`` has shape (..., vocabulary); returns shape (...). Where it is below 1 the sampled
    distribution is not the one that the loss scores.
    """
    pi = log_pi.exp()
    kept = pi >= min_p * pi.amax(-1, keepdim=True)
    return (pi * kept).sum(-1)
