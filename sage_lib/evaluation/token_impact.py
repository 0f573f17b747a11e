"""What a single token is worth: replace it by the runner-up, roll both prefixes out again, compare (exploration report, eq. 5-6)."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sage_lib.experiment import problems
from sage_lib.experiment.profile import Profile
from sage_lib.policy import token_signals
from sage_lib.policy.sampling import sample_seed, warpers
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
    settings: dict,
    seed: int,
    judge: Callable[[list[str]], Sequence[bool]],
) -> tuple[float, float]:
    """Accuracy of ``count`` continuations of the token at ``position``, and of as many of its runner-up: I_t is their difference.

    Args:
        prompt, completion: token ids; the completion is one that the model drew, with or without its end token.
        position: which of the completion's tokens is replaced, 0-based.
        settings: temperature, top_p, top_k, min_p and max_completion_length as GRPOConfig has them; the length counts from the
            start of the completion.
        judge: texts of whole completions -> which are correct.
    """
    prefix = [*prompt, *completion[:position]]
    logits = (
        model(input_ids=torch.tensor([prefix], device=model.device))
        .logits[0, -1:]
        .float()
        .cpu()
        .numpy()
    )
    other = int(token_signals.runner_up(logits, [completion[position]])[0])
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
    rolled = [token for token in (completion[position], other) if token not in ends]
    texts = {
        token: [tokenizer.decode([*completion[:position], token], skip_special_tokens=True)] * count
        for token in (completion[position], other)
    }
    if rolled:
        torch.manual_seed(seed)
        ids = torch.tensor(
            [[*prefix, token] for token in rolled for _ in range(count)], device=model.device
        )
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList(
                warpers(
                    settings["temperature"], settings["top_p"], settings["top_k"], settings["min_p"]
                )
            ),
        ).tolist()
        texts |= {
            token: [
                tokenizer.decode(row[len(prompt) :], skip_special_tokens=True)
                for row in out[i * count : (i + 1) * count]
            ]
            for i, token in enumerate(rolled)
        }
    kept, replaced = (
        sum(map(bool, judge(texts[token]))) / count for token in (completion[position], other)
    )
    return kept, replaced


def updates(entropies: np.ndarray, gradients: np.ndarray) -> pd.DataFrame:
    """Size of the update by uncertainty: tokens in ten groups of equal size by entropy, of the least first. Columns group, tokens,
    entropy (mean, nats), gradient (mean G_t, eq. 4 of the exploration report) and share (of the sum of all G_t)."""
    order = np.argsort(entropies, kind="stable")
    return pd.DataFrame(
        [
            {
                "group": i + 1,
                "tokens": len(part),
                "entropy": entropies[part].mean(),
                "gradient": gradients[part].mean(),
                "share": gradients[part].sum() / max(gradients.sum(), 1e-300),
            }
            for i, part in enumerate(np.array_split(order, 10))
        ]
    )


def impacts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    profile: Profile,
    item: problems.Item,
    prompt: list[int],
    completion: list[int],
    entropy: list[float],
    seed: int,
    verifier: Verifier,
) -> list[dict]:
    """The impact of two tokens of one completion, its most uncertain one and another drawn at random: a row each, with accuracy
    of the continuations of the token (``kept``) and of its runner-up (``replaced``)."""
    most = int(np.argmax(entropy))
    others = [i for i in range(len(completion)) if i != most]
    positions = {"most uncertain": most} | (
        {"another": random.Random(sample_seed(seed, item, 0)).choice(others)} if others else {}
    )
    rows = []
    for kind, position in positions.items():
        kept, other = impact(
            model,
            tokenizer,
            prompt,
            completion,
            position,
            CONTINUATIONS,
            profile.rl,
            seed,
            lambda texts: problems.judge([item] * len(texts), texts, verifier),
        )
        rows.append(
            {
                "dataset": item.dataset,
                "problem": item.id,
                "token": kind,
                "position": position,
                "tokens": len(completion),
                "entropy": entropy[position],
                "kept": kept,
                "replaced": other,
                "continuations": CONTINUATIONS,
            }
        )
    return rows
