"""Guides against values computed by hand."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from sage_lib.algorithm.advantages import PassAtK
from sage_lib.algorithm.guide_choices import build_guide
from sage_lib.algorithm.guides import (
    BranchGuide,
    CosineSchedule,
    GuideInputs,
    IdentityGuide,
    LikeliestGuide,
    RandomGuide,
    RewardGuide,
    ShuffledGuide,
    SuccessGuide,
    TokenGuide,
    check_guide,
    check_q,
    compose,
)
from sage_lib.errors import SageError
from sage_lib.theory.optimum import log_rho
from sage_lib.theory.solutions import tilted
from sage_lib.theory.tree import random_tree


def seen(entropies, logps, mask, progress=0.0, seed=0):
    """GuideInputs of tokens whose ids do not matter."""
    return GuideInputs(
        entropies=entropies,
        logps=logps,
        mask=mask,
        progress=progress,
        generator=torch.Generator().manual_seed(seed),
        ids=torch.zeros_like(mask, dtype=torch.long),
    )


def inputs(entropies, mask=None):
    h = torch.tensor(entropies, dtype=torch.float64)
    return seen(h, -torch.ones_like(h), torch.ones_like(h) if mask is None else torch.tensor(mask))


def test_branch_is_eq_11_between_the_clamps():
    q = BranchGuide(threshold=1.2, ratio=0.3)(inputs([[0.0, 1.2, 2.2, 9.0]]))
    torch.testing.assert_close(q, torch.tensor([[1.0, 1.0, 1.3, 1.4]], dtype=q.dtype))


def test_q_is_one_outside_the_mask_and_where_the_signal_is_not_a_number():
    q = BranchGuide()(inputs([[3.0, 3.0], [float("nan"), 3.0]], mask=[[0, 0], [1, 1]]))
    assert q.tolist() == [[1.0, 1.0], [1.0, 1.4]]


def test_cosine_schedule_restarts_lower_each_period():
    schedule = CosineSchedule(high=0.3, low=0.1, periods=8, decay=0.9)
    assert schedule(0.0) == pytest.approx(0.3)
    assert schedule(1 / 16) == pytest.approx(0.2)  # halfway through a period: cos(pi/2) = 0
    assert schedule(1 / 8) == pytest.approx(0.27)
    assert schedule(1.0) == pytest.approx(0.1)
    assert schedule(1 / 8 - 1e-9) == pytest.approx(0.1, abs=1e-6)
    assert math.isclose(CosineSchedule(0.1, 0.0)(7 / 8), 0.1 * 0.9**7)
    shrinking = CosineSchedule(high=0.1, low=0.09, periods=8, decay=0.9)
    assert shrinking(7 / 8) == pytest.approx(0.09), "not 0.1 * 0.9**7, which is 0.048"


def batch(rows=6, time=40, seed=0, progress=0.0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    h = torch.rand(rows, time, generator=random, dtype=dtype) * 3
    logps = -torch.rand(rows, time, generator=random, dtype=dtype) * 4
    mask = (torch.arange(time) < torch.randint(1, time + 1, (rows, 1), generator=random)).long()
    return seen(h, logps, mask, progress, seed)


def again(x):
    return seen(x.entropies, x.logps, x.mask, x.progress)


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
    x.entropies.requires_grad_()
    before = [t.clone() for t in (x.entropies, x.logps, x.mask)]
    q = guide(again(x))
    assert q.shape == x.logps.shape and q.dtype == dtype and not q.requires_grad
    assert (q >= 0.6).all() and (q <= 1.4).all() and (q[x.mask == 0] == 1).all()
    assert torch.equal(q, guide(again(x)))
    after = (x.entropies, x.logps, x.mask)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("guide", EVERY, ids=lambda g: getattr(g, "weight", type(g).__name__))
def test_edge_cases_are_defined(guide):
    rows = torch.tensor([[-1.0, -2.0, -3.0]] * 5)
    rows[1, 1] = float("nan")
    rows[2, 0] = float("-inf")
    rows[3] = -1.0
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
    q = guide(seen(rows.abs(), rows, mask, progress=1.0))
    assert torch.isfinite(q).all() and (q[4] == 1).all()
    single = guide(seen(torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1), seed=1))
    assert torch.isfinite(single).all()


def test_random_guide_acts_at_its_probability_with_its_scale():
    guide = RandomGuide(low=1e-6, high=1e6)
    nothing = torch.zeros(200, 1000)
    q = guide(seen(nothing, nothing, torch.ones(200, 1000), seed=3))
    acting = q[q != 1]
    assert acting.numel() / q.numel() == pytest.approx(0.1, abs=0.003)
    assert acting.std().item() == pytest.approx(0.15, rel=0.02)
    assert acting.mean().item() == pytest.approx(1, abs=0.005)
    halfway = guide(seen(nothing, nothing, torch.ones(200, 1000), progress=1 / 16, seed=3))
    acting = halfway[halfway != 1]  # through the first period: 0.05 of the tokens, and 0.1·z
    assert acting.numel() / q.numel() == pytest.approx(0.05, abs=0.002)
    assert acting.std().item() == pytest.approx(0.1, rel=0.02)
    later = guide(seen(nothing[:9, :9], nothing[:9, :9], torch.ones(9, 9), progress=1.0))
    assert (later == 1).all(), "the probability ends at 0"


def test_the_token_guide_follows_its_schedules():
    """Halfway through the first period its amplitude is 0.2, and its scale 0.175."""
    still = {"amplitude": CosineSchedule(0.2, 0.2), "scale": CosineSchedule(0.175, 0.175)}
    expected = TokenGuide(**still)(again(batch()))
    torch.testing.assert_close(TokenGuide()(again(batch(progress=1 / 16))), expected)


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
    tied = torch.rand(x.logps.shape, generator=torch.Generator().manual_seed(5)) < 0.3
    logps = torch.where(tied, -1.0, x.logps)
    logps[0, 1], logps[1, 1] = -torch.inf, torch.nan  # no numbers: the others are weighed alone
    constant, still = CosineSchedule(0.2, 0.2), CosineSchedule(0.0, 0.0)
    guide = TokenGuide(kind, amplitude=constant, scale=still, low=0.1, high=9.0)
    q = guide(seen(x.entropies, logps, x.mask))
    for row in range(20):
        there = logps[row].isfinite() & (x.mask[row] == 1)
        expected = 1 + 0.2 * torch.as_tensor(reference_weight(kind, -logps[row, there].numpy()))
        torch.testing.assert_close(q[row, there], expected)
        assert (q[row, ~there] == 1).all()


@pytest.mark.parametrize("kind", ["minmax", "rank", "zscore"])
def test_the_token_guides_noise_is_weighted_as_its_mean_is(kind):
    """Eq. 10 with a = 0: q - 1 = s·w·z, z drawn for every position in turn."""
    x = batch(rows=20, seed=2)
    still, constant = CosineSchedule(0.0, 0.0), CosineSchedule(0.2, 0.2)
    guide = TokenGuide(kind, amplitude=still, scale=constant, low=1e-6, high=9.0)
    z = torch.randn(x.logps.shape, generator=torch.Generator().manual_seed(0)).double()
    q = guide(again(x))
    for row in range(20):
        n = int(x.mask[row].sum())
        w = torch.as_tensor(reference_weight(kind, -x.logps[row, :n].numpy()))
        torch.testing.assert_close(q[row, :n], 1 + 0.2 * w * z[row, :n])


def test_the_reward_guide_flattens_the_reference_where_the_reward_is_0():
    """q = pi_ref^-0.5: 0.64 gives 1.25, and 1/4 gives 2, which is clamped."""
    plain = inputs([[0.0] * 3] * 5, mask=[[1, 1, 1]] * 4 + [[1, 0, 0]])
    reference = torch.tensor([0.64, 0.25, 1.0], dtype=torch.float64).log().expand(5, 3)
    rewards = torch.tensor([0.0, 1.0, math.nan, 0.5, 0.0])
    x = dataclasses.replace(plain, ref_logps=reference, rewards=rewards)
    acting, ones = [1.25, 1.4, 1.0], [1.0, 1.0, 1.0]
    expected = torch.tensor([acting, ones, ones, ones, [1.25, 1.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(RewardGuide()(x), expected)
    wide = RewardGuide(power=0.25, high=9.0)(x)
    assert wide[0].tolist() == pytest.approx([0.64**-0.75, 4**0.75, 1.0])
    for lacking in ("ref_logps", "rewards"):
        with pytest.raises(SageError, match="in RL training alone"):
            RewardGuide()(dataclasses.replace(x, **{lacking: None}))


def test_the_reverse_of_branch_is_its_mirror_image_and_its_hard_version_leaves_no_kl():
    x = batch()
    choice = {"name": "branch", "threshold_quantile": 0.8, "clamp_quantile": 0.9}
    quantiles = {"0.75": 0.8, "0.8": 1.0, "0.9": 2.0}
    strong = build_guide(choice, quantiles)(x)
    reverse = build_guide({**choice, "reverse": True}, quantiles)(x)
    torch.testing.assert_close(reverse, 2 - strong)
    assert reverse.min() == 0.6 and reverse.max() == 1
    steep = {"threshold_quantile": 0.75, "clamp_quantile": 0.8, "low": 0.01}
    hard = build_guide({"name": "branch", "reverse": True, **steep}, quantiles)(x)
    above = (x.entropies > 1.0) & x.mask.bool()
    assert above.any() and (hard[above] == 0.01).all() and (hard[x.entropies < 0.8] == 1).all()
    with pytest.raises(SageError, match="goes with quantiles"):
        build_guide({"name": "branch", "threshold": 1.0, "ratio": 0.3, "reverse": True})


def of_tree(seed):
    """A random tree with its base and reward, and its completions as rows of GuideInputs."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    log_policy = tree.log_policy(torch.tensor(rng.normal(size=len(tree.edges))))
    right = torch.tensor(rng.random(len(tree.completions)) < 0.4)
    right[0], right[-1] = True, False
    time = max(map(len, tree.completions))
    place = {edge: n for n, edge in enumerate(tree.edges)}
    logps, mask = torch.zeros(2, len(right), time, dtype=torch.float64)
    for row, tokens in enumerate(tree.completions):
        for t, token in enumerate(tokens):
            logps[row, t], mask[row, t] = log_policy[place[tokens[:t], token]], 1
    x = seen(torch.zeros_like(logps), logps, mask)
    x = dataclasses.replace(x, ref_logps=logps, rewards=right.double())
    return tree, log_policy, right, x


