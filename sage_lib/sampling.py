"""Completions of a model, n a problem, kept as text and resumable problem by problem."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sage_lib import prompts
from sage_lib.config import Evaluation
from sage_lib.data import Item
from sage_lib.files import append_line, read_lines


def problem_seed(seed: int, item: Item) -> int:
    """Seed of one problem's samples: the same whatever was sampled before it, so a resumed run draws what it would have."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{item.dataset}/{item.id}".encode()).digest()[:6], "big")


def generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Evaluation) -> GenerationConfig:
    """Every sampling setting written out, so that a model's own generation_config fills in none of them."""
    return GenerationConfig(
        do_sample=True, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k, min_p=settings.min_p or None,
        max_new_tokens=settings.max_new_tokens, repetition_penalty=1.0, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=model.generation_config.eos_token_id or tokenizer.eos_token_id,
    )


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: list[Item], settings: Evaluation, path: Path,
           progress: Callable[[int, int, float], None] = lambda done, total, rate: None) -> list[dict]:
    """Draw ``settings.samples`` completions for each item and append a row per problem to ``path``.

    A row is {"dataset", "problem", "completions": [text], "tokens": [int], "finished": [bool]}; ``finished`` is False
    where the length limit cut a completion. Problems already in ``path`` are kept. ``progress`` is called after each
    problem with (problems done, problems, tokens per second of this call).
    """
    rows = {(r["dataset"], r["problem"]): r for r in read_lines(path, repair=True)}
    config = generation_config(model, tokenizer, settings)
    model.eval()
    drawn, started = 0, time.perf_counter()
    for done, item in enumerate(items, 1):
        if (item.dataset, item.id) not in rows:
            torch.manual_seed(problem_seed(settings.seed, item))
            prompt = tokenizer.apply_chat_template(prompts.messages(item.question), add_generation_prompt=True, return_tensors="pt", return_dict=True)
            prompt = {k: v.to(model.device) for k, v in prompt.items() if k in ("input_ids", "attention_mask")}
            texts, lengths, finished = [], [], []
            for start in range(0, settings.samples, settings.batch_size):
                n = min(settings.batch_size, settings.samples - start)
                out = model.generate(**{k: v.expand(n, -1) for k, v in prompt.items()}, generation_config=config)
                new = out[:, prompt["input_ids"].shape[1]:]
                ends = torch.isin(new, torch.as_tensor(config.eos_token_id, device=new.device))
                first = torch.where(ends.any(1), ends.int().argmax(1), new.shape[1])
                texts += [tokenizer.decode(row[:end], skip_special_tokens=True) for row, end in zip(new.tolist(), first.tolist(), strict=True)]
                lengths += [min(end + 1, new.shape[1]) for end in first.tolist()]
                finished += ends.any(1).tolist()
            row = {"dataset": item.dataset, "problem": item.id, "completions": texts, "tokens": lengths, "finished": finished}
            append_line(path, row)
            rows[item.dataset, item.id] = row
            drawn += sum(lengths)
        progress(done, len(items), drawn / (time.perf_counter() - started))
    return [rows[item.dataset, item.id] for item in items]
