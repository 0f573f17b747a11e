"""Completions of a model, n a problem, kept as text: batches filled across problems, resumable, the same whatever the batch.

With transformers every sample has a random stream of its own, seeded by what it is (data set, problem, number), from which it
takes one uniform number for each token. So a resumed run, another batch size or several processes draw the very same samples.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sage_lib.errors import SageError
from sage_lib.experiment.problems import Item
from sage_lib.experiment.profile import Evaluation
from sage_lib.files import append_line, read_lines
from sage_lib.policy import loading


def sample_seed(seed: int, item: Item, number: int) -> int:
    """Seed of one sample's stream: a function of the setting, the problem and the sample's number alone."""
    return int.from_bytes(
        hashlib.sha256(f"{seed}/{item.dataset}/{item.id}/{number}".encode()).digest()[:6], "big"
    )


class InverseTransform(LogitsProcessor):
    """Draws each row's next token by the inverse of its distribution function at a given uniform number.

    Comes after the warpers; leaves one token possible, so that generation is greedy from here. ``uniform`` has shape
    (rows, tokens), ``start`` is the length of the padded prompts.
    """

    def __init__(self, uniform: torch.Tensor, start: int):
        self.uniform, self.start = uniform, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        cdf = scores.double().softmax(-1).cumsum(-1)
        point = self.uniform[:, input_ids.shape[1] - self.start, None].to(cdf) * cdf[:, -1:]
        drawn = torch.searchsorted(cdf, point, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


def generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Evaluation
) -> GenerationConfig:
    """Every setting written out, so that a model's own generation_config fills in none of them."""
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=settings.max_new_tokens,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=model.generation_config.eos_token_id or tokenizer.eos_token_id,
    )


def warpers(
    temperature: float, top_p: float, top_k: int, min_p: float | None
) -> list[LogitsProcessor]:
    """Temperature and truncation in the order of transformers; what is off (top_p 1, top_k 0, min_p 0) is left out."""
    return [
        *([TemperatureLogitsWarper(temperature)] if temperature != 1 else []),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
        *([MinPLogitsWarper(min_p)] if min_p else []),
    ]


def shares(
    items: Sequence[Item], samples: int, batch_size: int, processes: int
) -> list[list[list[tuple[int, int]]]]:
    """(item, sample number) in batches, batches dealt to the processes in turn: the whole of the work, each sample once."""
    every = [(i, n) for i in range(len(items)) for n in range(samples)]
    batches = [every[start : start + batch_size] for start in range(0, len(every), batch_size)]
    return [batches[p::processes] for p in range(processes)]


def read_samples(
    paths: Sequence[Path], items: Sequence[Item], samples: int
) -> dict[tuple[str, str], dict[int, tuple[str, int, bool]]]:
    """What is there already: (data set, problem) -> sample number -> (text, tokens, finished).

    Raises SageError for a file of another format, or one that holds a sample that these settings do not ask for.
    """
    known = {(item.dataset, item.id): {} for item in items}
    for path in paths:
        for row in read_lines(path):
            try:
                place, number, sample = (
                    (row["dataset"], row["problem"]),
                    row["number"],
                    (row["completion"], row["tokens"], row["finished"]),
                )
            except KeyError as error:
                raise SageError(
                    f"{path.parent.name}/{path.name} holds a row without {error}: it was written by something else; move it away"
                ) from None
            if place not in known or not 0 <= number < samples:
                raise SageError(
                    f"{path.parent.name}/{path.name} holds sample {number} of {place[0]}/{place[1]}, which these settings do not ask for: it belongs to another configuration; move it away"
                )
            known[place][number] = sample
    return known


#: Draws a batch of (number of the item, number of the sample): token ids of each completion, its end token left out, and
#: whether it ended by itself.
Engine = Callable[[Sequence[tuple[int, int]]], list[tuple[list[int], bool]]]


def transformers_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    settings: Evaluation,
) -> Engine:
    """Samples by transformers' generate. A sample is a function of its problem, its number and the seed, whatever its batch."""
    config, warp = (
        generation_config(model, tokenizer, settings),
        warpers(settings.temperature, settings.top_p, settings.top_k, settings.min_p),
    )
    encoded = [loading.encode(tokenizer, item.question) for item in items]
    model.eval()

    @torch.no_grad()
    def draw(batch: Sequence[tuple[int, int]]) -> list[tuple[list[int], bool]]:
        uniform = torch.stack(
            [
                torch.rand(
                    settings.max_new_tokens,
                    generator=torch.Generator().manual_seed(
                        sample_seed(settings.seed, items[i], n)
                    ),
                    dtype=torch.float64,
                )
                for i, n in batch
            ]
        )
        width = max(len(encoded[i]) for i, _ in batch)
        ids = torch.tensor(
            [[tokenizer.pad_token_id] * (width - len(encoded[i])) + encoded[i] for i, _ in batch],
            device=model.device,
        )
        mask = torch.tensor(
            [[0] * (width - len(encoded[i])) + [1] * len(encoded[i]) for i, _ in batch],
            device=model.device,
        )
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=LogitsProcessorList([*warp, InverseTransform(uniform, width)]),
        )
        new = out[:, width:]
        ends = torch.isin(new, torch.as_tensor(config.eos_token_id, device=new.device))
        length = torch.where(ends.any(1), ends.int().argmax(1), new.shape[1]).tolist()
        return [
            (row[:end], finished)
            for row, end, finished in zip(new.tolist(), length, ends.any(1).tolist(), strict=True)
        ]

    return draw


