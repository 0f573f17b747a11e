"""What a distribution over the next token says: log-probabilities, entropy, branching, kept mass, gradient size."""

import numpy as np
import torch
from scipy.special import softmax


def gradient_norm(
    weight: np.ndarray, logits: np.ndarray, drawn: np.ndarray, hidden: np.ndarray
) -> np.ndarray:
    """G_t of the exploration report (eq. 4, 14): |alpha_t| · ‖e(o_t) - pi‖ · ‖h_t‖, the Frobenius norm of a token's
    gradient in the output matrix, without building it.

    Args:
        weight: alpha_t, shape (tokens,).
        logits: shape (tokens, vocabulary).
        drawn: index of the sampled token, shape (tokens,).
        hidden: last hidden state, shape (tokens, width).
    """
    difference = -softmax(np.asarray(logits, dtype=np.float64), axis=-1)
    difference[np.arange(len(drawn)), drawn] += 1
    return np.abs(weight) * np.linalg.norm(difference, axis=-1) * np.linalg.norm(hidden, axis=-1)


def runner_up(logits: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """The most likely token other than the drawn one (exploration report, eq. 5): ``logits`` (tokens, vocabulary), ``drawn`` (tokens,)."""
    others = np.array(logits, dtype=np.float64)
    others[np.arange(len(drawn)), drawn] = -np.inf
    return others.argmax(axis=-1)


def perplexity(log_probabilities: np.ndarray) -> float:
    """Eq. 39 of one completion: exp of minus the mean log-probability of its tokens; NaN without tokens."""
    values = np.asarray(log_probabilities, dtype=np.float64)
    return float(np.exp(-values.mean())) if values.size else float("nan")


def summary(values: np.ndarray) -> dict:
    """What is kept of a distribution over tokens, ``values`` of shape (tokens,) in any unit: size, mean, quantiles and a histogram
    of 60 equal bins, all but the size and the counts in that unit."""
    quantiles = [0.5, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0]
    counts, edges = np.histogram(values, bins=60)
    return {
        "tokens": int(values.size),
        "mean": float(values.mean()),
        "quantiles": {str(q): float(np.quantile(values, q)) for q in quantiles},
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }


def branching_factor(probabilities: torch.Tensor, mass: float = 0.95) -> torch.Tensor:
    """Rollout branching factor (exploration report, Section 2.2): the fewest tokens whose probability reaches ``mass``, for every state.

    ``probabilities``: shape (..., vocabulary); returns whole numbers of shape (...).
    """
    ordered = probabilities.double().sort(-1, descending=True).values
    return (ordered.cumsum(-1) < mass - 1e-12).sum(-1) + 1


def kept_mass(log_pi: torch.Tensor, min_p: float) -> torch.Tensor:
    """Probability of the tokens that min-p sampling can draw, those of at least ``min_p`` times the most likely one's.

    ``log_pi``: shape (..., vocabulary); returns shape (...). Where it is below 1 the sampled distribution is not the one
    that the loss scores.
    """
    pi = log_pi.exp()
    return (pi * (pi >= min_p * pi.amax(-1, keepdim=True))).sum(-1)
