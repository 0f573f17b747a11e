"""Completions of a small model on a CPU, where many samples of a problem begin alike: the model
reads each distinct prefix once."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.policy import loading
from sage_lib.policy.sampling import (
    Engine,
    SampleKey,
    Sampling,
    end_tokens,
    fingerprints,
    tokens_at,
    uniforms,
    until_end,
    warpers,
)
from sage_lib.tasks.problem import Problem


def prefix_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    sampling: Sampling,
) -> Engine:
    """Return an engine that draws, up to rounding, the samples of ``transformers_engine``, whose
    arguments it has."""
    prompts = [loading.encode(tokenizer, problem.question) for problem in problems]
    ends = end_tokens(model, tokenizer)
    is_end = torch.as_tensor(ends, device=model.device)
    active = warpers(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
    model.eval()

    @torch.no_grad()
    def draw(batch: Sequence[SampleKey]) -> list[tuple[list[int], bool]]:
        uniform = uniforms(batch, problems, sampling).to(model.device)
        indices = list(dict.fromkeys(index for index, _ in batch))
        rows = [prompts[index] for index in indices]
        ids, mask = loading.padded(rows, loading.pad_id(tokenizer), "left")
        ids, mask = ids.to(model.device), mask.to(model.device)
        drawn = is_end.reshape(-1)[0].repeat(len(batch), sampling.max_new_tokens)
        samples = torch.arange(len(batch), device=model.device)  # that have not ended
        row = torch.tensor([indices.index(index) for index, _ in batch], device=model.device)
        positions, cache = (mask.cumsum(-1) - 1).clamp(min=0), None
        for step in range(sampling.max_new_tokens):
            options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            out = model(input_ids=ids, attention_mask=mask, position_ids=positions, **options)
            scores, cache = out.logits[:, -1].float(), out.past_key_values
            for warper in active:
                scores = warper(ids, scores)
            cdf = scores.double().softmax(-1).cumsum(-1)
            token = tokens_at(uniform[samples, step], cdf[row])
            drawn[samples, step] = token
            goes_on = ~torch.isin(token, is_end)
            samples, row, token = samples[goes_on], row[goes_on], token[goes_on]
            if not len(samples):
                break
            # Samples with the same row and token so far have the same prefix.
            (parent, last_token), row = torch.stack([row, token]).unique(dim=1, return_inverse=True)
            cache.batch_select_indices(parent)
            ids, mask = last_token[:, None], torch.nn.functional.pad(mask[parent], (0, 1), value=1)
            positions = mask.sum(-1, keepdim=True) - 1
        return until_end(drawn, ends)

    weights = loading.weights_mark(model)
    return Engine(draw, fingerprints("prefixes", weights, prompts, sampling, ends))
