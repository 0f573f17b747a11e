"""Faults that were planted once and that no other test saw: each has its direct test here."""

import hashlib
from types import SimpleNamespace

import pytest
import torch

from sage_lib.algorithm.rollouts import Rollouts
from sage_lib.policy.sampling import sample_seed
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.verifier import LENGTH_LIMIT, Verifier


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_a_reduction_equals_its_loops(loss_type):
    """Rows of unequal length, fewer columns than the longest completion, several updates a step."""
    lengths, longest, accumulation, processes, updates = (2, 4, 1), 7, 2, 3, 4
    values = torch.arange(12, dtype=torch.float64).view(3, 4) ** 2
    mask = torch.tensor([[float(t < n) for t in range(4)] for n in lengths])
    trainer = SimpleNamespace(
        loss_type=loss_type,
        max_completion_length=longest,
        accelerator=SimpleNamespace(num_processes=processes),
        args=SimpleNamespace(steps_per_generation=updates),
        current_gradient_accumulation_steps=accumulation,
    )
    batch = {"completion_mask": mask, "num_items_in_batch": torch.tensor(30.0)}
    found = Rollouts._reduced(trainer, values, batch)
    kept = [[values[row, t].item() for t in range(n)] for row, n in enumerate(lengths)]
    total, tokens = sum(map(sum, kept)), sum(lengths)
    expected = {
        "grpo": sum(sum(row) / len(row) for row in kept) / 3 / accumulation,
        "bnpo": total / tokens / accumulation,
        "dr_grpo": total / (3 * longest) / accumulation,
        "dapo": total / (30 / processes * accumulation / updates),
    }
    assert found.item() == pytest.approx(expected[loss_type])


def test_an_answer_one_character_too_long_is_not_read():
    verifier = Verifier()
    [verdict] = verifier.verify_answers(["5"], ["0" * LENGTH_LIMIT + "5"])
    assert (verdict.correct, verdict.reason) == (False, "too long")
    [verdict] = verifier.verify_answers(["5"], ["0" * (LENGTH_LIMIT - 1) + "5"])
    assert verdict.correct


def test_problems_of_one_name_in_two_data_sets_are_drawn_apart():
    one, other = (Problem("7", dataset, "2 + 2?", "4", "file") for dataset in ("a", "b"))
    assert sample_seed(0, one, 3) != sample_seed(0, other, 3)
    digest = hashlib.sha256(b"0/a/7/3").hexdigest()
    assert sample_seed(0, one, 3) == int(digest[:12], 16)
