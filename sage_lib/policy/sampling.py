"""Completions of a model, n a problem: batches filled across problems, resumable.

With transformers every sample has a random stream of its own, seeded by what it is (data set,
problem, number), from which it takes one uniform number for each token. So a resumed run, another
batch size or several processes draw the very same samples.

Where a function takes problems, it takes plain questions (strings) as well, or both in one list:
``tasks.problem.plain`` numbers them. ``encode`` makes the prompt of a question: that of the papers,
:func:`loading.encode`, unless another function is given, such as :func:`as_written`.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
from sage_lib.experiment.profile import digest
from sage_lib.files import append_line, read_json, read_lines
from sage_lib.policy import loading
from sage_lib.tasks.problem import Problem, plain


class SamplingSettings(Protocol):
    """How to sample: any object with these attributes will do."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float:
        """1 is off."""

    @property
    def top_k(self) -> int:
        """0 is off."""

    @property
    def min_p(self) -> float | None:
        """0 and None are off."""

    @property
    def max_new_tokens(self) -> int: ...
    @property
    def samples(self) -> int:
        """Completions of each problem."""

    @property
    def batch_size(self) -> int: ...
    @property
    def seed(self) -> int: ...


class VllmSettings(SamplingSettings, Protocol):
    """:class:`SamplingSettings` for :func:`vllm_engine`."""

    @property
    def vllm(self) -> Mapping[str, Any] | None:
        """Keywords of vllm.LLM, such as gpu_memory_utilization."""


@dataclass(frozen=True)
class Sample:
    """One completion."""

    ids: list[int]  # as the model drew them, without the end token
    text: str
    finished: bool  # by an end token; False where the length limit cut it

    @property
    def tokens(self) -> int:
        """How many the model drew, the end token included."""
        return len(self.ids) + self.finished


#: Requests that vLLM is handed at once: it decodes as many together as its memory holds. They are
#: minutes of work, and a killed run loses no more.
IN_FLIGHT = 4096
#: The ranks for which vLLM has kernels.
RANKS = (8, 16, 32, 64, 128, 256, 512)
NO_VLLM = (
    "evaluation.engine is vllm and the package vllm is missing: make vllm installs it, or choose "
    "evaluation.engine=transformers"
)

#: A sample to draw: (place of the problem in the list, number of the sample among the problem's).
Wanted = tuple[int, int]
#: Draws a batch: of each sample its token ids without the end token, and whether there was one.
Draw = Callable[[Sequence[Wanted]], list[tuple[list[int], bool]]]
#: The token ids of the prompt that asks a question.
Encode = Callable[[PreTrainedTokenizerBase, str], list[int]]


@dataclass(frozen=True)
class Engine:
    """What draws samples: of a list of problems, with the settings that it was made for."""

    draw: Draw
    #: Of each problem a fingerprint of all that makes its samples: prompt, weights, settings, and
    #: what draws. Not how many are drawn: a sample is the same among 8 and among 256.
    made_from: tuple[str, ...]
    #: Samples that it is handed at once; None is the settings' batch size.
    at_once: int | None = None
    #: Gives back what it holds, such as a GPU's memory.
    close: Callable[[], None] = lambda: None


def _made_from(
    name: str,
    weights: str,
    prompts: Sequence[list[int]],
    settings: SamplingSettings,
    ends: int | list[int],
    **more: Any,
) -> tuple[str, ...]:
    """The fingerprints of :class:`Engine`."""
    common = {
        "engine": name,
        "weights": weights,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p or 0.0,
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "ends": ends,
        **more,
    }
    return tuple(digest([common, prompt]) for prompt in prompts)


