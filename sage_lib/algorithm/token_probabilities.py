"""From a model's logits to log-probabilities and entropies: the one place where either is computed,
so that a token has the same numbers everywhere."""

import copy
from collections.abc import Callable
from typing import Any

import torch


def completion_logits(
    model: torch.nn.Module,
    ids: torch.Tensor,
    start: int,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits from which each token of the completions was drawn, at temperature 1, not normalised:
    float32 of shape (batch, time, vocabulary).

    Args:
        ids: token ids of prompts and completions, shape (batch, prompt and time).
        start: length of the prompts, padding included; at least 1.
        attention_mask: shape of ``ids``, 0 where a token is padding; None: there is no padding.
    """
    return _of_completion(_forward(model, ids, attention_mask).logits, start)


def completion_logits_and_hidden(
    model: torch.nn.Module,
    ids: torch.Tensor,
    start: int,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`completion_logits`, and the last hidden states, float32 of (batch, time, width)."""
    result = _forward(model, ids, attention_mask, output_hidden_states=True)
    return _of_completion(result.logits, start), _of_completion(result.hidden_states[-1], start)


def logits_from_hidden(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """How ``model``'s own forward makes logits of its last hidden states: by its output matrix, and
    by whatever it scales or caps them with (Cohere, Granite, Gemma). The weights stay shared. From
    shape (batch, time, width) to (batch, time, vocabulary)."""
    layers = copy.copy(model.base_model)
    layers.__dict__.update(forward=_GivenStates, _forward_hooks={}, _forward_pre_hooks={})
    headed = copy.copy(model)
    headed.__dict__["_modules"] = {**model._modules, model.base_model_prefix: layers}

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        # The class's forward: TRL puts another one, which gives no logits, on the instance.
        made: torch.Tensor = type(model).forward(headed, inputs_embeds=hidden).logits
        return made

    return logits


class _GivenStates:
    """What layers return, with hidden states that are there already and nothing else."""

    def __init__(self, *args: Any, inputs_embeds: torch.Tensor, **asked: Any):
        self.last_hidden_state = inputs_embeds

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def at_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits in float32, divided by a sampling temperature."""
    logits = logits.float()
    # Temperature 1 changes no value and would cost a copy of the largest tensor there is.
    return logits if temperature == 1 else logits / temperature


def log_probabilities(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log pi (nats) of the whole vocabulary at a sampling temperature, shape (..., vocabulary)."""
    return at_temperature(logits, temperature).log_softmax(-1)


def drawn_log_probabilities(log_pi: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """log pi of the tokens ``drawn``, shape (...), from that of all, shape (..., vocabulary)."""
    return log_pi.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def entropies(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Entropy (nats, eq. 12) of the next token from logits of shape (..., vocabulary): float32.

    Every trained weight depends on the last digit of the branch guide's threshold: this is the
    arithmetic of torch.distributions.Categorical(logits=...).entropy(), bit for bit.
    """
    scaled = at_temperature(logits, temperature)
    log_pi = scaled - scaled.logsumexp(-1, keepdim=True)
    pi = log_pi.softmax(-1)
    finite_log_pi = log_pi.clamp(min=torch.finfo(log_pi.dtype).min)
    return -(finite_log_pi * pi).sum(-1)


def entropies_of(log_pi: torch.Tensor) -> torch.Tensor:
    """:func:`entropies` from finite log-probabilities, by the arithmetic of TRL's loss: the same up
    to rounding, a few 1e-5 nats over a vocabulary of 150,000."""
    return -(log_pi.exp() * log_pi).sum(-1)


def _forward(
    model: torch.nn.Module, ids: torch.Tensor, attention_mask: torch.Tensor | None, **asked: bool
) -> Any:
    if attention_mask is None:
        attention_mask = torch.ones_like(ids)
    return model(input_ids=ids, attention_mask=attention_mask, **asked)


def _of_completion(outputs: torch.Tensor, start: int) -> torch.Tensor:
    """The states before each token of the completion: the output at a token predicts the next."""
    return outputs[:, start - 1 : -1].float()
