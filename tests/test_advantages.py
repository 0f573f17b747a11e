"""Shapers of advantages against hand computations, enumerations and NumPy. In the trainer's loss:
test_trainer.py."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sage_lib.algorithm.advantage_choices import ADVANTAGES, build_advantage
from sage_lib.algorithm.advantages import (
    BatchTokens,
    BetaNormalised,
    ClipCov,
    Completions,
    EntropyBonus,
    KLCov,
    MaxRL,
    NegativeSamples,
    PassAtK,
    PerplexityAdvantage,
    PositionBonus,
    RepoR,
    covariance,
)
from sage_lib.errors import SageError


def completions(rewards, generations=4, advantages=None, log_perplexity=None):
    given = torch.zeros(len(rewards)) if advantages is None else torch.tensor(advantages)
    surprisal = None if log_perplexity is None else torch.tensor(log_perplexity)
    return Completions(given, torch.tensor(rewards), generations, surprisal)


def tokens(advantages, mask=None, **signals):
    """A batch with one advantage for each row, as TRL gives it; signals not given are 0."""
    mask = torch.ones(1, 1, dtype=torch.long) if mask is None else torch.tensor(mask)
    rows = torch.tensor(advantages)
    names = ("live_logps", "old_logps", "entropies")
    zero = torch.zeros(mask.shape)
    return BatchTokens(
        advantages=rows.unsqueeze(1).expand(mask.shape) if rows.dim() == 1 else rows,
        mask=mask,
        progress=signals.pop("progress", 0.0),
        generator=torch.Generator().manual_seed(0),
        **{name: torch.tensor(signals[name]) if name in signals else zero for name in names},
    )


def random_tokens(rows=6, time=9, seed=1):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, time + 1, (rows, 1), generator=draw)
    logps = -3 * torch.rand(rows, time, generator=draw)
    return BatchTokens(
        advantages=torch.randn(rows, 1, generator=draw).expand(rows, time),
        live_logps=logps,
        old_logps=logps + 0.3 * torch.randn(rows, time, generator=draw),
        entropies=2 * torch.rand(rows, time, generator=draw),
        mask=(torch.arange(time) < lengths).long(),
        progress=0.5,
        generator=torch.Generator().manual_seed(seed),
    )


# -- of completions --------------------------------------------------------------------------------


def test_perplexity_by_hand():
    """Group one: log-perplexities 1, 2, 3, 4, mean 2.5 and standard deviation sqrt(1.25). Group
    two: a completion without a counted token stands outside, 1 and 3 are one deviation away."""
    group = completions(
        [0.0] * 8,
        advantages=[1.0, -1.0, 2.0, 0.0, 1.0, 1.0, 1.0, -1.0],
        log_perplexity=[1.0, 2.0, 3.0, 4.0, 1.0, 3.0, math.nan, 2.0],
    )
    w = [-1.5 / 1.25**0.5, -0.5 / 1.25**0.5, 0.5 / 1.25**0.5, 1.5 / 1.25**0.5]
    s = (2 / 3) ** 0.5  # deviations -1, 1 and 0
    w += [-1 / s, 1 / s, 0.0, 0.0]
    for alpha in (0.01, -0.5):
        expected = group.advantages * (1 - alpha * torch.tensor(w))
        torch.testing.assert_close(PerplexityAdvantage(alpha).shape(group), expected)


def test_negative_samples_by_hand():
    group = completions([1.0, 0.0, math.nan, 1.0, 0.0, 0.0, 0.0, 0.0])
    found = NegativeSamples(0.1).shape(group)
    expected = torch.tensor([0.1, -1.0, 0.0, 0.1, -1.0, -1.0, -1.0, -1.0])
    torch.testing.assert_close(found, expected)
    assert NegativeSamples(0.0).shape(group)[0] == 0, "NSR"


def test_bnpo_in_closed_form_and_by_scipy():
    """Shares 1/4, 1/2 and 3/4 have mean 1/2 and variance 1/16, so a and b are 3/2 and both
    parameters too: f(p) is 8/pi sqrt(p(1 - p)), and BNPO is GRPO up to a factor."""
    rewards = [1.0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0]
    r = torch.tensor(rewards).view(3, 4)
    p = r.mean(1, keepdim=True)
    expected = (r - p) * math.pi / (8 * (p * (1 - p)).sqrt())
    shaped = BetaNormalised().shape(completions(rewards))
    torch.testing.assert_close(shaped, expected.flatten())
    scipy_beta = pytest.importorskip("scipy.stats").beta
    shares = np.array([0.125, 0.25, 0.875, 0.125])
    rewards = [1.0 if i < 8 * share else 0.0 for share in shares for i in range(8)]
    fit = shares.mean() * (1 - shares.mean()) / shares.var(ddof=1) - 1
    f = scipy_beta(max(1, 1 + fit * shares.mean() / 3), max(1, 1 + fit * (1 - shares.mean()) / 3))
    shaped = BetaNormalised().shape(completions(rewards, 8)).view(4, 8)
    assert shaped[:, 0].numpy() == pytest.approx((1 - shares) / f.pdf(shares), rel=1e-5)


def test_bnpo_without_a_spread_of_its_groups_subtracts_the_mean():
    alone, alike = [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0] * 2
    for rewards in (alone, alike):
        expected = torch.tensor(rewards) - 0.25
        torch.testing.assert_close(BetaNormalised().shape(completions(rewards)), expected)
    solved = BetaNormalised().shape(completions([1.0] * 4 + [1.0, 0.0, 0.0, 0.0]))
    assert (solved[:4] == 0).all() and solved.isfinite().all()


@pytest.mark.parametrize(("n", "k"), [(4, 2), (4, 4), (6, 3), (8, 4), (8, 5)])
def test_pass_at_k_is_the_mean_advantage_of_the_subsets_that_hold_a_completion(n, k):
    """All subsets of k completions, one by one; groups with every number of correct ones."""
    rewards = [[1.0] * c + [0.0] * (n - c) for c in range(n + 1)]
    found = PassAtK(k).shape(completions([r for group in rewards for r in group], n)).view(-1, n)
    for group, advantages in zip(rewards, found.tolist(), strict=True):
        subsets = list(itertools.combinations(range(n), k))
        best = np.array([max(group[i] for i in subset) for subset in subsets])
        scaled = (best - best.mean()) / best.std() if best.std() else 0 * best
        for i in range(n):
            holding = [a for a, subset in zip(scaled, subsets, strict=True) if i in subset]
            assert advantages[i] == pytest.approx(np.mean(holding), abs=1e-6)


def test_maxrl_is_the_gradient_of_log_p_in_the_mean():
    """One binary choice with success p: over all draws of a group of 4 the mean gradient is that of
    sum over k <= 4 of -(1 - p)^k/k, log p's series up to the size of the group (its Theorem)."""
    p, n, mean = 0.3, 4, 0.0
    score = {1.0: 1 - p, 0.0: -p}  # d log pi / d logit of the drawn choice
    for draw in itertools.product((1.0, 0.0), repeat=n):
        advantages = MaxRL().shape(completions(list(draw), n)).tolist()
        gradient = np.mean([a * score[r] for a, r in zip(advantages, draw, strict=True)])
        mean += math.prod(p if r else 1 - p for r in draw) * gradient
    by_p = sum((1 - p) ** (k - 1) for k in range(1, n + 1))
    # The baseline takes one term: groups without a right completion have no gradient.
    assert mean == pytest.approx(p * (1 - p) * (by_p - (1 - p) ** (n - 1)), abs=1e-6)
    shaped = MaxRL().shape(completions([1.0, 0.0, math.nan, 0.0, 0.0, 0.0, 0.0, 0.0]))
    assert shaped.tolist() == pytest.approx([2.0, -1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0])


