"""Completions of a model, n a problem: batches filled across problems, resumable.

With transformers every sample has a random stream of its own, seeded by what it is (data set,
problem, number): a resumed run, another batch size or several processes draw the same samples.

``settings`` is any object with temperature, top_p (1 is off), top_k (0), min_p (0 or None),
max_new_tokens, samples (of a problem), batch_size and seed.
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

#: A sample to draw: (place of the problem in the list, number of the sample among the problem's).
Wanted = tuple[int, int]


@dataclass(frozen=True)
class Engine:
    """What draws samples of a list of problems, with the settings that it was made for."""

    #: Of each sample of a batch its token ids without the end token, and whether there was one.
    draw: Callable[[Sequence[Wanted]], list[tuple[list[int], bool]]]
    #: Of each problem a fingerprint of all that makes its samples, and not of how many are drawn.
    made_from: tuple[str, ...]
    at_once: int | None = None  # samples that it is handed at once; None is the batch size
    close: Callable[[], None] = lambda: None  # gives back what it holds, such as a GPU's memory


def fingerprints(
    name: str,
    weights: str,
    prompts: Sequence[list[int]],
    settings: Any,
    ends: int | list[int],
    **more: Any,
) -> tuple[str, ...]:
    named = ("temperature", "top_p", "top_k", "max_new_tokens", "seed")
    common = {key: getattr(settings, key) for key in named} | {"min_p": settings.min_p or 0.0}
    common |= {"engine": name, "weights": weights, "ends": ends, **more}
    return tuple(digest([common, prompt]) for prompt in prompts)


def sample_seed(seed: int, problem: Problem, number: int) -> int:
    name = f"{seed}/{problem.dataset}/{problem.id}/{number}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def warpers(
    temperature: float, top_p: float, top_k: int, min_p: float | None
) -> list[transformers.LogitsProcessor]:
    """Temperature and truncation in the order of transformers; what is off is left out."""
    found: list[transformers.LogitsProcessor] = []
    if temperature != 1:
        found.append(transformers.TemperatureLogitsWarper(temperature))
    if top_k:
        found.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        found.append(transformers.TopPLogitsWarper(top_p))
    if min_p:
        found.append(transformers.MinPLogitsWarper(min_p))
    return found


class InverseTransform(transformers.LogitsProcessor):
    """Draws each row's next token by the inverse of its distribution function, after the warpers.

    ``uniform`` holds a number in [0, 1) for every token, shape (rows, tokens); ``start`` is the
    length of the padded prompts.
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


def transformers_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Problem],
    settings: Any,
) -> Engine:
    prompts = [loading.encode(tokenizer, problem.question) for problem in asked]
    # Written out, so that a model's own generation_config fills in none of them.
    ends = _end_tokens(model, tokenizer)
    config = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=settings.max_new_tokens,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=ends,
    )
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
        shown = [prompts[place] for place, _ in batch]
        start, pad = max(map(len, shown)), tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (start - len(prompt)) + prompt for prompt in shown])
        gaps = [[0] * (start - len(prompt)) + [1] * len(prompt) for prompt in shown]
        ids, mask = ids.to(model.device), torch.tensor(gaps, device=model.device)
        with prompts_read_once(model):
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([*possible, InverseTransform(uniform, start)]),
            )
        return _until_end(out[:, start:], ends)

    weights = loading.weights_mark(model)
    return Engine(draw, fingerprints("transformers", weights, prompts, settings, ends))


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    return model.generation_config.eos_token_id or tokenizer.eos_token_id


def _until_end(new: torch.Tensor, ends: int | list[int]) -> list[tuple[list[int], bool]]:
    """Each row of ``new``, shape (rows, tokens), up to its first end token; whether it has one."""
    is_end = torch.isin(new, torch.as_tensor(ends, device=new.device))
    first_end, finished = is_end.int().argmax(1).tolist(), is_end.any(1).tolist()
    rows = zip(new.tolist(), first_end, finished, strict=True)
    return [(row[:end] if done else row, done) for row, end, done in rows]


def partition(problems: int, samples: int, batch_size: int, processes: int) -> list[list[Wanted]]:
    """What each process draws, in order: batches of ``batch_size``, dealt to them in turn."""
    every = [(place, number) for place in range(problems) for number in range(samples)]
    batches = _batches(every, batch_size)
    return [[one for batch in batches[p::processes] for one in batch] for p in range(processes)]


def _batches(wanted: Sequence[Wanted], size: int) -> list[Sequence[Wanted]]:
    return [wanted[start : start + size] for start in range(0, len(wanted), size)]


