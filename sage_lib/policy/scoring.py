"""Token signals of finished samples: perplexity under the base model (eq. 39), entropy and branching factor under their own;
and the exact probability of every valid completion of the embedded task."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.experiment.problems import Item
from sage_lib.policy import loading, token_signals
from sage_lib.tasks import countdown, prompts

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


@torch.no_grad()
def score(
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    rows: Sequence[dict],
    limit: int,
) -> pd.DataFrame:
    """Score the first ``limit`` samples of every problem; columns as :data:`COLUMNS`.

    ``rows`` are samples as ``sampling.collect`` gives them, with a list "correct". The text is tokenised again, and the end
    token counts where the sample finished. ``perplexity`` is that under ``base``; ``entropy`` (nats, temperature 1) and
    ``branching`` (tokens within 95 % of the mass) are means over the states that ``model`` went through.
    """
    found = []
    for item, row in zip(items, rows, strict=True):
        prompt = loading.encode(tokenizer, item.question)
        bodies = [
            tokenizer(text, add_special_tokens=False)["input_ids"]
            + [tokenizer.eos_token_id] * finished
            for text, finished in zip(
                row["completions"][:limit], row["finished"][:limit], strict=True
            )
        ]
        at_a_time = max(
            1, LOGITS // ((len(prompt) + max(map(len, bodies))) * model.config.vocab_size)
        )
        for start in range(0, len(bodies), at_a_time):
            signals = _token_signals(
                model, base, prompt, bodies[start : start + at_a_time], tokenizer.pad_token_id
            )
            for number, (drawn, entropy, branching) in enumerate(signals, start):
                n = len(drawn)
                found.append(
                    (
                        item.dataset,
                        item.id,
                        number,
                        bool(row["correct"][number]),
                        n,
                        token_signals.perplexity(drawn),
                        entropy.mean() if n else float("nan"),
                        branching.mean() if n else float("nan"),
                    )
                )
    return pd.DataFrame(found, columns=COLUMNS)


def _token_signals(
    model: PreTrainedModel,
    base: PreTrainedModel,
    prompt: list[int],
    bodies: list[list[int]],
    pad: int,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each body, at each of its tokens: log-probability under ``base``, entropy (nats) and branching factor of ``model``."""
    width = max(map(len, bodies))
    ids = torch.tensor(
        [prompt + body + [pad] * (width - len(body)) for body in bodies], device=model.device
    )
    mask = torch.tensor(
        [[1] * (len(prompt) + len(body)) + [0] * (width - len(body)) for body in bodies],
        device=model.device,
    )
    own = (
        model(input_ids=ids, attention_mask=mask)
        .logits[:, len(prompt) - 1 : -1]
        .float()
        .log_softmax(-1)
    )
    anchor = (
        own
        if base is model
        else base(input_ids=ids, attention_mask=mask)
        .logits[:, len(prompt) - 1 : -1]
        .float()
        .log_softmax(-1)
    )
    drawn = anchor.gather(-1, ids[:, len(prompt) :, None])[..., 0]
    signals = [
        x.cpu().numpy()
        for x in (drawn, -(own.exp() * own).sum(-1), token_signals.branching_factor(own.exp()))
    ]
    return [tuple(x[row, : len(body)] for x in signals) for row, body in enumerate(bodies)]


@torch.no_grad()
def valid_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: Sequence[Item], limit: int
) -> pd.DataFrame:
    """log pi(y | x) (nats, temperature 1, end token included) of every valid completion y of the embedded task.

    Columns dataset, problem, way, completion (its number within the problem), logp. From these supp_eps (Definition 4.1),
    the share of each way and coverage follow without any sampling. ``limit``: the task's largest running value.
    """
    found = []
    for item in items:
        valid = countdown.valid_completions(item.problem, limit)
        prompt = loading.encode(tokenizer, item.question)
        bodies = []
        for _, work, answer in valid:
            turn = {"role": "assistant", "content": prompts.answer_turn(work, answer)}
            whole = tokenizer.apply_chat_template(
                [*prompts.messages(item.question), turn], return_dict=True
            )["input_ids"]
            bodies.append(whole[len(prompt) :])
        width = max(map(len, bodies))
        ids = torch.tensor(
            [prompt + body + [tokenizer.pad_token_id] * (width - len(body)) for body in bodies],
            device=model.device,
        )
        logps = (
            model(input_ids=ids)
            .logits[:, len(prompt) - 1 : -1]
            .float()
            .log_softmax(-1)
            .gather(-1, ids[:, len(prompt) :, None])[..., 0]
        )
        for number, ((way, _, _), body, row) in enumerate(zip(valid, bodies, logps, strict=True)):
            found.append((item.dataset, item.id, way, number, row[: len(body)].sum().item()))
    return pd.DataFrame(found, columns=["dataset", "problem", "way", "completion", "logp"])