def test_rewards_that_tell_no_right_from_wrong_are_refused():
    for shaper in (NegativeSamples(), PassAtK(), MaxRL(), BetaNormalised()):
        with pytest.raises(SageError, match="gives 0 or 1"):
            shaper.shape(completions([0.5, 1.0, 0.0, 0.0]))
    for shaper in (PassAtK(), BetaNormalised()):
        with pytest.raises(SageError, match="a reward for every completion"):
            shaper.shape(completions([math.nan, 1.0, 0.0, 0.0]))


# -- of tokens -------------------------------------------------------------------------------------

#: sigmoid(7.5), to six figures of what it leaves of 1.
LATE = 1 - 5.52779e-4


def test_position_by_hand():
    """Three tokens, of places 0, 1/2 and 1, and a row of one token, of place 0."""
    batch = tokens([2.0, -1.0, 0.0], mask=[[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
    ramp = [1 - LATE, 0.5, LATE]
    late = PositionBonus(gamma=1.0).shape(batch)
    expected = [[2 + ramp[0], 2 + ramp[1], 2 + ramp[2], 2], [-1 - ramp[0], -1, -1, -1], [0.0] * 4]
    torch.testing.assert_close(late.advantages, torch.tensor(expected))
    assert late.touched.tolist() == [[True] * 3 + [False], [True] + [False] * 3, [False] * 4]
    early = PositionBonus(gamma=0.1, direction=-1).shape(batch)
    assert early.advantages[0, 0] == pytest.approx(2 + 0.1 * ramp[2], abs=1e-6)
    assert early.advantages[0, 2] == pytest.approx(2 + 0.1 * ramp[0], abs=1e-6)


def test_the_position_bonus_acts_in_its_part_of_the_run():
    shaper = PositionBonus(start=0.666, end=0.9)
    for progress, acts in ((0.0, False), (199 / 300, False), (200 / 300, True), (0.9, False)):
        batch = tokens([1.0], mask=[[1, 1]], progress=progress)
        shaped = shaper.shape(batch)
        assert bool(shaped.touched.any()) is acts
        assert torch.equal(shaped.advantages, batch.advantages) is not acts


def test_the_entropy_bonus_by_hand():
    """0.4 x 1 nat; half of 0.5, which is less; 0.4 at an advantage of -2; nothing at one of 0."""
    batch = tokens(
        [1.0, 0.5, -2.0, 0.0], mask=[[1, 0]] * 4, entropies=[[1.0, 1.0]] * 3 + [[3.0, 3]]
    )
    shaped = EntropyBonus().shape(batch)
    assert shaped.advantages[:, 0].tolist() == pytest.approx([1.4, 0.75, -1.6, 0.0])
    assert shaped.advantages[:, 1].tolist() == [1.0, 0.5, -2.0, 0.0], "outside the mask"
    assert shaped.touched.tolist() == [[True, False]] * 3 + [[False, False]]
    steep = EntropyBonus(alpha=100.0).shape(random_tokens())
    assert (steep.advantages.sign() == random_tokens().advantages.sign()).all()
    with pytest.raises(SageError, match="kappa"):
        build_advantage({"name": "entropy", "kappa": 1.0})


def test_repo_r_by_hand():
    """1 - zeta log pi of a right token, 1 + zeta log pi of a wrong one, which keeps its sign."""
    batch = tokens([2.0, -1.0, -1.0, 0.0], mask=[[1, 0]] * 4, live_logps=[[-2.0, -2.0]] * 4)
    shaped = RepoR(zeta=0.1).shape(batch)
    assert shaped.advantages[:, 0].tolist() == pytest.approx([2.4, -0.8, -0.8, 0.0])
    assert shaped.advantages[:, 1].tolist() == [2.0, -1.0, -1.0, 0.0], "outside the mask"
    assert shaped.touched.tolist() == [[True, False]] * 3 + [[False, False]]
    assert RepoR(zeta=5.0).shape(batch).advantages[1, 0] == 0, "not above 0"


def test_repo_r_keeps_entropy_where_the_policy_gradient_loses_it():
    """A choice among four, of which the likelier two are right: the exact gradient's first step."""
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5], dtype=torch.float64, requires_grad=True)
    log_pi = logits.log_softmax(0)
    pi = log_pi.exp().detach()
    advantages = torch.tensor([1.0, 1, 0, 0], dtype=torch.float64) - pi[:2].sum()
    [rise] = torch.autograd.grad(-(log_pi.exp() * log_pi).sum(), logits, retain_graph=True)
    changes = []
    for zeta in (0.0, 0.05, 0.5):
        batch = tokens([0.0] * 4, mask=[[1]] * 4)
        signals = {"advantages": advantages.unsqueeze(1), "live_logps": log_pi.unsqueeze(1)}
        shaped = RepoR(zeta=zeta).shape(dataclasses.replace(batch, **signals)).advantages
        loss = -(pi * shaped.squeeze(1) * log_pi).sum()  # REINFORCE over all four
        [down] = torch.autograd.grad(loss, logits, retain_graph=True)
        changes.append(float(-down @ rise))
    assert changes[0] < changes[1] < changes[2]


def test_the_position_bonus_as_printed_is_a_constant():
    batch = tokens([1.0], mask=[[1] * 50])
    bonus = PositionBonus(gamma=1.0, shift=-0.5).shape(batch).advantages - 1
    assert bonus.min() > 0.9994 and bonus.max() <= 1


def test_the_parts_of_the_covariance_have_it_as_their_mean():
    batch = random_tokens()
    counted = batch.mask.bool()
    logps, advantages = batch.live_logps[counted].numpy(), batch.advantages[counted].numpy()
    expected = np.cov(logps, advantages, bias=True)[0, 1]
    assert covariance(batch)[counted].mean().item() == pytest.approx(expected, abs=1e-6)


def cov_by_loop(batch):
    """(row, column, covariance) of the counted tokens, without a tensor."""
    rows, width = batch.mask.shape
    places = [(i, t) for i in range(rows) for t in range(width) if batch.mask[i, t]]
    logps = [float(batch.live_logps[p]) for p in places]
    advantages = [float(batch.advantages[p]) for p in places]
    x, y = sum(logps) / len(places), sum(advantages) / len(places)
    parts = [(lp - x) * (a - y) for lp, a in zip(logps, advantages, strict=True)]
    return dict(zip(places, parts, strict=True))


def test_clip_cov_takes_its_share_of_the_tokens_between_the_bounds():
    batch = random_tokens(rows=12)
    parts = cov_by_loop(batch)
    within = {place for place, part in parts.items() if 0.1 <= part <= 1.0}
    count = int(0.1 * len(parts))
    assert 0 < count < len(within) < len(parts)
    seen = set()
    for _ in range(40):  # one stream, so that every draw is another
        shaped = ClipCov(share=0.1, low=0.1, high=1.0).shape(batch)
        chosen = {tuple(place) for place in shaped.touched.nonzero().tolist()}
        assert len(chosen) == count and chosen <= within
        expected = batch.advantages.clone()
        for place in chosen:
            expected[place] = 0
        assert torch.equal(shaped.advantages, expected) and shaped.extra_loss is None
        seen |= chosen
    assert seen == within
    everything = ClipCov(share=1.0, low=0.1, high=1.0).shape(batch).touched
    assert {tuple(place) for place in everything.nonzero().tolist()} == within


def test_kl_cov_holds_the_tokens_of_the_largest_covariance():
    batch = random_tokens()
    parts = cov_by_loop(batch)
    count = int(0.15 * len(parts))
    assert count > 1
    chosen = sorted(parts, key=parts.get, reverse=True)[:count]
    live = batch.live_logps.clone().requires_grad_()
    shaped = KLCov(share=0.15, coef=2.0).shape(dataclasses.replace(batch, live_logps=live))
    assert torch.equal(shaped.advantages, batch.advantages)
    gradient = torch.zeros_like(live)
    distance = torch.zeros_like(live)
    for place in chosen:
        gap = float(batch.live_logps[place] - batch.old_logps[place])
        distance[place], gradient[place] = 2 * abs(gap), 2 * math.copysign(1, gap)
    torch.testing.assert_close(shaped.extra_loss.detach(), distance)
    shaped.extra_loss.sum().backward()
    torch.testing.assert_close(live.grad, gradient)
    assert torch.equal(shaped.touched, gradient != 0)


# -- refusals --------------------------------------------------------------------------------------

#: What shapers read of a trainer in which each works, its ``args`` apart.
USABLE = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "shaped_at_scoring": False,
    "num_generations": 8,
    "num_iterations": 1,
    "resampling": 0,
    "accelerator": SimpleNamespace(num_processes=1),
}
ARGS = {
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
}
OF_COMPLETIONS = ("perplexity", "negative_samples", "pass_at_k", "maxrl")
OF_TOKENS = ("position", "clip_cov", "kl_cov", "entropy", "repo_r")