@pytest.mark.parametrize("seed", range(5))
def test_at_the_optimum_of_the_likeliest_guide_all_right_completions_are_equally_likely(seed):
    """Eq. 4 by enumeration, unclamped; MARA's reward at eq. 2 gives the same policy."""
    tree, log_policy, right, x = of_tree(seed)
    reference, beta = tree.completion_probabilities(log_policy), 0.3
    best = reference[right].max().log()
    padded = x.ref_logps.where(x.mask == 1, -9.0)  # what a model reads there does not count
    x = dataclasses.replace(x, best_logps=best.expand(len(right)), ref_logps=padded)
    q = LikeliestGuide(low=1e-9, high=1e9)(x).prod(1)
    policy = tilted(reference, right.double(), beta, q)
    torch.testing.assert_close(policy[right], policy[right].mean().expand(int(right.sum())))
    reward = torch.where(right, 1 + beta * (best - reference.log()), 0.0)
    torch.testing.assert_close(policy, tilted(reference, reward, beta, torch.ones_like(q)))
    p = float(reference[right].sum())
    # log rho in closed form: log of (number of right ones · the likeliest's probability / p).
    expected = math.log(int(right.sum()) * float(best.exp()) / p)
    assert log_rho(reference, right.double(), q) == pytest.approx(expected, abs=1e-9)
    assert expected >= 0


