"""Faults that were planted once and that no other test saw: each has its direct test here."""

import hashlib
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from sage_lib.algorithm.guides import BranchGuide
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


def test_the_metrics_of_tokens_by_hand():
    """Rows of three, two and one counted tokens; one process."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    process = SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x)
    trainer = Rollouts.__new__(Rollouts)
    logged = {"train": defaultdict(list)}
    vars(trainer).update(accelerator=process, _metrics=logged, guide=BranchGuide())
    trainer._log_guide(torch.tensor([[1, 1.2, 1.4, 9], [0.6, 1, 9, 9], [1.1, 9, 9, 9]]), mask)
    trainer._log_advantages(
        torch.tensor([[1.0], [-2.0], [4.0]]).expand(3, 4), mask.bool() & (mask.cumsum(1) == 1), mask
    )
    entropies = torch.tensor([[1.0, 2, 3, 9], [4, 6, 9, 9], [7, 9, 9, 9]])
    # A thousandth of the largest advantage is rounding, and no sign.
    batch = {"completion_mask": mask, "advantages": torch.tensor([1.0, -2.0, 0.0015])}
    trainer._log_entropies(batch, entropies)
    found = {name: value for name, [value] in logged["train"].items()}
    expected = {"guide/mean": 6.3 / 6, "guide/acting": 4 / 6, "guide/clamped": 2 / 6}
    expected |= {"guide/min": 0.6, "guide/max": 1.4}
    expected |= {"advantage/touched": 3 / 6, "advantage/size": (3 + 4 + 4) / 6}
    expected |= {"entropy/positive": 2.0, "entropy/negative": 5.0}
    assert found == pytest.approx(expected)


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
