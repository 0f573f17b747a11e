"""Samples by vLLM, on a GPU: its prompts and sampling are the same as with transformers."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from sage_lib.errors import SageError
from sage_lib.files import adapter_base, read_json
from sage_lib.policy import loading
from sage_lib.policy.sampling import Engine, SampleKey, Sampling, fingerprints, sample_seed
from sage_lib.tasks.problem import Problem


def vllm_engine(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    sampling: Sampling,
) -> Engine:
    """Start vLLM with the model or the adapter of a folder, and return an engine that holds a GPU's
    memory until it is closed. ``sampling.vllm`` has keywords of vllm.LLM.

    Another version of vLLM, or another batch, may draw other samples.
    """
    # By default vLLM forks its engine's process. This process has already asked CUDA for its GPUs,
    # and a fork of such a process cannot use them.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise SageError(
            "the package vllm is missing: make vllm, or choose evaluation.engine=transformers"
        ) from error
    prompts = [loading.encode(tokenizer, problem.question) for problem in problems]
    end, base = tokenizer.eos_token_id, adapter_base(folder)
    keywords: dict[str, Any] = {"max_model_len": max(map(len, prompts)) + sampling.max_new_tokens}
    adapter, weights = None, loading.weights_hash(folder)
    if base is not None:
        from vllm.lora.request import LoRARequest

        rank = read_json(folder / "adapter_config.json")["r"]
        ranks = (8, 16, 32, 64, 128, 256, 512)  # of vLLM's kernels
        keywords |= {"enable_lora": True, "max_lora_rank": min(r for r in ranks if r >= rank)}
        adapter = LoRARequest("policy", 1, str(folder))
        of_base = loading.weights_hash(base) if isinstance(base, Path) else base
        weights = f"{of_base}+{weights}"
    ends = {end, *_more_ends(base or folder)}
    llm = LLM(model=str(base or folder), **{**keywords, **(sampling.vllm or {})})
    options = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p or 0.0,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": [end],
        "detokenize": False,
    }

    def draw(batch: Sequence[SampleKey]) -> list[tuple[list[int], bool]]:
        requests = [{"prompt_token_ids": prompts[index]} for index, _ in batch]
        seeds = [sample_seed(sampling.seed, problems[index], number) for index, number in batch]
        parameters = [SamplingParams(**options, seed=seed) for seed in seeds]
        samples = []
        for output in llm.generate(requests, parameters, use_tqdm=False, lora_request=adapter):
            drawn = output.outputs[0]
            ids, finished = list(drawn.token_ids), drawn.finish_reason == "stop"
            samples.append((ids[:-1] if finished and ids[-1] in ends else ids, finished))
        return samples

    made_from = fingerprints("vllm", weights, prompts, sampling, end, vllm=sampling.vllm or {})
    # A killed run loses the work of one call: 4096 requests take minutes.
    return Engine(draw, made_from, 4096, llm.llm_engine.engine_core.shutdown)


def _more_ends(model: Path | str) -> list[int]:
    """Return the end tokens of a model's generation config, at which vLLM stops as well."""
    try:
        ends = GenerationConfig.from_pretrained(str(model)).eos_token_id
    except OSError:  # the model has none
        return []
    return ends if isinstance(ends, list) else [] if ends is None else [ends]
