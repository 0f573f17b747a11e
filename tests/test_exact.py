"""Exact pass@k against enumeration, against sampling, and along training."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from sage_lib.experiment.profile import load_profile
from sage_lib.files import append_line, read_lines
from sage_lib.policy import loading, scoring, tiny_qwen
from sage_lib.report import exact_tables
from sage_lib.tasks import countdown
from sage_lib.training.callbacks import ExactLog

SETTINGS = countdown.Settings(fewest=3, most=5, limit=50)


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return loading.with_prompt(tiny_qwen.load_tokenizer(tiny_model))


def test_pass_at_k_is_the_chance_of_one_success_by_enumeration():
    """All 2^k outcomes of k independent samples, for two problems."""
    p, k = [0.3, 0.05], 4
    expected = []
    for chance in p:
        total = 0.0
        for outcome in itertools.product((0, 1), repeat=k):
            weight = np.prod([chance if hit else 1 - chance for hit in outcome])
            total += weight * any(outcome)
        expected.append(total)
    assert exact_tables.pass_at_k(pd.Series(p), (k,))[:, 0] == pytest.approx(expected)
    assert exact_tables.pass_at_k(pd.Series([0.0, 1.0]), (1, 256)).tolist() == [[0, 0], [1, 1]]


def test_a_batch_of_problems_has_the_probabilities_of_each_alone(model, tokenizer, monkeypatch):
    problems = countdown.problems(SETTINGS, 6, 1)
    together = scoring.valid_probabilities(model, tokenizer, problems)
    assert len({len(problem.detail.digits) for problem in problems}) > 1, "of unequal length"
    monkeypatch.setattr(scoring, "LOGITS", 1)
    alone = scoring.valid_probabilities(model, tokenizer, problems)
    pd.testing.assert_frame_equal(together, alone, rtol=1e-5)


def test_the_summary_sums_over_completions_and_averages_over_problems():
    table = pd.DataFrame(
        {
            "dataset": ["both", "both", "both"],
            "problem": ["a", "a", "b"],
            "way": ["L", "R", "L"],
            "completion": [0, 1, 0],
            "logp": np.log([0.2, 0.1, 0.5]),
        }
    )
    [row] = scoring.exact_summary(table, (1, 2))
    assert row["pass@1"] == pytest.approx((0.3 + 0.5) / 2)
    assert row["pass@2"] == pytest.approx((1 - 0.7**2 + 1 - 0.5**2) / 2)
    assert (row["common"], row["rare"]) == pytest.approx(((0.2 + 0.5) / 2, 0.1 / 2))
    assert row["problems"] == 2


class State:
    def __init__(self, step):
        self.global_step = step


def test_the_log_along_training_resumes_moves_no_random_stream_and_leaves_the_mode(
    model, tokenizer, tmp_path
):
    problems = countdown.problems(SETTINGS, 3, 1)
    log = ExactLog(tmp_path / "exact.jsonl", tokenizer, problems, every=2)
    model.train()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    log.on_train_begin(None, State(0), None, model=model)
    for step in range(1, 6):
        log.on_step_end(None, State(step), None, model=model)
    assert torch.equal(torch.get_rng_state(), before) and model.training
    assert [row["step"] for row in read_lines(log.path)] == [0, 2, 4]
    append_line(log.path, {"step": 6, "dataset": "both"})
    log.on_train_begin(None, State(4), None, model=model)
    assert [row["step"] for row in read_lines(log.path)] == [0, 2, 4], "a resume takes steps back"
    model.eval()
    [direct] = scoring.exact_summary(
        scoring.valid_probabilities(model, tokenizer, problems), ExactLog.KS
    )
    assert read_lines(log.path)[0] == pytest.approx({"step": 0, **direct}, nan_ok=True)


def test_a_part_of_the_problems_is_sampled_and_all_are_exact():
    from sage_lib.experiment import problems

    profile = load_profile("smoke+evaluation.sampled=2")
    sampled, listed = problems.sampled_problems(profile), problems.listed_problems(profile)
    assert len(sampled) == 2 * len(profile.evaluation.data)
    assert len(listed) == sum(data.rows for data in profile.evaluation.data)
    assert {problem.id for problem in sampled} <= {problem.id for problem in listed}
