"""Guides against values computed by hand."""

import math

import pytest
import torch

from sage_lib.errors import SageError
from sage_lib.guides import BranchGuide, CosineSchedule, GuideInputs, IdentityGuide


def inputs(entropies, mask=None):
    h = torch.tensor(entropies, dtype=torch.float64)
    return GuideInputs(h, -torch.ones_like(h), torch.ones_like(h) if mask is None else torch.tensor(mask), 0.0, torch.Generator())


def test_branch_is_eq_11_between_the_clamps():
    q = BranchGuide(threshold=1.2, ratio=0.3)(inputs([[0.0, 1.2, 2.2, 9.0]]))
    torch.testing.assert_close(q, torch.tensor([[1.0, 1.0, 1.3, 1.4]], dtype=q.dtype))


def test_q_is_one_outside_the_mask_and_where_the_signal_is_not_a_number():
    q = BranchGuide()(inputs([[3.0, 3.0], [float("nan"), 3.0]], mask=[[0, 0], [1, 1]]))
    assert q.tolist() == [[1.0, 1.0], [1.0, 1.4]]


def test_q_is_a_constant_to_the_gradient():
    h = torch.tensor([[2.0]], requires_grad=True)
    q = BranchGuide()(GuideInputs(h, h, torch.ones(1, 1), 0.0, torch.Generator()))
    assert not q.requires_grad


def test_identity_guide():
    assert torch.equal(IdentityGuide()(inputs([[0.0, 5.0]])), torch.ones(1, 2, dtype=torch.float64))


def test_clamp_must_hold_one():
    with pytest.raises(SageError, match="clamped around 1"):
        BranchGuide(low=1.1)


def test_cosine_schedule_restarts_lower_each_period():
    schedule = CosineSchedule(high=0.3, low=0.1, periods=8, decay=0.9)
    assert schedule(0.0) == pytest.approx(0.3)
    assert schedule(1 / 16) == pytest.approx(0.2)  # halfway through a period: cos(pi/2) = 0
    assert schedule(1 / 8) == pytest.approx(0.27)
    assert schedule(1.0) == pytest.approx(0.1)
    assert schedule(1 / 8 - 1e-9) == pytest.approx(0.1, abs=1e-6)
    with pytest.raises(SageError):
        schedule(1.1)
    assert math.isclose(CosineSchedule(0.1, 0.0)(7 / 8), 0.1 * 0.9**7)