@pytest.mark.parametrize("seed", range(5))
def test_the_success_ratio_has_a_positive_log_rho_where_pi_s_is_the_base_given_success(seed):
    """With pi_s = pi_ref( . | right) token by token and alpha 1, q is 1/p on right completions and
    0 on wrong ones: here mixed with the base, so that log rho is finite."""
    tree, log_policy, right, x = of_tree(seed)
    reference = tree.completion_probabilities(log_policy)
    p, share = float(reference[right].sum()), 0.5
    policy = share * reference * right / p + (1 - share) * reference
    visits = tree.paths.T @ policy
    edges = (visits / tree.sum_by_state(visits)[tree.state_of]).log()
    place = {edge: n for n, edge in enumerate(tree.edges)}
    logps = torch.zeros_like(x.logps)
    for row, tokens in enumerate(tree.completions):
        for t, token in enumerate(tokens):
            logps[row, t] = edges[place[tokens[:t], token]]
    x = dataclasses.replace(x, guide_logps=logps)
    q = SuccessGuide(low=1e-9, high=1e9)(x)
    torch.testing.assert_close(q.prod(1), policy / reference)
    expected = math.log((share / p + 1 - share) / (1 - share))
    assert log_rho(reference, right.double(), q.prod(1)) == pytest.approx(expected, abs=1e-9)
    half = SuccessGuide(alpha=0.5, low=1e-9, high=1e9)(x)
    torch.testing.assert_close(half**2, q)
    assert SuccessGuide()(x).min() >= 0.6 and SuccessGuide()(x).max() <= 1.4


