"""Exact probabilities of valid work: against sampling, and along training."""

import copy
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from sage_lib.experiment import problems
from sage_lib.experiment.profile import load_profile
from sage_lib.files import append_line, read_lines
from sage_lib.policy import loading, sampling, scoring, tiny_qwen
from sage_lib.policy.exact import exact_summary, valid_mass
from sage_lib.tasks import countdown
from sage_lib.training import callbacks
from sage_lib.training.callbacks import ExactLog

SETTINGS = countdown.Countdown(fewest=3, most=5, limit=50)


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return loading.with_prompt(tiny_qwen.load_tokenizer(tiny_model))


def test_a_batch_of_problems_has_the_probabilities_of_each_alone(model, tokenizer, monkeypatch):
    asked = SETTINGS.problems(6, 1)
    together = scoring.valid_probabilities(model, tokenizer, asked)
    assert len({len(problem.detail.digits) for problem in asked}) > 1, "of unequal length"
    alone = [scoring.valid_probabilities(model, tokenizer, [problem]) for problem in asked]
    pd.testing.assert_frame_equal(together, pd.concat(alone, ignore_index=True), rtol=1e-5)
    monkeypatch.setattr(scoring, "LOGITS", 1)
    in_turn = scoring.valid_probabilities(model, tokenizer, asked)
    pd.testing.assert_frame_equal(together, in_turn, rtol=1e-5)


def test_the_summary_sums_over_completions_and_averages_over_problems():
    table = pd.DataFrame({"dataset": "both", "problem": ["a", "a", "b"], "way": ["L", "R", "L"]})
    sharp = {"logp_0.3": np.log([0.6, 0.3, 0.5])}
    table = table.assign(logp=np.log([0.2, 0.1, 0.5]), **sharp)
    [row] = exact_summary(table, (1, 2))
    assert row["pass@2_0.3"] == pytest.approx((1 - 0.1**2 + 1 - 0.5**2) / 2)
    assert row["pass@1"] == pytest.approx((0.3 + 0.5) / 2)
    assert row["pass@2"] == pytest.approx((1 - 0.7**2 + 1 - 0.5**2) / 2)
    assert (row["common"], row["rare"]) == pytest.approx(((0.2 + 0.5) / 2, 0.1 / 2))
    assert row["problems"] == 2


def test_the_mass_of_valid_work_is_by_problem_in_its_order_and_no_more_than_1():
    table = pd.DataFrame({"dataset": ["x", "x", "both"], "problem": ["b", "b", "a"]})
    table = table.assign(logp=np.log([0.7, 0.3 + 1e-9, 0.5]), **{"logp_0.3": np.log([0.1] * 3)})
    assert valid_mass(table).to_dict() == {("x", "b"): 1.0, ("both", "a"): pytest.approx(0.5)}
    assert list(valid_mass(table, "logp_0.3")) == pytest.approx([0.2, 0.1])


def test_the_log_along_training_resumes_moves_no_random_stream_and_leaves_the_mode(
    model, tokenizer, tmp_path
):
    asked = SETTINGS.problems(3, 1)
    log = ExactLog(tmp_path / "exact.jsonl", tokenizer, asked, 2, tmp_path / "start.json")
    model.train()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    log.on_train_begin(None, SimpleNamespace(global_step=0), None, model=model)
    for step in range(1, 6):
        log.on_step_end(None, SimpleNamespace(global_step=step), None, model=model)
    assert torch.equal(torch.get_rng_state(), before) and model.training
    assert [row["step"] for row in read_lines(log.path)] == [0, 2, 4]
    append_line(log.path, {"step": 6, "dataset": "both"})
    log.on_train_begin(None, SimpleNamespace(global_step=4), None, model=model)
    assert [row["step"] for row in read_lines(log.path)] == [0, 2, 4], "a resume takes steps back"
    log.on_train_begin(None, SimpleNamespace(global_step=0), None, model=model)
    assert [row["step"] for row in read_lines(log.path)] == [0], "so does one without a checkpoint"
    model.eval()
    table = scoring.valid_probabilities(model, tokenizer, asked)
    [direct] = exact_summary(table, ExactLog.KS)
    assert read_lines(log.path)[0] == pytest.approx({"step": 0, **direct}, nan_ok=True)


def test_what_is_measured_before_the_first_step_is_measured_once(
    model, tokenizer, tmp_path, monkeypatch
):
    """And anew where the file is damaged."""
    asked, start = SETTINGS.problems(3, 1), tmp_path / "start.json"
    counted = []
    made = callbacks.valid_probabilities
    monkeypatch.setattr(
        callbacks, "valid_probabilities", lambda *given: counted.append(1) or made(*given)
    )

    def logged(name, start):
        log = ExactLog(tmp_path / name, tokenizer, asked, 2, start)
        log.on_train_begin(None, SimpleNamespace(global_step=0), None, model=model)
        log.on_step_end(None, SimpleNamespace(global_step=2), None, model=model)
        return (tmp_path / name).read_text()

    alone = logged("alone", tmp_path / "start_alone.json")
    assert alone.count("\n") == 2 and len(counted) == 2
    assert logged("first", start) == alone and len(counted) == 4
    assert logged("second", start) == alone and len(counted) == 5, "step 2 alone"
    start.write_text(start.read_text()[:-9])
    assert logged("third", start) == alone and len(counted) == 7