def as_written(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of ``prompt`` as it stands: no system prompt, no chat template."""
    ids: list[int] = tokenizer(prompt)["input_ids"]
    return ids


def sample_seed(seed: int, problem: Problem, number: int) -> int:
    """Seed of one sample's stream: a function of the setting, the problem and the number alone."""
    name = f"{seed}/{problem.dataset}/{problem.id}/{number}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


# -- which tokens are possible, and which one is drawn ---------------------------------------------


def warpers(
    temperature: float, top_p: float, top_k: int, min_p: float | None
) -> list[LogitsProcessor]:
    """Temperature and truncation in the order of transformers.

    What is off (temperature 1, top_p 1, top_k 0, min_p 0 or None) is left out.
    """
    found: list[LogitsProcessor] = []
    if temperature != 1:
        found.append(TemperatureLogitsWarper(temperature))
    if top_k:
        found.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        found.append(TopPLogitsWarper(top_p))
    if min_p:
        found.append(MinPLogitsWarper(min_p))
    return found


class InverseTransform(LogitsProcessor):
    """Draws each row's next token by the inverse of its distribution function.

    Comes after the warpers; leaves one token possible, so that generation is greedy from here.

    Args:
        uniform: a number in [0, 1) for every token, shape (rows, tokens).
        start: length of the padded prompts.
    """

    def __init__(self, uniform: torch.Tensor, start: int):
        self.uniform, self.start = uniform, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores``, shape (rows, vocabulary), with 0 at the drawn token and -inf elsewhere."""
        token = input_ids.shape[1] - self.start
        cdf = scores.double().softmax(-1).cumsum(-1)
        total = cdf[:, -1:]  # 1 up to rounding
        point = self.uniform[:, token, None].to(cdf) * total
        drawn = torch.searchsorted(cdf, point, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


# -- engines ---------------------------------------------------------------------------------------


def transformers_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem | str],
    settings: SamplingSettings,
    encode: Encode = loading.encode,
) -> Engine:
    """Samples by transformers' generate.

    A sample is a function of its problem, its number and the seed, whatever its batch.
    """
    asked = plain(problems)
    prompts = [encode(tokenizer, problem.question) for problem in asked]
    config = _generation_config(model, tokenizer, settings)
    ends = config.eos_token_id
    possible = warpers(settings.temperature, settings.top_p, settings.top_k, settings.min_p)
    model.eval()

    def stream(wanted: Wanted) -> torch.Tensor:
        place, number = wanted
        generator = torch.Generator()
        generator.manual_seed(sample_seed(settings.seed, asked[place], number))
        return torch.rand(settings.max_new_tokens, generator=generator, dtype=torch.float64)

    @torch.no_grad()
    def draw(batch: Sequence[Wanted]) -> list[tuple[list[int], bool]]:
        uniform = torch.stack([stream(wanted) for wanted in batch])
        ids, mask = _padded_left([prompts[place] for place, _ in batch], tokenizer.pad_token_id)
        start = ids.shape[1]
        one_possible = InverseTransform(uniform, start)
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([*possible, one_possible]),
        )
        return _until_end(out[:, start:], ends)

    weights = loading.weights_mark(model)
    return Engine(draw, _made_from("transformers", weights, prompts, settings, ends))


def _generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings
) -> GenerationConfig:
    """Every setting written out, so that a model's own generation_config fills in none of them."""
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=settings.max_new_tokens,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=_end_tokens(model, tokenizer),
    )


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | list[int]:
    ends: int | list[int] = model.generation_config.eos_token_id or tokenizer.eos_token_id
    return ends


