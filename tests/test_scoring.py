"""Scores of samples against one token at a time, each sample alone."""

import itertools
import math

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from sage_lib.policy import loading, scoring, tiny_qwen
from sage_lib.tasks import countdown, prompts
from sage_lib.tasks.problem import Problem

QUESTION = "reach 9 from 1 2 3 4"
PROBLEM = Problem("a", "both", QUESTION, "9", "countdown")


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return tiny_qwen.load_tokenizer(tiny_model)


def next_token(model, ids):
    """The distribution over the next token, float64."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)


def tokens_that_hold(distribution, mass):
    held = itertools.accumulate(sorted(distribution.tolist(), reverse=True))
    return next(number for number, share in enumerate(held, 1) if share >= mass)


def samples(tokenizer, texts, finished, correct):
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return {"completions": texts, "ids": ids, "finished": finished, "correct": correct}


def test_scores_equal_a_computation_token_by_token(tiny_model, tokenizer):
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    texts = ["L 1 + 2 = 3", "R 4", "L"]
    row = samples(tokenizer, texts, [True, False, True], [True, False, False])
    table = scoring.score(model, base, tokenizer, [PROBLEM], [row], limit=2)
    assert list(table["number"]) == [0, 1] and list(table["correct"]) == [True, False]
    assert list(table["tokens"]) == [7, 2]
    prompt = loading.encode(tokenizer, QUESTION)
    bodies = [[*row["ids"][0], tokenizer.eos_token_id], row["ids"][1]]
    for number, body in enumerate(bodies):
        surprisal, entropy, branching = 0.0, 0.0, 0
        for t, token in enumerate(body):
            ids = prompt + body[:t]
            surprisal -= math.log(next_token(base, ids)[token])
            own = next_token(model, ids)
            entropy -= float((own * own.log()).sum())
            branching += tokens_that_hold(own, 0.95)
        found = table.iloc[number]
        assert found["perplexity"] == pytest.approx(math.exp(surprisal / len(body)), rel=1e-4)
        assert found["entropy"] == pytest.approx(entropy / len(body), rel=1e-4)
        assert found["branching"] == pytest.approx(branching / len(body))
    asked = model, base, prompt, bodies, tokenizer.pad_token_id
    for one, fewer in zip(scoring.signals(*asked), scoring.signals(*asked, False), strict=True):
        assert (one.entropy == fewer.entropy).all() and fewer.branching.size == 0


def test_what_was_drawn_is_scored_and_not_what_its_text_would_be(tiny_model, tokenizer):
    """A special token has no text, and still is one that the model drew."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    row = samples(tokenizer, ["L 1"], [False], [False])
    row["ids"][0].insert(1, tokenizer.pad_token_id)
    table = scoring.score(model, model, tokenizer, [PROBLEM], [row], limit=1)
    assert tokenizer.decode(row["ids"][0], skip_special_tokens=True) == "L 1"
    assert table["tokens"][0] == 3
    prompt, surprisal = loading.encode(tokenizer, QUESTION), 0.0
    for t, token in enumerate(row["ids"][0]):
        surprisal -= math.log(next_token(model, prompt + row["ids"][0][:t])[token])
    assert table["perplexity"][0] == pytest.approx(math.exp(surprisal / 3), rel=1e-4)


def test_scores_do_not_depend_on_how_many_samples_are_held_at_a_time(
    tiny_model, tokenizer, monkeypatch
):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    texts = ["L 1 + 2 = 3", "R 4", "L", ""]
    row = samples(tokenizer, texts, [True, False, True, False], [True, False, False, False])
    asked = model, model, tokenizer, [PROBLEM], [row], 4
    together = scoring.score(*asked)
    held = []
    model.get_input_embeddings().register_forward_hook(lambda *_: held.append(1))
    monkeypatch.setattr(scoring, "LOGITS", 1)
    pd.testing.assert_frame_equal(scoring.score(*asked), together, rtol=1e-4)
    assert len(held) == 4 and math.isnan(together["perplexity"][3])
    other = Problem("b", "forward", "reach 8 from 2 3 4", "8", "countdown")
    both = scoring.score(model, model, tokenizer, [PROBLEM, other], [row, row], 4)
    alone = scoring.score(model, model, tokenizer, [other], [row], 4)
    expected = pd.concat([together, alone], ignore_index=True)
    pd.testing.assert_frame_equal(both, expected, rtol=1e-4)
    assert (both["problem"] == "b").sum() == 4 and both["entropy"][0] != both["entropy"][4]


def test_probabilities_of_valid_completions_are_products_over_tokens(tiny_model, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    task = countdown.Countdown(fewest=3, most=3, limit=30)
    (problem,) = task.problems(rows=1, seed=5)
    unlisted = Problem("k", "puzzles", "who lies", "Ann", "knights_knaves")
    asked = [problem, unlisted, problem]
    table = scoring.valid_probabilities(model, tokenizer, asked, (0.3, 1.0))
    valid = countdown.Countdown.completions(problem)
    assert list(table["way"]) == [way for way, _, _ in valid] * 2
    assert list(table["completion"]) == list(range(len(valid))) * 2
    prompt, end = loading.encode(tokenizer, problem.question), tokenizer.eos_token_id
    assert list(table.columns[-3:]) == ["logp", "logp_0.3", "logp_1.0"]
    rows = table.iloc[: len(valid), -3:].to_numpy()
    for (_, working, answer), (logp, sharp, again) in zip(valid, rows, strict=True):
        written = prompts.answer_turn(working, answer).removeprefix(prompts.WORK_START)
        body = tokenizer(written, add_special_tokens=False)["input_ids"]
        text = tokenizer.decode(body)
        assert countdown.check(problem.detail, text).valid, "as a policy would have to write it"
        total, at_03 = 0.0, 0.0
        for t, token in enumerate([*body, end]):
            pi = next_token(model, prompt + body[:t])
            total += math.log(pi[token])
            at_03 += math.log(pi[token] ** (1 / 0.3) / sum(x ** (1 / 0.3) for x in pi))
        assert logp == pytest.approx(total, rel=1e-4) == again
        assert sharp == pytest.approx(at_03, rel=1e-4) != pytest.approx(total, rel=1e-2)