def test_first_rows_are_shared_by_runs_of_one_base_way_of_loading_problems_and_temperatures(
    tokenizer, tmp_path
):
    def start_path(changes="", weights="w", rows=2):
        data = f"[{{name: countdown, rows: {rows}, seed: 1, kinds: {{both: 1.0}}}}]"
        profile = load_profile(f"smoke+evaluation.every=2+evaluation.data={data}{changes}")
        base = SimpleNamespace(weights=weights, build=tmp_path)
        run = SimpleNamespace(policy=base, method="grpo", build=tmp_path)
        return callbacks.exact_log(profile, run, tokenizer).start_path

    changes = ["", "+rl_lora.r=2", "+evaluation.tempered=[0.5]", "+methods.grpo.lora=false"]
    others = [start_path(change) for change in changes]
    assert len({*others, start_path(weights="other"), start_path(rows=3)}) == 6
    assert start_path("+rl.beta=0.7+evaluation.seed=9") == others[0]
    assert callbacks.exact_log(load_profile("smoke+evaluation.every=0"), None, tokenizer) is None


def test_a_part_of_the_problems_is_sampled_and_all_are_exact():
    profile = load_profile("smoke+evaluation.sampled=2")
    sampled, listed = problems.sampled_problems(profile), problems.listed_problems(profile)
    sizes = [data.rows for data in profile.evaluation.data]
    assert sum(sizes[:3]) >= 600, "of Table 1's data"
    assert len(sampled) == 2 * len(sizes) and len(listed) == sum(sizes)
    assert {problem.id for problem in sampled} <= {problem.id for problem in listed}
    assert Counter(problem.dataset for problem in sampled).most_common(1)[0][1] == 2


@pytest.mark.parametrize("name", ["smoke", "laptop"])
def test_every_valid_completion_fits_the_length_limits(name, tokenizer):
    profile = load_profile(name)
    lengths = {}
    for problem in problems.evaluation_problems(profile):
        prompt = len(loading.encode(tokenizer, problem.question))
        for _, working, answer in countdown.Countdown.completions(problem):
            whole = scoring.conversation_ids(tokenizer, problem.question, working, answer)
            assert len(whole) <= profile.model.max_seq_length
            lengths.setdefault(len(problem.detail.digits), set()).add(len(whole) - prompt)
    assert lengths == {3: {23}, 4: {33}, 5: {43}}, "one length for each number of digits"
    assert profile.evaluation.max_new_tokens >= 43
    assert profile.rl["max_completion_length"] >= 43


def learned(model, tokenizer, problem):
    """A copy that has half learned the valid completions of one problem, in one way more so."""
    learner = copy.deepcopy(model).train()
    optimiser = torch.optim.Adam(learner.parameters(), 0.01)
    start = len(loading.encode(tokenizer, problem.question))
    turns = [
        scoring.conversation_ids(tokenizer, problem.question, working, answer)
        for way, working, answer in countdown.Countdown.completions(problem)
        for _ in range(3 if way == "L" else 1)
    ]
    ids = torch.tensor(turns)
    labels = ids.clone()
    labels[:, :start] = -100
    for _ in range(200):
        loss = learner(input_ids=ids, labels=labels).loss
        if loss.item() < 0.06:
            break
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return learner.eval()


def test_exact_probabilities_are_the_frequencies_of_samples(model, tokenizer):
    """Two ways that share no code: listed completions scored in one pass, against 20,000 samples
    at temperature 1, token by token, read by the step checker."""
    [problem] = countdown.Countdown(fewest=3, most=3, limit=50).problems(1, 1)
    learner = learned(model, tokenizer, problem)
    table = scoring.valid_probabilities(learner, tokenizer, [problem])
    exact = np.exp(table["logp"]).groupby(table["way"]).sum()
    assert ((exact > 0.02) & (exact < 0.9)).all() and len(exact) == 2, "something to count"
    samples = 20_000
    chosen = SimpleNamespace(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=24, seed=5,
        samples=samples, batch_size=samples // 4,
    )  # fmt: skip
    engine = sampling.transformers_engine(learner, tokenizer, [problem], chosen)
    found = Counter()
    for batch in range(4):
        numbers = range(batch * chosen.batch_size, (batch + 1) * chosen.batch_size)
        for ids, finished in engine.draw([(0, number) for number in numbers]):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            checked = countdown.check(problem.detail, text)
            found[checked.way] += finished and checked.valid
    for way, p in exact.items():
        z = (found[way] - samples * p) / np.sqrt(samples * p * (1 - p))
        assert abs(z) < 4, f"{way}: {found[way] / samples:.4f} of the samples, exactly {p:.4f}"
