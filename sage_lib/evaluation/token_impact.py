"""What a single token is worth: replace it by the runner-up, roll both prefixes out again, compare
(exploration report, eq. 5-6); and how the size of an update follows uncertainty (its eq. 4)."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sage_lib.policy import token_signals
from sage_lib.policy.sampling import sample_seed, warpers
from sage_lib.tasks.judging import judge
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.verifier import Verifier

#: Continuations of a token and of its runner-up, from which the impact of the token is estimated.
CONTINUATIONS = 16


@torch.no_grad()
def impact(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    completion: Sequence[int],
    position: int,
    count: int,
    settings: Mapping[str, Any],
    seed: int,
    judged: Callable[[list[str]], Sequence[bool]],
) -> tuple[float, float]:
    """Accuracy of ``count`` continuations of the token at ``position``, and of as many of its
    runner-up: I_t is their difference.

    Args:
        prompt, completion: token ids; the completion is one that the model drew, with or without
            its end token.
        position: which of the completion's tokens is replaced, 0-based.
        settings: temperature, top_p, top_k, min_p and max_completion_length as GRPOConfig has them;
            the length counts from the start of the completion.
        judged: texts of whole completions -> which are correct.
    """
    before = list(completion[:position])
    prefix = [*prompt, *before]
    ids = torch.tensor([prefix], device=model.device)
    logits = model(input_ids=ids).logits[0, -1:].float().cpu().numpy()
    drawn = completion[position]
    other = int(token_signals.runner_up(logits, np.array([drawn]))[0])
    stops = model.generation_config.eos_token_id or tokenizer.eos_token_id
    ends = stops if isinstance(stops, list) else [stops]
    config = GenerationConfig(
        do_sample=True,
        max_new_tokens=max(settings["max_completion_length"] - position - 1, 1),
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=stops,
    )
    texts = {
        token: [tokenizer.decode([*before, token], skip_special_tokens=True)] * count
        for token in (drawn, other)
    }
    rolled = [token for token in (drawn, other) if token not in ends]
    if rolled:
        torch.manual_seed(seed)
        started = [[*prefix, token] for token in rolled for _ in range(count)]
        ids = torch.tensor(started, device=model.device)
        keys = ("temperature", "top_p", "top_k", "min_p")
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList(warpers(*(settings[key] for key in keys))),
        ).tolist()
        for i, token in enumerate(rolled):
            rows = [row[len(prompt) :] for row in out[i * count : (i + 1) * count]]
            texts[token] = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    kept, replaced = (sum(map(bool, judged(texts[token]))) / count for token in (drawn, other))
    return kept, replaced


def impacts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Mapping[str, Any],
    problem: Problem,
    prompt: list[int],
    completion: list[int],
    entropy: list[float],
    seed: int,
    verifier: Verifier,
) -> list[dict[str, Any]]:
    """The impact of two tokens of one completion: its most uncertain one and another drawn at
    random.

    A row each, with the accuracy of the continuations of the token (``kept``) and of its runner-up
    (``replaced``). ``settings`` as :func:`impact` has them; ``entropy`` (nats) of every token.
    """
    most = int(np.argmax(entropy))
    positions = {"most uncertain": most}
    others = [i for i in range(len(completion)) if i != most]
    if others:
        positions["another"] = random.Random(sample_seed(seed, problem, 0)).choice(others)

    def judged(texts: list[str]) -> list[bool]:
        return judge([problem] * len(texts), texts, verifier)

    rows = []
    for kind, position in positions.items():
        kept, replaced = impact(
            model,
            tokenizer,
            prompt,
            completion,
            position,
            CONTINUATIONS,
            settings,
            seed,
            judged,
        )
        rows.append(
            {
                "dataset": problem.dataset,
                "problem": problem.id,
                "token": kind,
                "position": position,
                "tokens": len(completion),
                "entropy": entropy[position],
                "kept": kept,
                "replaced": replaced,
                "continuations": CONTINUATIONS,
            }
        )
    return rows


def updates(entropies: np.ndarray, gradients: np.ndarray) -> pd.DataFrame:
    """Size of the update by uncertainty: tokens in ten groups of equal size by entropy, least
    first.

    Args:
        entropies: nats, shape (tokens,).
        gradients: G_t of the exploration report, shape (tokens,).

    Returns:
        Columns group, tokens, entropy (mean, nats), gradient (mean G_t, eq. 4 of the exploration
        report) and share (of the sum of all G_t).
    """
    order = np.argsort(entropies, kind="stable")
    total = max(gradients.sum(), 1e-300)
    rows = []
    for number, part in enumerate(np.array_split(order, 10), 1):
        rows.append(
            {
                "group": number,
                "tokens": len(part),
                "entropy": entropies[part].mean(),
                "gradient": gradients[part].mean(),
                "share": gradients[part].sum() / total,
            }
        )
    return pd.DataFrame(rows)
