"""Scores of samples against one token at a time, each sample alone."""

import math

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from sage_lib.experiment.problems import Item
from sage_lib.policy import loading, scoring, tiny_qwen, token_signals
from sage_lib.tasks import countdown, prompts


def test_scores_equal_a_computation_token_by_token(tiny_model):
    tokenizer = tiny_qwen.load_tokenizer(tiny_model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    item = Item("a", "both", "reach 9 from 1 2 3 4", "9")
    row = {
        "completions": ["L 1 + 2 = 3", "R 4", "L"],
        "finished": [True, False, True],
        "correct": [True, False, False],
    }
    table = scoring.score(model, base, tokenizer, [item], [row], limit=2)
    assert (
        list(table["number"]) == [0, 1]
        and list(table["correct"]) == [True, False]
        and list(table["tokens"]) == [7, 2]
    )
    prompt = loading.encode(tokenizer, item.question)
    for number, finished in ((0, True), (1, False)):
        body = (
            tokenizer(row["completions"][number], add_special_tokens=False)["input_ids"]
            + [tokenizer.eos_token_id] * finished
        )
        surprisal, entropy, branching = 0.0, 0.0, 0
        for t, token in enumerate(body):
            with torch.no_grad():
                p, q = (
                    m(torch.tensor([prompt + body[:t]])).logits[0, -1].double().softmax(-1)
                    for m in (base, model)
                )
            surprisal -= math.log(p[token])
            entropy -= float((q * q.log()).sum())
            ordered, mass = q.sort(descending=True).values, 0.0
            for n, share in enumerate(ordered, 1):
                mass += share
                if mass >= 0.95:
                    break
            branching += n
        found = table.iloc[number]
        assert found["perplexity"] == pytest.approx(math.exp(surprisal / len(body)), rel=1e-4)
        assert found["entropy"] == pytest.approx(entropy / len(body), rel=1e-4) and found[
            "branching"
        ] == pytest.approx(branching / len(body))


def test_scores_do_not_depend_on_how_many_samples_are_held_at_a_time(tiny_model, monkeypatch):
    tokenizer = tiny_qwen.load_tokenizer(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    row = {
        "completions": ["L 1 + 2 = 3", "R 4", "L", ""],
        "finished": [True, False, True, False],
        "correct": [True, False, False, False],
    }
    asked = model, model, tokenizer, [Item("a", "both", "reach 9 from 1 2 3 4", "9")], [row], 4
    together = scoring.score(*asked)
    held = []
    inner = scoring._token_signals
    monkeypatch.setattr(
        scoring, "_token_signals", lambda *args: held.append(len(args[3])) or inner(*args)
    )
    monkeypatch.setattr(scoring, "LOGITS", 1)
    pd.testing.assert_frame_equal(scoring.score(*asked), together, rtol=1e-4)
    assert held == [1, 1, 1, 1] and math.isnan(together["perplexity"][3])


def test_branching_factor_by_hand():
    states = torch.tensor(
        [[0.5, 0.3, 0.15, 0.05], [0.96, 0.02, 0.01, 0.01], [0.25] * 4], dtype=torch.float64
    )
    assert token_signals.branching_factor(states).tolist() == [3, 1, 4]


def test_probabilities_of_valid_completions_are_products_over_tokens_and_frequencies_of_samples(
    tiny_model,
):
    tokenizer, model = (
        tiny_qwen.load_tokenizer(tiny_model),
        AutoModelForCausalLM.from_pretrained(tiny_model),
    )
    problem = next(countdown.problems(5, 3, 30, {"both": 1.0}))
    item = Item(problem.id, "both", problem.question, str(problem.target), problem)
    table = scoring.valid_probabilities(model, tokenizer, [item, item], 30)
    valid = countdown.valid_completions(problem, 30)
    assert (
        list(table["way"]) == [way for way, _, _ in valid] * 2
        and list(table["completion"]) == list(range(len(valid))) * 2
    )
    prompt = loading.encode(tokenizer, item.question)
    for (_, work, answer), logp in zip(valid, table["logp"], strict=False):
        turn = tokenizer.decode(
            tokenizer(
                prompts.answer_turn(work, answer).removeprefix(prompts.WORK_START),
                add_special_tokens=False,
            )["input_ids"]
        )
        assert countdown.check(
            problem, turn
        ).valid  # what is scored is what a policy would have to write
        body, total = (
            tokenizer(turn, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id],
            0.0,
        )
        for t, token in enumerate(body):
            with torch.no_grad():
                total += (
                    model(torch.tensor([prompt + body[:t]]))
                    .logits[0, -1]
                    .double()
                    .log_softmax(-1)[token]
                    .item()
                )
        assert logp == pytest.approx(total, rel=1e-4)