def _padded_left(prompts: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both of shape (rows, longest prompt)."""
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        padding = width - len(prompt)
        ids.append([pad] * padding + prompt)
        mask.append([0] * padding + [1] * len(prompt))
    return torch.tensor(ids), torch.tensor(mask)


def _until_end(new: torch.Tensor, ends: int | list[int]) -> list[tuple[list[int], bool]]:
    """Each row of ``new``, shape (rows, tokens), up to its first end token; whether it has one."""
    is_end = torch.isin(new, torch.as_tensor(ends, device=new.device))
    first_end = is_end.int().argmax(1).tolist()
    finished = is_end.any(1).tolist()
    found = []
    for row, end, done in zip(new.tolist(), first_end, finished, strict=True):
        found.append((row[:end] if done else row, done))
    return found


def vllm_engine(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem | str],
    settings: VllmSettings,
    encode: Encode = loading.encode,
) -> Engine:
    """Samples by vLLM of the model in ``folder``, or of its base with the adapter that lies there;
    each with a seed of its own.

    It takes the memory of a GPU for itself until it is closed: no other model should lie there.
    vLLM promises the same sample again only for the same version and batch. Raises SageError where
    the package vllm is missing.
    """
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise SageError(NO_VLLM) from error
    asked = plain(problems)
    prompts = [encode(tokenizer, problem.question) for problem in asked]
    end, base = tokenizer.eos_token_id, loading.base_of(folder)
    keywords: dict[str, Any] = {"max_model_len": max(map(len, prompts)) + settings.max_new_tokens}
    adapter, weights = None, loading.weights_hash(folder)
    if base is not None:
        from vllm.lora.request import LoRARequest

        rank = read_json(folder / "adapter_config.json")["r"]
        keywords |= {"enable_lora": True, "max_lora_rank": next(r for r in RANKS if r >= rank)}
        adapter = LoRARequest("policy", 1, str(folder))
        weights = f"{loading.weights_hash(base)}+{weights}"
    llm = LLM(model=str(base or folder), **keywords, **(settings.vllm or {}))

    def draw(batch: Sequence[Wanted]) -> list[tuple[list[int], bool]]:
        requests, parameters = [], []
        for place, number in batch:
            requests.append({"prompt_token_ids": prompts[place]})
            parameters.append(
                SamplingParams(
                    n=1,
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    top_k=settings.top_k or -1,
                    min_p=settings.min_p or 0.0,
                    max_tokens=settings.max_new_tokens,
                    seed=sample_seed(settings.seed, asked[place], number),
                    stop_token_ids=[end],
                    detokenize=False,
                )
            )
        found = []
        drawn_now = llm.generate(requests, parameters, use_tqdm=False, lora_request=adapter)
        for output in drawn_now:
            drawn = output.outputs[0]
            ids, finished = list(drawn.token_ids), drawn.finish_reason == "stop"
            if finished and ids[-1:] == [end]:
                ids = ids[:-1]
            found.append((ids, finished))
        return found

    made_from = _made_from("vllm", weights, prompts, settings, end, vllm=settings.vllm or {})
    return Engine(draw, made_from, IN_FLIGHT, llm.llm_engine.engine_core.shutdown)


# -- samples in files ------------------------------------------------------------------------------


def partition(problems: int, samples: int, batch_size: int, processes: int) -> list[list[Wanted]]:
    """The whole of the work, each sample once: what each process draws, in the order it does.

    Samples are cut into batches of ``batch_size``, and the batches are dealt to the processes in
    turn.
    """
    every = [(place, number) for place in range(problems) for number in range(samples)]
    parts: list[list[Wanted]] = [[] for _ in range(processes)]
    for turn, batch in enumerate(_batches(every, batch_size)):
        parts[turn % processes] += batch
    return parts


def _batches(wanted: Sequence[Wanted], size: int) -> list[Sequence[Wanted]]:
    return [wanted[start : start + size] for start in range(0, len(wanted), size)]


def sample(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem | str],
    settings: SamplingSettings,
    path: Path,
    progress: Callable[[int, int, float], None] = lambda done, total, rate: None,
    process: int = 0,
    processes: int = 1,
    beside: Sequence[Path] = (),
) -> None:
    """Draw this process's part of ``settings.samples`` completions a problem into ``path``.

    Each is a row {"dataset", "problem", "number", "completion": text, "ids": token ids without the
    end token, "tokens": int, "finished": bool, "made_from": fingerprint}; ``tokens`` counts the end
    token, ``finished`` is False where the length limit cut a completion. What is in ``path`` or in
    the files ``beside`` it already is kept and not drawn again, if it was made from the same.

    Args:
        engine: made for the same ``problems`` and ``settings``.
        progress: called after each batch with (samples done, samples in all, tokens per second of
            this call).

    Raises:
        SageError: for files that hold other samples: of another temperature, seed, model or prompt,
            or of problems that are not asked for.
    """
    asked = plain(problems)
    read_lines(path, repair=True)
    known = read_samples([path, *beside], asked, settings.samples, engine.made_from)
    parts = partition(len(asked), settings.samples, settings.batch_size, processes)
    mine = parts[process]
    waiting = []
    for place, number in mine:
        problem = asked[place]
        if number not in known[problem.dataset, problem.id]:
            waiting.append((place, number))
    done, tokens, started = len(mine) - len(waiting), 0, time.perf_counter()
    for batch in _batches(waiting, engine.at_once or settings.batch_size):
        for (place, number), (ids, finished) in zip(batch, engine.draw(batch), strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            drawn = Sample(ids, text, finished)
            append_line(path, _row(asked[place], number, drawn, engine.made_from[place]))
            tokens += drawn.tokens
        done += len(batch)
        progress(done, len(mine), tokens / (time.perf_counter() - started))


def _row(problem: Problem, number: int, drawn: Sample, made_from: str) -> dict[str, Any]:
    return {
        "dataset": problem.dataset,
        "problem": problem.id,
        "number": number,
        "completion": drawn.text,
        "ids": drawn.ids,
        "tokens": drawn.tokens,
        "finished": drawn.finished,
        "made_from": made_from,
    }


def read_samples(
    paths: Sequence[Path],
    problems: Sequence[Problem | str],
    samples: int,
    made_from: Sequence[str] | None = None,
) -> dict[tuple[str, str], dict[int, Sample]]:
    """What is there already: (data set, problem) -> number of the sample -> the sample.

    Every problem has an entry, in the order of ``problems``. With ``made_from``, as an engine has
    it, samples must have been made from the same; without, all samples of a problem from one.

    Raises:
        SageError: for a file of another format, or one that holds a sample that these settings do
            not ask for, or that was made from something else.
    """
    known: dict[tuple[str, str], dict[int, Sample]] = {}
    expected: dict[tuple[str, str], str] = {}
    for place, problem in enumerate(plain(problems)):
        known[problem.dataset, problem.id] = {}
        if made_from is not None:
            expected[problem.dataset, problem.id] = made_from[place]
    for path in paths:
        file = f"{path.parent.name}/{path.name}"
        for row in read_lines(path):
            try:
                dataset, problem_id, number = row["dataset"], row["problem"], row["number"]
                drawn = Sample(row["ids"], row["completion"], row["finished"])
                mark = row["made_from"]
            except KeyError as error:
                raise SageError(
                    f"{file} holds a row without {error}: it was written by something else; "
                    "move it away"
                ) from None
            if (dataset, problem_id) not in known or not 0 <= number < samples:
                raise SageError(
                    f"{file} holds sample {number} of {dataset}/{problem_id}, which these settings "
                    "do not ask for: it belongs to another configuration; move it away"
                )
            if mark != expected.setdefault((dataset, problem_id), mark):
                raise SageError(
                    f"{file} holds samples of {dataset}/{problem_id} that were drawn otherwise: "
                    "with another temperature, truncation, length limit, seed, engine, model or "
                    "prompt; move the file away, or draw into another one"
                )
            known[dataset, problem_id][number] = drawn
    return known


def collect(
    paths: Sequence[Path], problems: Sequence[Problem | str], samples: int
) -> list[dict[str, Any]]:
    """One row per problem, its samples in order of their number.

    A row is {"dataset", "problem", "completions": [text], "ids": [[int]], "tokens": [int],
    "finished": [bool]}, see :func:`sample`.

    Raises:
        SageError: where a sample is missing.
    """
    rows = []
    for (dataset, problem), known in read_samples(paths, problems, samples).items():
        if len(known) < samples:
            raise SageError(
                f"{dataset}/{problem} has {len(known)} of {samples} samples: "
                "run the evaluation again, it goes on where it stopped"
            )
        drawn = [known[number] for number in range(samples)]
        rows.append(
            {
                "dataset": dataset,
                "problem": problem,
                "completions": [one.text for one in drawn],
                "ids": [one.ids for one in drawn],
                "tokens": [one.tokens for one in drawn],
                "finished": [one.finished for one in drawn],
            }
        )
    return rows


# -- samples as RL draws them ----------------------------------------------------------------------


@torch.no_grad()
def rollouts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problem: Problem,
    count: int,
    settings: Mapping[str, Any],
    seed: int,
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """``count`` completions of one problem as RL samples them.

    Args:
        settings: temperature, top_p, top_k, min_p and max_completion_length as GRPOConfig has them.
        seed: of torch's global stream, which this call sets.

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
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        top_k=settings["top_k"],
        min_p=settings["min_p"],
        repetition_penalty=1.0,
        max_new_tokens=settings["max_completion_length"],
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    new = out[:, len(encoded) :]
    ends = torch.as_tensor(_end_tokens(model, tokenizer), device=out.device)
    is_end = torch.isin(new, ends).long()
    ends_before = is_end.cumsum(1) - is_end
    mask = (ends_before == 0).long()
    return out, len(encoded), mask