@pytest.mark.parametrize(
    ("names", "change", "reason"),
    [
        (
            (*OF_COMPLETIONS, "beta_normalised"),
            {"per_device_train_batch_size": 6},
            "whole groups on every process",
        ),
        (("pass_at_k",), {"num_generations": 4}, "pass@4 needs num_generations above 4, not 4"),
        (("beta_normalised",), {"resampling": 2}, "no dynamic_sampling"),
        (("beta_normalised",), {"accelerator": SimpleNamespace(num_processes=2)}, "one process"),
        (OF_TOKENS, {"shaped_at_scoring": True}, "use plain TRL"),
        (OF_TOKENS, {"importance_sampling_level": "sequence"}, "level token"),
        (OF_TOKENS, {"loss_type": "luspo"}, "loss_type grpo"),
        (OF_TOKENS, {"off_policy_mask_threshold": 0.5}, "no off_policy_mask"),
        (("kl_cov",), {"gradient_accumulation_steps": 2}, "more updates a batch"),
    ],
)
def test_a_setting_in_which_a_shaper_cannot_work_is_refused_with_its_reason(names, change, reason):
    def trainer(**more):
        args = SimpleNamespace(**{key: more.get(key, value) for key, value in ARGS.items()})
        return SimpleNamespace(args=args, **USABLE | {k: more[k] for k in USABLE.keys() & more})

    for name, shaper in ADVANTAGES.items():
        assert list(shaper().requires(trainer())) == []
        found = list(shaper().requires(trainer(**change)))
        assert len(found) == (name in names) and all(reason in sentence for sentence in found)


