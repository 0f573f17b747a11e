"""Log-probabilities and entropies from a model's logits. They are computed nowhere else, so that a
token has the same numbers everywhere."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


def completion_logits(
    model: torch.nn.Module,
    ids: torch.Tensor,
    start: int,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits of a causal language model before each token of completions, at temperature
    1 and not normalised: float32 of shape (batch, time, vocabulary).

    Args:
        model: the model.
        ids: token ids of prompts and completions, shape (batch, prompt and time).
        start: length of the prompts, padding included; at least 1.
        attention_mask: shape of ``ids``, 0 where a token is padding; None: there is no padding.
    """
    return _before_completion(_forward(model, ids, attention_mask).logits, start)


def completion_logits_and_hidden(
    model: torch.nn.Module,
    ids: torch.Tensor,
    start: int,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`completion_logits` and the last hidden states, float32 of (batch, time, width).
    The arguments are the same."""
    output = _forward(model, ids, attention_mask, output_hidden_states=True)
    states = _before_completion(output.hidden_states[-1], start)
    return _before_completion(output.logits, start), states


class Signals(NamedTuple):
    """Signals of completions under a policy, nats."""

    logps: torch.Tensor  # of the drawn tokens, shape (batch, time)
    entropies: torch.Tensor  # of the state before each token, shape (batch, time)


def completion_signals(
    model: torch.nn.Module,
    ids: torch.Tensor,
    start: int,
    attention_mask: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> Signals:
    """Return the signals of completions at a sampling temperature, by the arithmetic of TRL's loss.
    The other arguments are as in :func:`completion_logits`."""
    logits = completion_logits(model, ids, start, attention_mask)
    log_pi = log_probabilities(logits, temperature)
    return Signals(drawn_log_probabilities(log_pi, ids[:, start:]), entropies_of(log_pi))


def logits_from_hidden(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that makes logits from a model's last hidden states.

    It runs the model's forward without the layers: the output matrix, and a scale or cap (Cohere,
    Granite, Gemma). The weights stay shared. The function maps shape (batch, time, width) to
    (batch, time, vocabulary).
    """
    layers = copy.copy(model.base_model)
    layers.__dict__.update(forward=_GivenStates, _forward_hooks={}, _forward_pre_hooks={})
    headed = copy.copy(model)
    headed.__dict__["_modules"] = {**model._modules, model.base_model_prefix: layers}

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        # The class's forward: TRL puts another, which gives no logits, on the instance.
        output: torch.Tensor = type(model).forward(headed, inputs_embeds=hidden).logits
        return output

    return logits


class _GivenStates:
    """An output of the layers that holds given hidden states and nothing else."""

    def __init__(self, *args: Any, inputs_embeds: torch.Tensor, **options: Any):
        self.last_hidden_state = inputs_embeds

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def at_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits in float32, divided by a sampling temperature."""
    logits = logits.float()
    # Temperature 1 changes no value and would cost a copy of the largest tensor there is.
    return logits if temperature == 1 else logits / temperature


def log_probabilities(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return log pi (nats) of the whole vocabulary at a temperature, shape (..., vocabulary)."""
    return at_temperature(logits, temperature).log_softmax(-1)


def drawn_log_probabilities(log_pi: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Return log pi of the drawn tokens, shape (...), from log pi of all, (..., vocabulary)."""
    return log_pi.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def entropies(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the entropy (nats, eq. 12) of the next token from logits, (..., vocabulary): float32.

    All trained weights depend on the last digit of the branch guide's threshold: this is the
    arithmetic of torch.distributions.Categorical(logits=...).entropy(), bit for bit.
    """
    scaled = at_temperature(logits, temperature)
    log_pi = scaled - scaled.logsumexp(-1, keepdim=True)
    pi = log_pi.softmax(-1)
    finite_log_pi = log_pi.clamp(min=torch.finfo(log_pi.dtype).min)
    return -(finite_log_pi * pi).sum(-1)


def entropies_of(log_pi: torch.Tensor) -> torch.Tensor:
    """Return the entropies of finite log-probabilities, by the arithmetic of TRL's loss. They equal
    :func:`entropies` up to a few 1e-5 nats over a vocabulary of 150,000."""
    return -(log_pi.exp() * log_pi).sum(-1)


def _forward(
    model: torch.nn.Module, ids: torch.Tensor, attention_mask: torch.Tensor | None, **options: bool
) -> Any:
    if attention_mask is None:
        attention_mask = torch.ones_like(ids)
    return model(input_ids=ids, attention_mask=attention_mask, **options)


def _before_completion(outputs: torch.Tensor, start: int) -> torch.Tensor:
    """Return the outputs before each token of the completion: they predict it."""
    return outputs[:, start - 1 : -1].float()
