"""Completions of a model, n a problem: batches filled across problems, resumable.

With transformers each sample has its random stream, seeded by data set, problem and number. So a
resumed run, another batch size or several processes draw the same samples.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.algorithm.shared_prompts import prompts_read_once
from sage_lib.errors import SageError
from sage_lib.experiment.profile import digest
from sage_lib.files import append_line, read_lines
from sage_lib.policy import loading
from sage_lib.tasks.problem import Problem

#: A sample to draw: (index of the problem in the list, number of the sample among the problem's).
SampleKey = tuple[int, int]
#: How samples are drawn, such as a profile's section ``evaluation``: an object with temperature,
#: top_p (1 is off), top_k (0), min_p (0 or None), max_new_tokens, samples (of a problem),
#: batch_size, seed and, for vLLM, vllm.
Sampling = Any


@dataclass(frozen=True)
class Engine:
    """A function that draws samples of a list of problems."""

    #: Returns of each sample the token ids without the end token, and whether there was one.
    draw: Callable[[Sequence[SampleKey]], list[tuple[list[int], bool]]]
    #: For each problem a fingerprint of all that decides its samples, but not how many there are.
    made_from: tuple[str, ...]
    at_once: int | None = None  # samples that ``draw`` takes at once; None is the batch size
    close: Callable[[], None] = lambda: None  # frees memory, such as a GPU's


def fingerprints(
    name: str,
    weights: str,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    ends: int | list[int],
    **more: Any,
) -> tuple[str, ...]:
    """Return for each prompt, given as token ids, the hash of all that decides its samples: the
    engine's ``name``, the hash of the model's ``weights``, the other arguments and ``more``."""
    named = ("temperature", "top_p", "top_k", "max_new_tokens", "seed")
    common = {key: getattr(sampling, key) for key in named} | {"min_p": sampling.min_p or 0.0}
    common |= {"engine": name, "weights": weights, "ends": ends, **more}
    return tuple(digest([common, prompt]) for prompt in prompts)


def sample_seed(seed: int, problem: Problem, number: int) -> int:
    name = f"{seed}/{problem.dataset}/{problem.id}/{number}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def uniforms(
    batch: Sequence[SampleKey], problems: Sequence[Problem], sampling: Sampling
) -> torch.Tensor:
    """Return the random numbers of each sample's own stream, shape (samples, max_new_tokens)."""
    rows = []
    for index, number in batch:
        generator = torch.Generator()
        generator.manual_seed(sample_seed(sampling.seed, problems[index], number))
        rows.append(torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def warpers(
    temperature: float, top_p: float, top_k: int, min_p: float | None
) -> list[transformers.LogitsProcessor]:
    """Return the temperature and the truncations that are on, in the order of transformers."""
    active: list[transformers.LogitsProcessor] = []
    if temperature != 1:
        active.append(transformers.TemperatureLogitsWarper(temperature))
    if top_k:
        active.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        active.append(transformers.TopPLogitsWarper(top_p))
    if min_p:
        active.append(transformers.MinPLogitsWarper(min_p))
    return active


def tokens_at(uniform: torch.Tensor, cdf: torch.Tensor) -> torch.Tensor:
    """Return the token of each row at which its distribution function, shape (rows, vocabulary),
    passes a number in [0, 1), shape (rows,). SageError where the function is not finite."""
    total = cdf[:, -1:]  # 1 up to rounding
    if not total.isfinite().all():
        raise SageError(
            "the model gives logits that are not finite: its weights are damaged, or its dtype is "
            "too small for it (model.dtype: float32)"
        )
    point = uniform[:, None].to(cdf) * total
    return torch.searchsorted(cdf, point, right=True).clamp(max=cdf.shape[1] - 1)[:, 0]


class InverseTransform(transformers.LogitsProcessor):
    """Draws each row's next token by inverting its distribution function, after the warpers."""

    def __init__(self, uniform: torch.Tensor, start: int):
        """Take a number in [0, 1) for each token, shape (rows, tokens), and the prompts' length."""
        self.uniform, self.start = uniform, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores, shape (rows, vocabulary): 0 at the drawn token and -inf elsewhere."""
        uniform = self.uniform[:, input_ids.shape[1] - self.start]
        tokens = tokens_at(uniform, scores.double().softmax(-1).cumsum(-1))
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


def transformers_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    sampling: Sampling,
) -> Engine:
    """Return an engine that draws samples of the problems with transformers."""
    prompts = [loading.encode(tokenizer, problem.question) for problem in problems]
    # All options, so that the model's generation_config decides none of them.
    ends = end_tokens(model, tokenizer)
    config = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=sampling.max_new_tokens,
        repetition_penalty=1.0,
        pad_token_id=loading.pad_id(tokenizer),
        eos_token_id=ends,
    )
    active = warpers(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
    model.eval()

    @torch.no_grad()
    def draw(batch: Sequence[SampleKey]) -> list[tuple[list[int], bool]]:
        uniform = uniforms(batch, problems, sampling)
        rows = [prompts[index] for index, _ in batch]
        ids, mask = loading.padded(rows, loading.pad_id(tokenizer), "left")
        ids, mask, start = ids.to(model.device), mask.to(model.device), ids.shape[1]
        with prompts_read_once(model):
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([*active, InverseTransform(uniform, start)]),
            )
        return until_end(out[:, start:], ends)

    weights = loading.weights_mark(model)
    return Engine(draw, fingerprints("transformers", weights, prompts, sampling, ends))


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the id, or ids, that end a completion of the model."""
    ends = model.generation_config.eos_token_id
    return tokenizer.eos_token_id if ends is None else ends


def with_end(
    row: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Return the token ids of a row of :func:`collect`, of each sample with the end that it drew.

    A model with several end tokens has no end there: rows do not say which one was drawn.
    """
    ends = end_tokens(model, tokenizer)
    end = ends if isinstance(ends, list) else [ends]
    drawn = zip(row["ids"], row["finished"], strict=True)
    return [[*ids, *end] if done and len(end) == 1 else ids for ids, done in drawn]


def until_end(new: torch.Tensor, ends: int | list[int]) -> list[tuple[list[int], bool]]:
    """Cut rows, shape (rows, tokens), at their first end token; return whether they have one."""
    is_end = torch.isin(new, torch.as_tensor(ends, device=new.device))
    first_end, finished = is_end.int().argmax(1).tolist(), is_end.any(1).tolist()
    rows = zip(new.tolist(), first_end, finished, strict=True)
    return [(row[:end] if done else row, done) for row, end, done in rows]


def _batches(keys: Sequence[SampleKey], size: int) -> list[Sequence[SampleKey]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def sample(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    sampling: Sampling,
    path: Path,
    progress: Callable[[int, int, float], None] = lambda done, total, rate: None,
    process: int = 0,
    processes: int = 1,
    other_paths: Sequence[Path] = (),
) -> None:
    """Draw this process's share of the samples into a file; batches are dealt to them in turn.

    Each is a row {"dataset", "problem", "number", "completion": text, "ids": token ids without the
    end token, "tokens": with it, "finished": not cut by the length limit, "made_from"}.

    Args:
        engine: draws the samples of ``problems``.
        tokenizer: decodes them.
        problems: as the engine has them.
        sampling: how many samples, and how many in a batch.
        path: of the file. Its samples are not drawn again.
        progress: called after each batch with (samples done, samples in all, tokens per second).
        process: number of this process, of ``processes``.
        other_paths: of further files, whose samples are not drawn again.
    """
    read_lines(path, repair=True)
    by_problem = read_samples([path, *other_paths], problems, sampling.samples, engine.made_from)
    keys = [(index, number) for index in range(len(problems)) for number in range(sampling.samples)]
    batches = _batches(keys, sampling.batch_size)[process::processes]
    share = [key for batch in batches for key in batch]
    waiting = [
        (index, number)
        for index, number in share
        if number not in by_problem[problems[index].dataset, problems[index].id]
    ]
    done, tokens, started = len(share) - len(waiting), 0, time.perf_counter()
    for batch in _batches(waiting, engine.at_once or sampling.batch_size):
        for (index, number), (ids, finished) in zip(batch, engine.draw(batch), strict=True):
            text, problem = tokenizer.decode(ids, skip_special_tokens=True), problems[index]
            row = {"dataset": problem.dataset, "problem": problem.id, "number": number}
            row |= {"completion": text, "ids": ids, "tokens": len(ids) + finished}
            append_line(path, {**row, "finished": finished, "made_from": engine.made_from[index]})
            tokens += len(ids) + finished
        done += len(batch)
        progress(done, len(share), tokens / (time.perf_counter() - started))


def read_samples(
    paths: Sequence[Path],
    problems: Sequence[Problem],
    samples: int,
    made_from: Sequence[str] | None = None,
) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Read samples from files: (data set, problem) -> number of the sample -> its row, for all
    problems in their order.

    ``samples`` is how many a problem has, and ``made_from`` the fingerprints of an engine. Without
    them all samples of a problem have the same. SageError for other samples.
    """
    keys = [(problem.dataset, problem.id) for problem in problems]
    by_problem: dict[tuple[str, str], dict[int, dict[str, Any]]] = {key: {} for key in keys}
    expected = dict(zip(keys, made_from, strict=True)) if made_from is not None else {}
    fields = {"dataset", "problem", "number", "made_from"}
    fields |= {"completion", "ids", "tokens", "finished"}
    for path in paths:
        file = f"{path.parent.name}/{path.name}"
        for row in read_lines(path):
            key = (str(row.get("dataset")), str(row.get("problem")))
            number = row.get("number", -1)
            fits = row.keys() >= fields and key in by_problem and 0 <= number < samples
            if not fits or row["made_from"] != expected.setdefault(key, row["made_from"]):
                raise SageError(
                    f"{file} holds sample {number} of {key[0]}/{key[1]}, drawn otherwise (another "
                    "problem, prompt, model, engine or setting): move it away"
                )
            by_problem[key][number] = row
    return by_problem


def collect(
    paths: Sequence[Path], problems: Sequence[Problem], samples: int
) -> list[dict[str, Any]]:
    """Gather the samples of each problem; the arguments are as in :func:`read_samples`.

    Returns:
        A row for each problem: dataset, problem, and lists of completions, ids, tokens and
        finished, in the order of the samples' numbers. SageError where a sample is missing.
    """
    rows = []
    for (dataset, problem), by_number in read_samples(paths, problems, samples).items():
        if len(by_number) < samples:
            missing = f"{dataset}/{problem} has {len(by_number)} of {samples} samples"
            raise SageError(f"{missing}: run again")
        row: dict[str, Any] = {"dataset": dataset, "problem": problem}
        row["completions"] = [by_number[number]["completion"] for number in range(samples)]
        for name in ("ids", "tokens", "finished"):
            row[name] = [by_number[number][name] for number in range(samples)]
        rows.append(row)
    return rows


@torch.no_grad()
def rollouts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problem: Problem,
    count: int,
    rl: Mapping[str, Any],
    seed: int,
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Draw ``count`` completions of a problem as RL does, by torch's global stream.

    ``rl`` has keywords of GRPOConfig: temperature, truncations and length are read.

    Returns:
        Token ids of prompts and completions, shape (count, prompt and tokens); the length of the
        prompt; and the mask, shape (count, tokens), which is 1 up to and with the end token.
    """
    model.eval()
    torch.manual_seed(seed)
    encoded = loading.encode(tokenizer, problem.question)
    prompts = torch.tensor([encoded] * count, device=model.device)
    out = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        **{key: rl[key] for key in ("temperature", "top_p", "top_k", "min_p")},
        repetition_penalty=1.0,
        max_new_tokens=rl["max_completion_length"],
        pad_token_id=loading.pad_id(tokenizer),
        use_cache=True,
    )
    new = out[:, len(encoded) :]
    ends = torch.as_tensor(end_tokens(model, tokenizer), device=out.device)
    is_end = torch.isin(new, ends).long()
    return out, len(encoded), (is_end.cumsum(1) - is_end == 0).long()
