"""The tiny model's tokenizer, as every stage meets it: saved and loaded again."""

import dataclasses
import random

import pytest

from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.policy import tiny_qwen
from sage_lib.tasks import countdown, prompts, puzzles


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return tiny_qwen.load_tokenizer(tiny_model)


def test_a_worked_problem_survives_the_round_trip(tokenizer):
    [problem] = countdown.Countdown(name="countdown", limit=99).problems(1, 1)
    turns = prompts.messages(problem.question)
    work, answer = countdown.Countdown(rare_share=0.5).demonstrate(
        problem, random.Random(0), aimless=False, early=False
    )
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    shown = {"role": "assistant", "content": prompts.answer_turn(work, answer)}
    whole = tokenizer.apply_chat_template([*turns, shown], return_dict=False)
    assert whole[: len(prompt)] == prompt, "the prompt of generation is what fine-tuning masks"
    assert tokenizer.unk_token_id not in whole
    asked = tokenizer.decode(prompt)
    assert problem.question in asked and asked.startswith(prompts.SYSTEM_PROMPT)
    completion = tokenizer.decode(whole[len(prompt) :], skip_special_tokens=True)
    assert countdown.check(problem.detail, completion) == puzzles.Check(work[0], True)


def test_more_operators_are_new_words_behind_the_old_ones():
    assert countdown.Countdown().words == ()
    more = countdown.Countdown(operators=("+", "max", "dist")).words
    before, after = (tiny_qwen.tokenizer(50, 64, words).get_vocab() for words in ((), more))
    assert more == ("max", "dist") and after.keys() - before.keys() == set(more)
    of_words = [name for name in before if name not in (prompts.SYSTEM_PROMPT, *prompts.MARKERS)]
    assert all(after[name] == before[name] for name in of_words)


def test_each_marker_and_the_system_prompt_are_one_token(tokenizer):
    for text in (*prompts.MARKERS, prompts.SYSTEM_PROMPT):
        assert len(tokenizer(text)["input_ids"]) == 1


def test_the_example_is_a_model_and_problems_that_its_tokenizer_reads(tmp_path):
    rows, tokenizer = tiny_qwen.example(tmp_path / "tiny")
    for prompt, answer in zip(rows["prompt"][:20], rows["answer"][:20], strict=True):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert tokenizer.unk_token_id not in ids
        assert prompt[-1]["content"].startswith(f"reach {answer} from")
        assert prompt[-1]["content"] in tokenizer.decode(ids)
    assert (tmp_path / "tiny" / "model.safetensors").is_file() and len(rows) > 100


def test_a_size_that_is_missing_is_named():
    model = load_profile("smoke").model
    for key, size in (("hidden_size", None), ("num_attention_heads", 0)):
        wrong = dataclasses.replace(model, architecture={**model.architecture, key: size})
        with pytest.raises(SageError, match=f"architecture.{key} must be 1 or more"):
            tiny_qwen.check_architecture(wrong)