# -- choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "maxrl"])  # has none
def test_every_shaper_is_built_by_its_name_and_parameters(name):
    field, *_ = dataclasses.fields(ADVANTAGES[name])
    assert build_advantage(name) == build_advantage({"name": name}) == ADVANTAGES[name]()
    built = build_advantage({"name": name, field.name: field.default})
    assert built == ADVANTAGES[name]() and build_advantage(built) is built


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("ppl", "mine: there is no advantage 'ppl'; choose one of perplexity, position"),
        ({"alpha": 1}, "mine: there is no advantage None; choose one of perplexity"),
        ({"name": "position", "beta": 1}, "mine: beta is unknown; choose one of gamma"),
        ({"name": "position", "start": 0.9, "end": 0.1}, "0 <= start < end <= 1"),
        ({"name": "position", "direction": 0}, "mine: direction: .*, not 0"),
        ({"name": "position", "start": 0.9, "end": 0.1}, "0 <= start < end <= 1"),
        ({"name": "pass_at_k", "k": 2.5}, "mine: k: .*, not 2.5"),
        ({"name": "kl_cov", "share": -1}, "mine: share: .*, not -1"),
        ({"name": "clip_cov", "low": 5.0, "high": 1.0}, r"mine: covariances lie in \[low, high\]"),
        ({"name": "beta_normalised", "limit": float("inf")}, "mine: limit: .* finite number"),
    ],
)
def test_what_no_advantage_can_have_is_one_sentence(choice, reason):
    with pytest.raises(SageError, match=reason):
        build_advantage(choice, "mine")
