"""Graph coloring and the tiny model: what it can write, and that its masses are exact."""

import random

import pytest
import torch
from test_reasoning_gym import colored
from transformers import AutoModelForCausalLM

from sage_lib.policy import loading, scoring, tiny_qwen
from sage_lib.policy.exact import exact_summary
from sage_lib.tasks import graph_color, judging, prompts
from sage_lib.tasks.graph_color import GraphColor
from sage_lib.tasks.verifier import Verifier


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model whose vocabulary has the words of graph coloring."""
    from sage_lib.experiment.profile import Model

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Model(tiny_qwen.NAME, 128, seed=0, architecture=shape, largest_number=9)
    folder = tmp_path_factory.mktemp("tiny_graphs")
    assert loading.starting_point(model, folder, GraphColor().words) == folder
    tokenizer = loading.load_tokenizer(model, folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


def test_what_is_exact_of_countdown_is_exact_of_graphs(tmp_path):
    from sage_lib.experiment.problems import held_out, listed_problems, rl_problems
    from sage_lib.experiment.profile import load_profile
    from sage_lib.experiment.runs import STAGES

    graphs, others = (
        f"{{name: graph_color, rows: {rows}, seed: {seed}, fewest: 10, edge_probability: 0.6}}"
        for rows, seed in ((30, 1), (60, 2))
    )
    text = f"extends: smoke\nname: own\nrl_data: {others}\nevaluation: {{data: ["
    found = []
    for data in (graphs, "{name: reasoning_gym, dataset: chain_sum, rows: 3}"):
        path = tmp_path / "own.yaml"
        path.write_text(f"{text}{data}]}}\n")
        found.append(load_profile(str(path)))
    exact, sampled = found
    for profile, number in ((exact, 30), (sampled, 0)):
        assert profile.exact == bool(number) and len(listed_problems(profile)) == number
        assert len(STAGES["optimum"].runs(profile)) == bool(number)
    kept = held_out(exact, exact.rl_data)
    asked = {problem.question for problem in rl_problems(exact)}
    assert len(kept) == 30 and len(asked) == 60 and not kept & asked
    unkept = {problem.question for problem in rl_problems(sampled)}
    assert kept & unkept, "they would have been drawn"


def test_words_of_a_task_leave_the_ids_of_all_others_as_they_were():
    old, new = tiny_qwen.tokenizer(9, 64), tiny_qwen.tokenizer(9, 64, graph_color.WORDS)
    before, after = old.get_vocab(), new.get_vocab()
    assert tiny_qwen.tokenizer(9, 64, ()).get_vocab() == before
    whole = {prompts.SYSTEM_PROMPT, *prompts.MARKERS}
    assert {w: i for w, i in before.items() if w not in whole}.items() <= after.items()
    assert sorted(after.values()) == list(range(len(before) + len(graph_color.WORDS)))
    assert [before[word] for word in ("<pad>", "reach", "L", "+", "0", "9")] == [0, 3, 5, 7, 14, 23]


def test_the_tiny_model_can_write_all_right_answers_and_their_mass_is_exact(tiny):
    model, tokenizer = tiny
    asked = colored(fewest=3).problems(3, 1)
    table = scoring.valid_probabilities(model, tokenizer, asked)
    assert len(table) == sum(len(GraphColor.completions(p)) for p in asked)
    for problem in asked:
        listed = GraphColor.completions(problem)
        own = table[table["problem"] == problem.id].reset_index()
        for number in random.Random(0).sample(range(len(listed)), 3):
            way, work, answer = listed[number]
            prompt = loading.encode(tokenizer, problem.question)
            turn = prompts.answer_turn(work, answer).removeprefix(prompts.WORK_START)
            body = [*tokenizer(turn)["input_ids"], tokenizer.eos_token_id]
            assert tokenizer.unk_token_id not in prompt + body
            text = tokenizer.decode(body, skip_special_tokens=True)
            assert GraphColor.way_of(problem, text) == way
            assert judging.judge([problem], [text], Verifier()) == [True]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + body])).logits[0].double()
            states = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            logp = states[range(len(body)), body].sum().item()
            assert own["logp"][number] == pytest.approx(logp, rel=1e-5)
            assert own["way"][number] == way
    summary = exact_summary(table, [1, 8])
    assert summary[0]["pass@1"] == pytest.approx(summary[0]["common"] + summary[0]["rare"])