@pytest.mark.parametrize(
    ("guide", "lacking"), [(LikeliestGuide(), "best_logps"), (SuccessGuide(), "guide_logps")]
)
def test_guides_of_training_refuse_other_places(guide, lacking):
    x = of_tree(0)[-1]
    x = dataclasses.replace(x, best_logps=x.rewards, guide_logps=x.logps)
    guide(x)
    with pytest.raises(SageError, match="in RL training"):
        guide(dataclasses.replace(x, **{lacking: None}))


def test_shuffled_guide_keeps_each_sequences_values_and_loses_their_place():
    x = batch(rows=8, time=200)
    inner = BranchGuide()(again(x))
    moved = ShuffledGuide(BranchGuide())(again(x))
    for row in range(8):
        n = int(x.mask[row].sum())
        kept, values = moved[row, :n].sort().values, inner[row, :n].sort().values
        torch.testing.assert_close(kept, values, rtol=0, atol=0)
    assert not torch.equal(moved, inner)


def test_noise_does_not_depend_on_the_mask():
    x = batch()
    full = RandomGuide()(seen(x.entropies, x.logps, torch.ones_like(x.mask)))
    part = RandomGuide()(again(x))
    assert torch.equal(torch.where(x.mask.bool(), full, torch.ones_like(full)), part)


@pytest.mark.parametrize("guide", [BranchGuide, "branch", {"name": "token"}, 1.2])
def test_what_is_no_guide_is_refused_at_construction(guide):
    for use in (check_guide, ShuffledGuide, compose):
        with pytest.raises(SageError, match=r"hand over an instance, .*or build_guide"):
            use(guide)


@pytest.mark.parametrize(
    ("q", "reason"),
    [
        (1.2, "as a torch tensor, not a float"),
        (torch.ones(1, 2).numpy(), "as a torch tensor, not a ndarray"),
        (torch.ones(2), r"not of shape \(2,\)"),
        (torch.ones(1, 2) > 0, "not of torch.bool: return q itself"),
        (torch.full((1, 2), torch.nan), r"smallest finite value none\)"),
        (torch.tensor([[1.0, 0.0]]), r"1 of 2 are not \(smallest finite value 0\)"),
        (torch.tensor([[1.0, float("nan")]]), r"1 of 2 are not \(smallest finite value 1\)"),
    ],
)
def test_q_that_is_no_weight_of_every_token_is_refused(q, reason):
    x = inputs([[1.0, 2.0]])
    with pytest.raises(SageError, match=rf"of shape \(1, 2\), one per token.*{reason}"):
        check_q(q, x)
    for guide in (ShuffledGuide(lambda _: q), compose(BranchGuide(), lambda _: q)):
        with pytest.raises(SageError, match=reason):
            guide(x)


def test_a_guide_made_of_others_keeps_their_states():
    class Counting:
        calls = 0

        def __call__(self, x):
            self.calls += 1
            return torch.ones_like(x.logps)

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    first, second = Counting(), Counting()
    composed = compose(BranchGuide(), ShuffledGuide(first))
    composed(inputs([[1.0, 2.0]]))
    again = compose(BranchGuide(), ShuffledGuide(second))
    again.load_state_dict(composed.state_dict())
    assert first.calls == second.calls == 1


def test_padding_is_no_value_of_q():
    x = dataclasses.replace(inputs([[1.0, 2.0]]), mask=torch.tensor([[1, 0]]))
    with pytest.raises(SageError, match=r"1 of 1 are not \(smallest finite value none\)"):
        check_q(torch.full((1, 2), torch.nan), x)


@pytest.mark.parametrize("kind", [BranchGuide, RandomGuide, TokenGuide, PassAtK])
def test_a_misspelt_parameter_is_refused(kind):
    with pytest.raises(ValidationError, match="treshold"):
        kind(treshold=1.0)


def test_the_former_name_of_an_input_works_with_a_warning():
    ones = torch.ones(1, 1)
    inputs = dataclasses.replace(seen(ones, -ones, ones), ref_logps=torch.zeros(1, 1))
    with pytest.warns(FutureWarning, match="ref_logps"):
        assert inputs.reference is inputs.ref_logps


def test_a_composed_guide_multiplies_and_clamps_once_more():
    x, one, other = batch(), BranchGuide(threshold=0.2, ratio=0.4), BranchGuide(threshold=0.5)
    product = one(x) * other(x)
    assert (product > 1.4).any(), "so that the clamp matters"
    assert torch.allclose(compose(one, other, low=1e-6, high=1e6)(x), product)
    assert torch.allclose(compose(one, other)(x), product.clamp(0.6, 1.4))