def vllm_engine(
    folder: Path, tokenizer: PreTrainedTokenizerBase, items: Sequence[Item], settings: Evaluation
) -> Engine:
    """Samples by vLLM, each with a seed of its own; vLLM promises the same sample again only for the same version and batch.

    ``settings.vllm`` are the keywords of vllm.LLM, such as gpu_memory_utilization. Raises SageError where vLLM is missing.
    """
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise SageError(
            "evaluation.engine is vllm and the package vllm is missing: install it, or choose the engine transformers"
        ) from error
    llm = LLM(model=str(folder), **(settings.vllm or {}))
    encoded, end = (
        [loading.encode(tokenizer, item.question) for item in items],
        tokenizer.eos_token_id,
    )

    def draw(batch: Sequence[tuple[int, int]]) -> list[tuple[list[int], bool]]:
        chosen = [
            SamplingParams(
                n=1,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k or -1,
                min_p=settings.min_p,
                max_tokens=settings.max_new_tokens,
                seed=sample_seed(settings.seed, items[i], n),
                stop_token_ids=[end],
                detokenize=False,
            )
            for i, n in batch
        ]
        outputs = llm.generate(
            [{"prompt_token_ids": encoded[i]} for i, _ in batch], chosen, use_tqdm=False
        )
        drawn = [
            (list(o.outputs[0].token_ids), o.outputs[0].finish_reason == "stop") for o in outputs
        ]
        return [
            (ids[:-1] if finished and ids and ids[-1] == end else ids, finished)
            for ids, finished in drawn
        ]

    return draw


def sample(
    draw: Engine,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    settings: Evaluation,
    path: Path,
    progress: Callable[[int, int, float], None] = lambda done, total, rate: None,
    process: int = 0,
    processes: int = 1,
    beside: Sequence[Path] = (),
) -> None:
    """Draw this process's share of ``settings.samples`` completions for each item and append a row per sample to ``path``.

    A row is {"dataset", "problem", "number", "completion": text, "tokens": int, "finished": bool}; ``tokens`` counts the end
    token, ``finished`` is False where the length limit cut a completion. What is in ``path`` or in the files ``beside`` it
    already is kept and not drawn again. ``progress`` is called after each batch with (samples done, samples in all, tokens per
    second of this call).
    """
    read_lines(path, repair=True)
    known = read_samples([path, *beside], items, settings.samples)
    mine = [
        pair
        for batch in shares(items, settings.samples, settings.batch_size, processes)[process]
        for pair in batch
    ]
    waiting = [(i, n) for i, n in mine if n not in known[items[i].dataset, items[i].id]]
    drawn, started = 0, time.perf_counter()
    for start in range(0, len(waiting), settings.batch_size):
        batch = waiting[start : start + settings.batch_size]
        for (i, n), (ids, finished) in zip(batch, draw(batch), strict=True):
            append_line(
                path,
                {
                    "dataset": items[i].dataset,
                    "problem": items[i].id,
                    "number": n,
                    "completion": tokenizer.decode(ids, skip_special_tokens=True),
                    "tokens": len(ids) + finished,
                    "finished": finished,
                },
            )
            drawn += len(ids) + finished
        progress(
            len(mine) - len(waiting) + start + len(batch),
            len(mine),
            drawn / (time.perf_counter() - started),
        )


def collect(paths: Sequence[Path], items: Sequence[Item], samples: int) -> list[dict]:
    """One row per item, {"dataset", "problem", "completions": [text], "tokens": [int], "finished": [bool]}, in sample order.

    Raises SageError where a sample is missing.
    """
    rows = []
    for (dataset, problem), drawn in read_samples(paths, items, samples).items():
        if len(drawn) < samples:
            raise SageError(
                f"{dataset}/{problem} has {len(drawn)} of {samples} samples: run the evaluation again, it goes on where it stopped"
            )
        texts, tokens, finished = zip(*(drawn[n] for n in range(samples)), strict=True)
        rows.append(
            {
                "dataset": dataset,
                "problem": problem,
                "completions": list(texts),
                "tokens": list(tokens),
                "finished": list(finished),
            }
        )
    return rows


@torch.no_grad()
def rollouts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    item: Item,
    count: int,
    settings: dict,
    seed: int,
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """``count`` completions of one problem as RL samples them: (prompts and completions, length of the prompt, mask).

    ``settings`` holds temperature, top_p, top_k, min_p and max_completion_length as GRPOConfig has them. The mask, shape
    (count, tokens), is 1 up to and with the end token.
    """
    model.eval()
    torch.manual_seed(seed)
    prompt = torch.tensor([loading.encode(tokenizer, item.question)] * count, device=model.device)
    out = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        top_k=settings["top_k"],
        min_p=settings["min_p"],
        repetition_penalty=1.0,
        max_new_tokens=settings["max_completion_length"],
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    stops = model.generation_config.eos_token_id or tokenizer.eos_token_id
    ended = torch.isin(out[:, prompt.shape[1] :], torch.as_tensor(stops, device=out.device)).long()
    return out, prompt.shape[1], ((ended.cumsum(1) - ended) == 0).long()
