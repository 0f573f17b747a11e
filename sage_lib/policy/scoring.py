"""Scores of finished samples by models, and exact probabilities of valid completions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm.shared_prompts import prompts_read_once
from sage_lib.policy import loading, token_signals
from sage_lib.policy.sampling import with_end
from sage_lib.tasks import prompts
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.table import task_of

COLUMNS = ["dataset", "problem", "number", "correct", "tokens"]
COLUMNS += ["perplexity", "entropy", "branching"]
LOGITS = 100_000_000  # that are held at a time (samples x tokens x vocabulary)


class Signals(NamedTuple):  # of each token of a completion, shape (tokens,)
    base_log_pi: NDArray[Any]  # of the token under the base model, nats
    entropy: NDArray[Any]  # of the state before it under the policy, nats
    branching: NDArray[Any] = np.empty(0)  # factor of that state under the policy, or empty


@torch.no_grad()
def score(
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    rows: Sequence[Mapping[str, Any]],
    limit: int,
) -> pd.DataFrame:
    """Score the first ``limit`` samples of each problem. ``rows`` are of ``sampling.collect``, one
    for each problem, with a list "correct".

    Returns:
        A row for each sample, with columns :data:`COLUMNS`. ``perplexity`` (eq. 39) is under the
        base; ``entropy`` (nats, temperature 1) and ``branching`` (tokens within 95 % of the mass)
        are means over the policy's states. All three are NaN for a sample without tokens.
    """
    table = []
    for problem, row in zip(problems, rows, strict=True):
        prompt = loading.encode(tokenizer, problem.question)
        bodies = with_end(row, model, tokenizer)[:limit]
        scored = signals(model, base, prompt, bodies, loading.pad_id(tokenizer))
        for number, of_tokens in enumerate(scored):
            name = (problem.dataset, problem.id, number, bool(row["correct"][number]))
            perplexity, tokens = token_signals.perplexity(of_tokens.base_log_pi), len(of_tokens[0])
            means = [x.mean() if tokens else np.nan for x in of_tokens[1:]]
            table.append((*name, tokens, perplexity, *means))
    return pd.DataFrame(table, columns=COLUMNS)


@torch.no_grad()
def signals(
    model: PreTrainedModel,
    base: PreTrainedModel,
    prompt: list[int],
    bodies: Sequence[list[int]],
    pad: int,
    branching: bool = True,
) -> Iterator[Signals]:
    """Compute the signals of each completion of a prompt, from the token ids of its ``bodies``.

    The factor of ``branching`` sorts the vocabulary, which doubles the time for a large one.
    """
    start = len(prompt)
    length = start + max(map(len, bodies), default=0)
    at_a_time = max(1, LOGITS // (length * model.config.vocab_size))
    for first in range(0, len(bodies), at_a_time):
        of_batch = bodies[first : first + at_a_time]
        batch = loading.padded([prompt + body for body in of_batch], pad, "right")
        ids, mask = (x.to(model.device) for x in batch)
        log_pi = _log_pi(model, ids, start, mask)
        base_log_pi = log_pi if base is model else _log_pi(base, ids, start, mask)
        drawn = probs.drawn_log_probabilities(base_log_pi, ids[:, start:])
        by_token = [drawn, probs.entropies_of(log_pi)]
        by_token += [token_signals.branching_factor(log_pi.exp())] if branching else []
        by_row = [x.cpu().numpy() for x in by_token]
        for row, body in enumerate(of_batch):
            yield Signals(*(x[row, : len(body)] for x in by_row))


@torch.no_grad()
def valid_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    tempered: Sequence[float] = (),
) -> pd.DataFrame:
    """Compute log pi(y | x) of each valid completion y of the problems, end token included.

    ``tempered`` are further temperatures T: a token's distribution is pi^(1/T), normalised.

    Returns:
        A row for each completion: dataset, problem, way, completion (its number within the
        problem), logp (nats, temperature 1), and logp_T for each temperature T.
    """
    rows: list[tuple[str, str, str, int]] = []
    conversations: list[tuple[int, list[int]]] = []  # length of the prompt, and all token ids
    for problem in problems:
        prompt = len(loading.encode(tokenizer, problem.question))
        valid = task_of(problem.task).completions(problem)
        for number, (way, *worked) in enumerate(valid):
            rows.append((problem.dataset, problem.id, way, number))
            conversations.append((prompt, conversation_ids(tokenizer, problem.question, *worked)))
    by_length = sorted(range(len(conversations)), key=lambda index: -len(conversations[index][1]))
    longest = len(conversations[by_length[0]][1]) if conversations else 1
    at_a_time = min(64, max(1, LOGITS // (longest * model.config.vocab_size)))
    logps: dict[int, list[float]] = {}
    for start in range(0, len(conversations), at_a_time):
        indices = by_length[start : start + at_a_time]  # of about one length: few are padded
        of_batch = [conversations[index][1] for index in indices]
        batch = loading.padded(of_batch, loading.pad_id(tokenizer), "right")
        ids, mask = (x.to(model.device) for x in batch)
        log_pi = _log_pi(model, ids, 1, mask)
        log_pis = [log_pi, *(probs.log_probabilities(log_pi, t) for t in tempered)]
        drawn = [probs.drawn_log_probabilities(x, ids[:, 1:]) for x in log_pis]
        for index, *of_tokens in zip(indices, *drawn, strict=True):
            prompt, conversation = conversations[index]
            tokens = slice(prompt - 1, len(conversation) - 1)
            logps[index] = [x[tokens].sum().item() for x in of_tokens]
    table = [(*row, *logps[index]) for index, row in enumerate(rows)]
    named = ["dataset", "problem", "way", "completion", "logp"]
    return pd.DataFrame(table, columns=[*named, *(f"logp_{t}" for t in tempered)])


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase, question: str, working: str, answer: str
) -> list[int]:
    """Return the token ids of a question's prompt and a worked answer, as SFT reads them. The end
    token follows the answer."""
    turn = {"role": "assistant", "content": prompts.answer_turn(working, answer)}
    turns = [*prompts.messages(question), turn]
    return list(tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"])


def _log_pi(
    model: PreTrainedModel, ids: torch.Tensor, start: int, mask: torch.Tensor
) -> torch.Tensor:
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's
    with prompts_read_once(plain, start):
        return probs.log_probabilities(probs.completion_logits(model, ids, start, mask))
