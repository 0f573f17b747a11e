"""The impact of a token: rigged judges whose answer is known, and the exact expectation where one token is left to draw."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from sage_lib.evaluation.token_impact import impact
from sage_lib.policy import loading, tiny_qwen

SETTINGS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_completion_length": 6}


@pytest.fixture(scope="module")
def parts(tiny_model):
    tokenizer, model = (
        tiny_qwen.load_tokenizer(tiny_model),
        AutoModelForCausalLM.from_pretrained(tiny_model).eval(),
    )
    prompt = loading.encode(tokenizer, "reach 9 from 1 2 3 4")
    return model, tokenizer, prompt, tokenizer("L 1 + 2 = 3", add_special_tokens=False)["input_ids"]


def test_a_judge_that_wants_the_original_token_gives_one_and_one_that_reads_only_the_prefix_gives_nothing(
    parts,
):
    model, tokenizer, prompt, completion = parts
    start = tokenizer.decode(completion[:4])
    assert impact(
        *parts, 3, 5, SETTINGS, 0, lambda texts: [t.startswith(start) for t in texts]
    ) == (1.0, 0.0)
    before = tokenizer.decode(completion[:3])
    assert impact(
        *parts, 3, 5, SETTINGS, 0, lambda texts: [t.startswith(before) for t in texts]
    ) == (1.0, 1.0)


def test_the_replacement_is_the_most_likely_other_token(parts):
    model, tokenizer, prompt, completion = parts
    texts = []
    impact(*parts, 2, 2, SETTINGS, 0, lambda t: texts.append(t) or [True] * len(t))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion[:2]])).logits[0, -1]
    logits[completion[2]] = -torch.inf
    expected = tokenizer.decode([*completion[:2], int(logits.argmax())])
    assert all(t.startswith(expected) for t in texts[1]) and all(
        t.startswith(tokenizer.decode(completion[:3])) for t in texts[0]
    )


def test_it_estimates_the_exact_probability_where_one_token_is_left(parts):
    model, tokenizer, prompt, completion = parts
    with torch.no_grad():
        after = model(torch.tensor([prompt + completion[:5]])).logits[0, -1].softmax(-1)
    wanted = int(after.argmax())
    count = 4000
    kept, _ = impact(
        *parts,
        4,
        count,
        SETTINGS,
        1,
        lambda texts: [
            tokenizer(t, add_special_tokens=False)["input_ids"][-1:] == [wanted]
            and len(tokenizer(t, add_special_tokens=False)["input_ids"]) == 6
            for t in texts
        ],
    )
    exact = float(after[wanted])
    assert abs(kept - exact) < 4 * (exact * (1 - exact) / count) ** 0.5
