"""The embedded model's tokenizer, as every stage meets it: saved and loaded again."""

import random

import pytest

from sage_lib.policy import tiny_qwen
from sage_lib.tasks import countdown, prompts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    shape = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    tiny_qwen.create(folder, shape, limit=99, max_length=128, seed=0)
    return tiny_qwen.load_tokenizer(folder)


def test_a_worked_problem_survives_the_round_trip(tokenizer):
    problem = next(countdown.problems(1, 4, 99, {"both": 1.0}))
    turns = prompts.messages(problem.question)
    work, answer = countdown.demonstration(problem, 0.5, random.Random(0), 99)
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(
        [*turns, {"role": "assistant", "content": prompts.answer_turn(work, answer)}],
        return_dict=False,
    )
    assert whole[: len(prompt)] == prompt, "the prompt of generation is what fine-tuning masks"
    assert tokenizer.unk_token_id not in whole
    assert problem.question in tokenizer.decode(prompt) and tokenizer.decode(prompt).startswith(
        prompts.SYSTEM_PROMPT
    )
    assert countdown.check(
        problem, tokenizer.decode(whole[len(prompt) :], skip_special_tokens=True)
    ) == countdown.Check(work[0], True)


def test_each_marker_and_the_system_prompt_are_one_token(tokenizer):
    for text in (*prompts.MARKERS, prompts.SYSTEM_PROMPT):
        assert len(tokenizer(text)["input_ids"]) == 1
