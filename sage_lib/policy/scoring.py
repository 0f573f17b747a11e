"""What models say of finished samples, and of completions that nobody had to draw.

Perplexity under the base model (eq. 39), entropy and branching factor of the model that drew them;
and the exact probability of every valid completion of a problem, where its task can list them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.algorithm.token_probabilities import (
    completion_logits,
    drawn_log_probabilities,
    entropies_of,
    log_probabilities,
)
from sage_lib.policy import loading, token_signals
from sage_lib.policy.sampling import Encode
from sage_lib.tasks import prompts
from sage_lib.tasks.problem import Problem, plain
from sage_lib.tasks.table import task_of

#: Of one scored sample: what it is, whether it is correct, and means over its tokens.
COLUMNS = (
    "dataset",
    "problem",
    "number",
    "correct",
    "tokens",
    "perplexity",
    "entropy",
    "branching",
)
#: Logits that are held at a time (samples x tokens x vocabulary); a sample is never split.
LOGITS = 100_000_000
#: Conversations at a time, the longest of them first: of about one length, so that few are padded.
TOGETHER = 64


class Signals(NamedTuple):
    """Of each token of one completion, shape (tokens,)."""

    base_log_pi: NDArray[Any]  # of the token under the base model, nats
    entropy: NDArray[Any]  # of the state before it under the policy, nats
    branching: NDArray[Any]  # of that state under the policy, tokens


@torch.no_grad()
def score(
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem | str],
    rows: Sequence[Mapping[str, Any]],
    limit: int,
    encode: Encode = loading.encode,
) -> pd.DataFrame:
    """Score the first ``limit`` samples of every problem, a row each: columns as :data:`COLUMNS`.

    ``perplexity`` is that under ``base``; ``entropy`` (nats, temperature 1) and ``branching``
    (tokens within 95 % of the mass) are means over the states that ``model`` went through. All are
    NaN for a sample without tokens; the end token counts where the sample finished.

    Args:
        rows: samples of each problem as ``sampling.collect`` gives them, with a list "correct".
        encode: what made the prompts when the samples were drawn.
    """
    found = []
    for problem, row in zip(plain(problems), rows, strict=True):
        prompt = encode(tokenizer, problem.question)
        bodies = []
        for ids, finished in itertools.islice(zip(row["ids"], row["finished"], strict=True), limit):
            bodies.append([*ids, tokenizer.eos_token_id] if finished else ids)
        scored = signals(model, base, prompt, bodies, tokenizer.pad_token_id)
        for number, of_tokens in enumerate(scored):
            correct = bool(row["correct"][number])
            found.append((problem.dataset, problem.id, number, correct, *_means(of_tokens)))
    return pd.DataFrame(found, columns=COLUMNS)


def _means(signals: Signals) -> tuple[int, float, float, float]:
    """Tokens, perplexity, mean entropy and mean branching factor of one completion."""
    tokens = len(signals.base_log_pi)
    if tokens == 0:
        return 0, np.nan, np.nan, np.nan
    perplexity = token_signals.perplexity(signals.base_log_pi)
    return tokens, perplexity, signals.entropy.mean(), signals.branching.mean()


@torch.no_grad()
def signals(
    model: PreTrainedModel,
    base: PreTrainedModel,
    prompt: list[int],
    bodies: Sequence[list[int]],
    pad: int,
) -> Iterator[Signals]:
    """The signals of each completion (token ids) of one prompt, in order.

    As many completions at a time as :data:`LOGITS` allows; ``pad`` fills the shorter ones.
    """
    length = len(prompt) + max(map(len, bodies), default=0)
    at_a_time = max(1, LOGITS // (length * model.config.vocab_size))
    for start in range(0, len(bodies), at_a_time):
        yield from _signals_together(model, base, prompt, bodies[start : start + at_a_time], pad)


def _signals_together(
    model: PreTrainedModel,
    base: PreTrainedModel,
    prompt: list[int],
    bodies: Sequence[list[int]],
    pad: int,
) -> list[Signals]:
    start = len(prompt)
    ids, mask = (x.to(model.device) for x in _padded_right(prompt, bodies, pad))
    own = log_probabilities(completion_logits(model, ids, start, mask))
    anchor = own
    if base is not model:
        anchor = log_probabilities(completion_logits(base, ids, start, mask))
    drawn = drawn_log_probabilities(anchor, ids[:, start:])
    branching = token_signals.branching_factor(own.exp())
    by_row = [x.cpu().numpy() for x in (drawn, entropies_of(own), branching)]
    found = []
    for row, body in enumerate(bodies):
        found.append(Signals(*(x[row, : len(body)] for x in by_row)))
    return found


@torch.no_grad()
def valid_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
) -> pd.DataFrame:
    """log pi(y | x) of every valid completion y, end token included (nats, temperature 1).

    Of the problems whose task can list them, others are left out. Columns dataset, problem, way,
    completion (its number within the problem), logp. From these supp_eps (Definition 4.1), the
    share of each way and coverage follow without any sampling.
    """
    rows: list[tuple[str, str, str, int]] = []
    turns: list[tuple[int, list[int]]] = []  # length of the prompt, and all token ids
    for problem in problems:
        prompt = loading.encode(tokenizer, problem.question)
        valid = task_of(problem.task).completions(problem)
        for number, (way, working, answer) in enumerate(valid):
            rows.append((problem.dataset, problem.id, way, number))
            whole = _conversation(tokenizer, problem.question, working, answer)
            turns.append((len(prompt), whole))
    by_length = sorted(range(len(turns)), key=lambda place: -len(turns[place][1]))
    longest = len(turns[by_length[0]][1]) if turns else 1
    at_a_time = min(TOGETHER, max(1, LOGITS // (longest * model.config.vocab_size)))
    logps: dict[int, float] = {}
    for start in range(0, len(turns), at_a_time):
        places = by_length[start : start + at_a_time]
        batch = [turns[place] for place in places]
        found = _completion_logps(model, batch, tokenizer.pad_token_id)
        logps |= dict(zip(places, found, strict=True))
    table = [(*row, logps[place]) for place, row in enumerate(rows)]
    return pd.DataFrame(table, columns=["dataset", "problem", "way", "completion", "logp"])


def _completion_logps(
    model: PreTrainedModel, turns: Sequence[tuple[int, list[int]]], pad: int
) -> list[float]:
    """log pi of what follows each prompt, in one pass; a turn is (length of the prompt, ids)."""
    bodies = [ids for _, ids in turns]
    ids, mask = (x.to(model.device) for x in _padded_right([], bodies, pad))
    log_pi = log_probabilities(completion_logits(model, ids, 1, mask))
    drawn = drawn_log_probabilities(log_pi, ids[:, 1:])
    found = []
    for row, (prompt, whole) in enumerate(turns):
        found.append(drawn[row, prompt - 1 : len(whole) - 1].sum().item())
    return found


def exact_summary(probabilities: pd.DataFrame, ks: Sequence[int]) -> list[dict[str, Any]]:
    """pass@k of valid work by data set, for every k at once: the mean over problems of 1 - (1-p)^k.

    ``probabilities`` as :func:`valid_probabilities` gives them; p is the probability that one
    sample is valid, a sum over a problem's valid completions. A row per data set: dataset,
    problems, pass@k for each of ``ks``, and "common" and "rare", the mean mass of either way.
    """
    table = probabilities.assign(p=np.exp(probabilities["logp"]))
    rows = []
    for dataset, group in table.groupby("dataset", sort=False):
        valid = group.groupby("problem", sort=False)["p"].sum().clip(upper=1.0).to_numpy()
        by_way = group.groupby("way")["p"].sum() / len(valid)
        row: dict[str, Any] = {"dataset": dataset, "problems": len(valid)}
        row |= {f"pass@{k}": float(np.mean(-np.expm1(k * np.log1p(-valid)))) for k in ks}
        row |= {"common": float(by_way.get("L", 0.0)), "rare": float(by_way.get("R", 0.0))}
        rows.append(row)
    return rows


def _conversation(
    tokenizer: PreTrainedTokenizerBase, question: str, working: str, answer: str
) -> list[int]:
    """Token ids of prompt and answer, end token included, as supervised fine-tuning reads them."""
    turn = {"role": "assistant", "content": prompts.answer_turn(working, answer)}
    turns = [*prompts.messages(question), turn]
    ids: list[int] = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    return ids


def _padded_right(
    prompt: list[int], bodies: Sequence[list[int]], pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both of shape (bodies, prompt and longest body)."""
    width = max(map(len, bodies))
    ids, mask = [], []
    for body in bodies:
        padding = width - len(body)
        ids.append(prompt + body + [pad] * padding)
        mask.append([1] * (len(prompt) + len(body)) + [0] * padding)
    return torch.tensor(ids), torch.tensor(mask)
