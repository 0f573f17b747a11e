"""The proposition of theory.optimum, against enumeration on random trees and simulation."""

import warnings

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind

from sage_lib.errors import SageError
from sage_lib.theory import optimum
from sage_lib.theory.losses import kappa
from sage_lib.theory.solutions import product_guide, tilted
from sage_lib.theory.tree import random_tree


def instance(seed):
    """pi_ref, rewards with both values, and q of each completion of a random tree."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    while len(tree.completions) < 4:
        tree = random_tree(rng)
    edges = len(tree.edges)
    logits = torch.tensor(rng.normal(size=edges))
    reference = tree.completion_probabilities(tree.log_policy(logits))
    reward = torch.zeros(len(reference), dtype=torch.float64)
    reward[rng.permutation(len(reference))[: len(reference) // 2]] = 1
    guide = product_guide(tree, torch.tensor(rng.uniform(np.log(0.6), np.log(1.4), edges)))
    return reference, reward, guide


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("beta", [0.05, 0.2, 1.0])
def test_odds_rise_by_exp_one_over_beta_times_rho(seed, beta):
    reference, reward, guide = instance(seed)
    p = float(reference @ reward)
    log_rho = optimum.log_rho(reference, reward, guide)
    found = tilted(reference, reward, beta, guide)
    np.testing.assert_allclose(optimum.success(p, beta, log_rho), float(found @ reward), rtol=1e-10)
    plain = tilted(reference, reward, beta)
    np.testing.assert_allclose(optimum.success(p, beta), float(plain @ reward), rtol=1e-10)
    # Consequence 2: better than eq. 2 exactly where right completions have the larger mean q.
    assert (found @ reward > plain @ reward) == (log_rho > 0)


def test_a_success_near_0_or_1_is_no_overflow_and_one_kind_of_completion_has_no_ratio():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = optimum.success(0.5, 1.0, [-1000.0, -709.0, 1000.0])
    assert found.tolist() == pytest.approx([0.0, np.exp(-708.0), 1.0], rel=1e-12)
    half = torch.full((2,), 0.5)
    for reward in (torch.ones(2), torch.zeros(2)):
        with pytest.raises(SageError, match="right with wrong completions"):
            optimum.log_rho(half, reward, half)


@pytest.mark.parametrize("seed", range(5))
def test_eq_4_is_right_as_often_as_eq_2_at_a_beta_of_its_own_and_moves_shares_by_q(seed):
    reference, reward, guide = instance(seed)
    right, beta = reward == 1, 0.3
    own = 1 / (1 / beta + optimum.log_rho(reference, reward, guide))
    found, plain = tilted(reference, reward, beta, guide), tilted(reference, reward, own)
    assert own != pytest.approx(beta, rel=1e-3)
    torch.testing.assert_close(found @ reward, plain @ reward, rtol=1e-12, atol=0)
    share = reference[right] / reference[right].sum()
    moved = share * guide[right] / (share @ guide[right])
    torch.testing.assert_close(found[right] / found[right].sum(), moved)
    assert not torch.allclose(moved, share)


@pytest.mark.parametrize("seed", range(5))
def test_with_group_normalisation_kappa_takes_the_place_of_one(seed):
    reference, reward, guide = instance(seed)
    found, factor = reference, 1.0
    for _ in range(200):  # eq. 4 at beta/kappa, kappa that of the policy's own success
        factor = kappa(float(found @ reward), 8)
        found = tilted(reference, reward, 1.0 / factor, guide)
    rho = optimum.log_rho(reference, reward, guide)
    expected = optimum.success(float(reference @ reward), 1.0 / factor, rho)
    np.testing.assert_allclose(float(found @ reward), expected, rtol=1e-9)


def test_guide_gain_finds_log_rho_from_samples_as_often_as_it_says():
    reference, reward, guide = instance(3)
    truth = optimum.log_rho(reference, reward, guide)
    rng = np.random.default_rng(0)
    draws = rng.choice(len(reference), size=(400, 200), p=(reference / reference.sum()).numpy())
    table = optimum.guide_gain(
        reward.numpy()[draws].ravel(),
        guide.log().numpy()[draws].ravel(),
        np.repeat(np.arange(400), 200),
    )
    held = ((table["low"] <= truth) & (truth <= table["high"])).mean()
    assert 0.92 <= held <= 0.98  # 95 %, with 400 tries
    error = table["log_rho"].std() / np.sqrt(len(table))
    assert abs(table["log_rho"].mean() - truth) < 4 * error


def test_the_interval_of_a_guide_gain_is_welchs():
    """That of the means of q over its mean, by scipy."""
    rng = np.random.default_rng(1)
    right, wrong = rng.uniform(0.6, 1.4, 3), rng.uniform(0.6, 1.4, 9)
    q = np.concatenate([right, wrong])
    relative = right / right.mean(), wrong / wrong.mean()
    for level in (0.95, 0.8):
        [row] = optimum.guide_gain([1] * 3 + [0] * 9, np.log(q), ["a"] * 12, level).itertuples()
        low, high = ttest_ind(*relative, equal_var=False).confidence_interval(level)
        expected = np.log(right.mean() / wrong.mean()) + np.array([low, 0.0, high])
        assert [row.low, row.log_rho, row.high] == pytest.approx(expected)
        assert (row.problem, row.samples, row.right) == ("a", 12, 3)


def test_guide_gain_of_a_problem_without_right_samples_is_unknown():
    table = optimum.guide_gain([0, 0, 1, 0, 1], [0.1, 0.2, 0.0, 0.5, 0.0], list("aabbb"))
    assert table["log_rho"].isna().tolist() == [True, False]
    assert table.loc[1, "log_rho"] == pytest.approx(-0.5)
    assert np.isnan(table.loc[1, "low"])  # one wrong sample has no spread
    alike = optimum.guide_gain([0, 0, 1, 1], [0.0] * 4, ["a"] * 4)
    assert alike.loc[0, ["low", "log_rho", "high"]].tolist() == [0, 0, 0], "all q are 1"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (([0, 1], [0.0], ["a", "a"]), "one entry a sample"),
        (([0.5, 1], [0.0, 0.0], ["a", "a"]), "rewards of 0 and 1"),
    ],
)
def test_bad_samples_are_one_sentence(arguments, words):
    with pytest.raises(SageError, match=words):
        optimum.guide_gain(*arguments)


def test_entropies_of_listed_completions_are_those_of_the_tree():
    rng = np.random.default_rng(4)
    tree = random_tree(rng, depth=4, branches=3)
    logits = torch.tensor(rng.normal(size=len(tree.edges)))
    log_policy = tree.log_policy(logits)
    of_state = dict(zip(tree.states, tree.entropies(log_policy).tolist(), strict=True))
    longest = max(map(len, tree.completions))
    ids = np.zeros((len(tree.completions), longest), dtype=int)
    mask, expected = np.zeros_like(ids, dtype=bool), np.zeros(ids.shape)
    for row, completion in enumerate(tree.completions):
        for place, token in enumerate(completion):
            ids[row, place], mask[row, place] = int(token), True
            expected[row, place] = of_state[completion[:place]]
    shuffled = rng.permutation(len(ids))
    policy = tree.completion_probabilities(log_policy).numpy()[shuffled]
    found = optimum.Prefixes(ids[shuffled], mask[shuffled]).entropies(policy)
    np.testing.assert_allclose(found, expected[shuffled], atol=1e-12)
    policy[0] = 0.0  # a completion without mass leaves no NaN
    assert np.isfinite(optimum.Prefixes(ids[shuffled], mask[shuffled]).entropies(policy)).all()
