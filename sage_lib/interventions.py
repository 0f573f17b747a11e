"""What a single token is worth: replace it by the runner-up, roll both prefixes out again, compare (exploration report, eq. 5-6)."""

from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from sage_lib import metrics
from sage_lib.sampling import warpers


@torch.no_grad()
def impact(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], completion: Sequence[int], position: int, count: int,
           settings: dict, seed: int, judge: Callable[[list[str]], Sequence[bool]]) -> tuple[float, float]:
    """Accuracy of ``count`` continuations of the token at ``position``, and of as many of its runner-up: I_t is their difference.

    Args:
        prompt, completion: token ids; the completion is one that the model drew, with or without its end token.
        position: which of the completion's tokens is replaced, 0-based.
        settings: temperature, top_p, top_k, min_p and max_completion_length as GRPOConfig has them; the length counts from the
            start of the completion.
        judge: texts of whole completions -> which are correct.
    """
    prefix = [*prompt, *completion[:position]]
    logits = model(input_ids=torch.tensor([prefix], device=model.device)).logits[0, -1:].float().cpu().numpy()
    other = int(metrics.runner_up(logits, [completion[position]])[0])
    stops = model.generation_config.eos_token_id or tokenizer.eos_token_id
    ends = stops if isinstance(stops, list) else [stops]
    config = GenerationConfig(do_sample=True, max_new_tokens=max(settings["max_completion_length"] - position - 1, 1), top_k=0, top_p=1.0, temperature=1.0, repetition_penalty=1.0,
                              pad_token_id=tokenizer.pad_token_id, eos_token_id=stops)
    rolled = [token for token in (completion[position], other) if token not in ends]
    texts = {token: [tokenizer.decode([*completion[:position], token], skip_special_tokens=True)] * count for token in (completion[position], other)}
    if rolled:
        torch.manual_seed(seed)
        ids = torch.tensor([[*prefix, token] for token in rolled for _ in range(count)], device=model.device)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config,
                             logits_processor=LogitsProcessorList(warpers(settings["temperature"], settings["top_p"], settings["top_k"], settings["min_p"]))).tolist()
        texts |= {token: [tokenizer.decode(row[len(prompt):], skip_special_tokens=True) for row in out[i * count: (i + 1) * count]] for i, token in enumerate(rolled)}
    kept, replaced = (sum(map(bool, judge(texts[token]))) / count for token in (completion[position], other))
    return kept, replaced