def sample(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Problem],
    settings: Any,
    path: Path,
    progress: Callable[[int, int, float], None] = lambda done, total, rate: None,
    process: int = 0,
    processes: int = 1,
    beside: Sequence[Path] = (),
) -> None:
    """Draw this process's part of ``settings.samples`` completions a problem into ``path``.

    Each is a row {"dataset", "problem", "number", "completion": text, "ids": token ids without the
    end token, "tokens": with it, "finished": not cut by the length limit, "made_from"}. What is in
    ``path`` or the files ``beside`` it already is kept. ``progress`` is called after each batch
    with (samples done, samples in all, tokens per second).
    """
    read_lines(path, repair=True)
    known = read_samples([path, *beside], asked, settings.samples, engine.made_from)
    mine = partition(len(asked), settings.samples, settings.batch_size, processes)[process]
    waiting = [
        (place, number)
        for place, number in mine
        if number not in known[asked[place].dataset, asked[place].id]
    ]
    done, tokens, started = len(mine) - len(waiting), 0, time.perf_counter()
    for batch in _batches(waiting, engine.at_once or settings.batch_size):
        for (place, number), (ids, finished) in zip(batch, engine.draw(batch), strict=True):
            text, problem = tokenizer.decode(ids, skip_special_tokens=True), asked[place]
            row = {"dataset": problem.dataset, "problem": problem.id, "number": number}
            row |= {"completion": text, "ids": ids, "tokens": len(ids) + finished}
            append_line(path, {**row, "finished": finished, "made_from": engine.made_from[place]})
            tokens += len(ids) + finished
        done += len(batch)
        progress(done, len(mine), tokens / (time.perf_counter() - started))


def read_samples(
    paths: Sequence[Path],
    problems: Sequence[Problem],
    samples: int,
    made_from: Sequence[str] | None = None,
) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """What is there already: (data set, problem) -> number of the sample -> its row.

    Every problem has an entry, in the order of ``problems``. With ``made_from``, as an engine has
    it, samples must have been made from the same; without, all samples of a problem from one.
    """
    asked = [(problem.dataset, problem.id) for problem in problems]
    known: dict[tuple[str, str], dict[int, dict[str, Any]]] = {key: {} for key in asked}
    expected = dict(zip(asked, made_from, strict=True)) if made_from is not None else {}
    named = {"dataset", "problem", "number", "made_from"}
    drawn = {"completion", "ids", "tokens", "finished"}
    for path in paths:
        file = f"{path.parent.name}/{path.name}"
        for row in read_lines(path):
            if missing := (named | drawn) - row.keys():
                raise SageError(f"{file} holds a row without {min(missing)}: move it away")
            key, number = (row["dataset"], row["problem"]), row["number"]
            if key not in known or not 0 <= number < samples:
                raise SageError(
                    f"{file} holds sample {number} of {'/'.join(key)}, which these settings do "
                    "not ask for: move it away"
                )
            if row["made_from"] != expected.setdefault(key, row["made_from"]):
                raise SageError(
                    f"{file} holds samples of {'/'.join(key)} that were drawn otherwise (settings, "
                    "engine, model or prompt): move it away"
                )
            known[key][number] = row
    return known


def collect(
    paths: Sequence[Path], problems: Sequence[Problem], samples: int
) -> list[dict[str, Any]]:
    """One row per problem: dataset, problem and lists of completions, ids, tokens and finished, in
    the order of the samples' numbers; SageError where one is missing."""
    rows = []
    for (dataset, problem), known in read_samples(paths, problems, samples).items():
        if len(known) < samples:
            raise SageError(f"{dataset}/{problem} has {len(known)} of {samples} samples: run again")
        row: dict[str, Any] = {"dataset": dataset, "problem": problem}
        names = {"completions": "completion", "ids": "ids", "tokens": "tokens"}
        for name, one in {**names, "finished": "finished"}.items():
            row[name] = [known[number][one] for number in range(samples)]
        rows.append(row)
    return rows


@torch.no_grad()
def rollouts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problem: Problem,
    count: int,
    settings: Mapping[str, Any],
    seed: int,
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """``count`` completions of one problem as RL samples them, by torch's global stream.

    Of ``settings``, which are those of GRPOConfig, the sampling and the length are read. Returns
    token ids of prompts and completions, shape (count, prompt and tokens); the length of the
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
        **{key: settings[key] for key in ("temperature", "top_p", "top_k", "min_p")},
        repetition_penalty=1.0,
        max_new_tokens=settings["max_completion_length"],
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    new = out[:, len(encoded) :]
    ends = torch.as_tensor(_end_tokens(model, tokenizer), device=out.device)
    is_end = torch.isin(new, ends).long()
    return out, len(encoded), (is_end.cumsum(1) - is_end == 0).long()
