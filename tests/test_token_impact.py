"""The impact of a token: rigged judges whose answer is known, and the exact expectation where one
token is left to draw."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from sage_lib.evaluation import exploration, groups
from sage_lib.evaluation.exploration import (
    DrawnCompletion,
    impact,
    perplexity_groups,
    replaced_positions,
)
from sage_lib.policy import loading, tiny_qwen
from sage_lib.tasks.problem import Problem

SETTINGS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_completion_length": 6}


@pytest.fixture(scope="module")
def parts(tiny_model):
    """Model, tokenizer, prompt and completion, as ``impact`` takes them."""
    tokenizer = tiny_qwen.load_tokenizer(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    prompt = loading.encode(tokenizer, "reach 9 from 1 2 3 4")
    return model, tokenizer, prompt, tokenizer("L 1 + 2 = 3", add_special_tokens=False)["input_ids"]


def starts_with(start):
    return lambda texts: [text.startswith(start) for text in texts]


def test_a_judge_that_wants_the_original_token_gives_one_and_one_of_the_prefix_nothing(parts):
    _, tokenizer, _, completion = parts
    start = tokenizer.decode(completion[:4])
    assert impact(*parts, 3, 5, SETTINGS, 0, starts_with(start)) == (1.0, 0.0)
    before = tokenizer.decode(completion[:3])
    assert impact(*parts, 3, 5, SETTINGS, 0, starts_with(before)) == (1.0, 1.0)


def test_the_replacement_is_the_most_likely_other_token(parts):
    model, tokenizer, prompt, completion = parts
    texts = []
    impact(*parts, 2, 2, SETTINGS, 0, lambda t: texts.append(t) or [True] * len(t))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion[:2]])).logits[0, -1]
    logits[completion[2]] = -torch.inf
    replaced = tokenizer.decode([*completion[:2], int(logits.argmax())])
    kept = tokenizer.decode(completion[:3])
    assert all(text.startswith(kept) for text in texts[0])
    assert all(text.startswith(replaced) for text in texts[1])


def test_it_estimates_the_exact_probability_where_one_token_is_left(parts):
    model, tokenizer, prompt, completion = parts
    with torch.no_grad():
        after = model(torch.tensor([prompt + completion[:5]])).logits[0, -1].softmax(-1)
    wanted, count = int(after.argmax()), 4000

    def judged(texts):
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return [one[-1:] == [wanted] and len(one) == 6 for one in ids]

    kept, _ = impact(*parts, 4, count, SETTINGS, 1, judged)
    exact = float(after[wanted])
    assert abs(kept - exact) < 4 * (exact * (1 - exact) / count) ** 0.5


def test_the_replaced_tokens_are_the_most_uncertain_ones_of_their_part():
    entropy = [0.1, 0.4, 0.0, 0.9, 0.2, 0.3, 0.0, 0.0, 0.2, 0.1]
    last = SimpleNamespace(randrange=lambda count: count - 1)
    expected = {"most uncertain": 3, "early": 1, "late": 8, "random": 9}
    assert replaced_positions(entropy, last) == expected
    assert set(replaced_positions([0.5], last).values()) == {0}


def test_a_group_has_one_completion_of_a_problem_the_most_extreme():
    def drawn(problem, number, perplexity):
        one = Problem(problem, "d", "q", "1", "countdown")
        return DrawnCompletion(one, number, [], [1], [0.0], perplexity, True)

    every = [drawn(f"p{i}", n, 1 + i + n / 10) for i in range(5) for n in range(4)]
    groups = perplexity_groups(every, 1)
    assert [one.name for one in groups["low"]] == ["p0/0"]
    assert [one.name for one in groups["high"]] == ["p4/3"]
    # a fifth of 20 completions are the four of one problem
    assert [one.name for one in perplexity_groups(every, 9)["high"]] == ["p4/3"]


def test_before_is_what_the_base_reads_and_after_what_the_policy_reads(parts):
    base, tokenizer, prompt, completion = parts
    policy = AutoModelForCausalLM.from_pretrained(base.config.name_or_path).eval()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.5)
    out = torch.tensor([[*prompt, *completion]] * 2)
    mask = torch.ones(2, len(completion), dtype=torch.bool)
    mask[1, 3:] = False
    drawn = groups.Group(out, len(prompt), mask, ["", ""], [True, False])
    profile = SimpleNamespace(rl={"temperature": 1.0})
    drawer = SimpleNamespace(profile=profile, model=policy, tokenizer=tokenizer)
    with torch.no_grad():
        table = exploration._tokens(drawer, base, drawn, 4)
        for name, model in (("before", base), ("after", policy)):
            log_pi = model(out[:1]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            entropies = -(log_pi.exp() * log_pi).sum(-1)
            of_first = table[table["completion"] == 4]
            assert of_first[name].tolist() == pytest.approx(entropies.tolist(), rel=1e-4)
            p = log_pi.gather(-1, out[0, len(prompt) :, None])[:, 0].exp()
            assert of_first[f"p_{name}"].tolist() == pytest.approx(p.tolist(), rel=1e-4)
    assert (table["before"] - table["after"]).abs().max() > 1e-3
    assert table.groupby("completion").size().to_dict() == {4: len(completion), 5: 3}
    assert table.groupby("completion")["sign"].first().to_dict() == {4: "positive", 5: "negative"}
