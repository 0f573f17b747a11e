"""Guides against values computed by hand."""

import math

import pytest
import torch

from sage_lib.algorithm.guides import (
    BranchGuide,
    CosineSchedule,
    GuideInputs,
    IdentityGuide,
    RandomGuide,
    ShuffledGuide,
    TokenGuide,
    compose,
)
from sage_lib.errors import SageError


def inputs(entropies, mask=None):
    h = torch.tensor(entropies, dtype=torch.float64)
    return GuideInputs(
        h,
        -torch.ones_like(h),
        torch.ones_like(h) if mask is None else torch.tensor(mask),
        0.0,
        torch.Generator(),
    )


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


def batch(rows=6, time=40, seed=0, progress=0.0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    h = torch.rand(rows, time, generator=random, dtype=dtype) * 3
    logps = -torch.rand(rows, time, generator=random, dtype=dtype) * 4
    mask = (torch.arange(time) < torch.randint(1, time + 1, (rows, 1), generator=random)).long()
    return GuideInputs(h, logps, mask, progress, torch.Generator().manual_seed(seed))


def again(x):
    return GuideInputs(x.entropies, x.logps, x.mask, x.progress, torch.Generator().manual_seed(0))


EVERY = [
    BranchGuide(),
    RandomGuide(),
    TokenGuide(),
    TokenGuide("rank"),
    TokenGuide("zscore"),
    IdentityGuide(),
    ShuffledGuide(BranchGuide()),
    compose(BranchGuide(), RandomGuide(), TokenGuide()),
]


@pytest.mark.parametrize("guide", EVERY, ids=lambda g: getattr(g, "weight", type(g).__name__))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_guide_is_clamped_seeded_one_outside_the_mask_and_leaves_its_inputs_alone(
    guide, dtype
):
    x = batch(dtype=dtype)
    before = [t.clone() for t in (x.entropies, x.logps, x.mask)]
    q = guide(again(x))
    assert q.shape == x.logps.shape and q.dtype == dtype and not q.requires_grad
    assert (q >= 0.6).all() and (q <= 1.4).all() and (q[x.mask == 0] == 1).all()
    assert torch.equal(q, guide(again(x)))
    assert all(
        torch.equal(a, b) for a, b in zip(before, (x.entropies, x.logps, x.mask), strict=True)
    )


@pytest.mark.parametrize("guide", EVERY, ids=lambda g: getattr(g, "weight", type(g).__name__))
def test_edge_cases_are_defined(guide):
    rows = torch.tensor([[-1.0, -2.0, -3.0]] * 5)
    rows[1, 1] = float("nan")
    rows[2, 0] = float("-inf")
    rows[3] = -1.0
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
    q = guide(GuideInputs(rows.abs(), rows, mask, 1.0, torch.Generator().manual_seed(0)))
    assert torch.isfinite(q).all() and (q[4] == 1).all()
    single = guide(
        GuideInputs(
            torch.zeros(1, 1),
            -torch.ones(1, 1),
            torch.ones(1, 1),
            0.0,
            torch.Generator().manual_seed(1),
        )
    )
    assert torch.isfinite(single).all()


def test_random_guide_acts_at_its_probability_with_its_scale():
    guide = RandomGuide(low=1e-6, high=1e6)
    q = guide(
        GuideInputs(
            torch.zeros(200, 1000),
            torch.zeros(200, 1000),
            torch.ones(200, 1000),
            0.0,
            torch.Generator().manual_seed(3),
        )
    )
    acting = q[q != 1]
    assert (
        acting.numel() / q.numel() == pytest.approx(0.1, abs=0.003)
        and acting.std().item() == pytest.approx(0.15, rel=0.02)
        and acting.mean().item() == pytest.approx(1, abs=0.005)
    )
    later = guide(
        GuideInputs(torch.zeros(9, 9), torch.zeros(9, 9), torch.ones(9, 9), 1.0, torch.Generator())
    )
    assert (later == 1).all(), "the probability ends at 0"


def reference_weight(kind, surprisal):
    """One row, in numpy and loops."""
    import numpy as np
    from scipy.stats import rankdata

    if surprisal.max() == surprisal.min():
        return np.zeros_like(surprisal)
    if kind == "minmax":
        low, high = np.quantile(surprisal, [0.05, 0.95])
        return (np.clip(surprisal, low, high) - low) / (high - low)
    if kind == "rank":
        return (rankdata(surprisal) - 1) / (len(surprisal) - 1)
    return 1 / (1 + np.exp(-(surprisal - surprisal.mean()) / surprisal.std()))


@pytest.mark.parametrize("kind", ["minmax", "rank", "zscore"])
def test_token_weights_equal_a_row_by_row_reference(kind):
    x = batch(rows=20)
    logps = torch.where(
        torch.rand(x.logps.shape, generator=torch.Generator().manual_seed(5)) < 0.3, -1.0, x.logps
    )  # ties
    still = CosineSchedule(0.0, 0.0)
    q = TokenGuide(kind, amplitude=CosineSchedule(0.2, 0.2), scale=still, low=0.1, high=9.0)(
        GuideInputs(x.entropies, logps, x.mask, 0.0, x.generator)
    )
    for row in range(20):
        n = int(x.mask[row].sum())
        expected = 1 + 0.2 * torch.as_tensor(reference_weight(kind, -logps[row, :n].numpy()))
        torch.testing.assert_close(q[row, :n], expected)


def test_shuffled_guide_keeps_each_sequences_values_and_loses_their_place():
    x = batch(rows=8, time=200)
    inner = BranchGuide()(again(x))
    moved = ShuffledGuide(BranchGuide())(again(x))
    for row in range(8):
        n = int(x.mask[row].sum())
        torch.testing.assert_close(
            moved[row, :n].sort().values, inner[row, :n].sort().values, rtol=0, atol=0
        )
    assert not torch.equal(moved, inner)


def test_noise_does_not_depend_on_the_mask():
    x = batch()
    full = RandomGuide()(
        GuideInputs(
            x.entropies, x.logps, torch.ones_like(x.mask), 0.0, torch.Generator().manual_seed(0)
        )
    )
    part = RandomGuide()(again(x))
    assert torch.equal(torch.where(x.mask.bool(), full, torch.ones_like(full)), part)


def test_wrong_settings_are_refused():
    with pytest.raises(SageError, match="one of minmax, rank, zscore"):
        TokenGuide("median")
    with pytest.raises(SageError, match="at least one"):
        compose()
