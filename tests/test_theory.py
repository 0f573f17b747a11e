"""The exact theory against an optimiser, finite differences, Monte Carlo and random trees."""

from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from sage_lib.algorithm import kl_forms
from sage_lib.errors import SageError
from sage_lib.theory import estimators, ladder, objectives, optimum, solutions
from sage_lib.theory.tree import Tree, random_tree


def instance(seed, beta=0.5, depth=3, branches=3):
    """A random tree with reference, reward (both outcomes) and log q per edge within the clamp."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, depth, branches)
    log_reference = tree.log_policy(torch.as_tensor(rng.normal(size=len(tree.edges))))
    correct = rng.permutation(len(tree.completions)) % 2 == 0
    reward = torch.as_tensor(correct.astype(float))
    log_q = torch.as_tensor(np.log(rng.uniform(0.6, 1.4, len(tree.edges))))
    return tree, log_reference, reward, log_q, beta


SEEDS = st.integers(0, 10**6)


def divergence(policy, anchor):
    """Eq. 5."""
    return (policy * (policy / anchor).log()).sum()


def test_a_tree_knows_its_states_and_edges():
    tree = Tree((("a", "x"), ("a", "y"), ("b",)))
    assert tree.states == ((), ("a",))
    assert tree.edges == (((), "a"), ((), "b"), (("a",), "x"), (("a",), "y"))
    policy = tree.log_policy(torch.tensor([0.0, np.log(3), 0.0, 0.0], dtype=torch.float64))
    assert tree.completion_probabilities(policy).tolist() == pytest.approx([0.125, 0.125, 0.75])
    assert tree.entropies(policy)[1].item() == pytest.approx(np.log(2))
    assert tree.visits(policy).tolist() == pytest.approx([0.25, 0.75, 0.125, 0.125])
    values = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)
    assert tree.sum_by_state(values).tolist() == [3, 8]
    assert tree.mean_by_state(values).tolist() == [1.5, 4]
    assert tree.log_policy(torch.tensor([1000.0, 0.0, 0.0, 0.0]))[:2].tolist() == [0, -1000]
    for completions in ((("a",), ("a", "x")), (("a",), ("a",)), ()):
        with pytest.raises(SageError, match="distinct completions, none of them the beginning"):
            Tree(completions)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("guided", [False, True], ids=["eq. 2", "eq. 4"])
def test_the_optimum_by_an_optimiser_that_knows_no_gradient_of_ours(seed, guided):
    tree, log_reference, reward, log_q, beta = instance(seed, depth=2)
    reference = tree.completion_probabilities(log_reference)
    guide = solutions.product_guide(tree, log_q) if guided else torch.ones_like(reference)
    anchor = (guide * reference).numpy()

    def softmax(z):
        return np.exp(z - z.max()) / np.exp(z - z.max()).sum()

    def loss(z):
        p = softmax(z)
        return -(p @ reward.numpy() - beta * p @ np.log(p / anchor))

    found = softmax(minimize(loss, np.zeros(len(reference)), tol=1e-12).x)
    solution = solutions.tilted(reference, reward, beta, guide).numpy()
    assert np.abs(found - solution).max() < 1e-5


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(0.05, 5))
def test_eq_24_and_theorem_4_3_and_the_scale_of_q(seed, beta):
    tree, log_reference, reward, log_q, _ = instance(seed)
    reference = tree.completion_probabilities(log_reference)
    guide = solutions.product_guide(tree, log_q)
    rlvr = solutions.tilted(reference, reward, beta)
    sage = solutions.tilted(reference, reward, beta, guide)
    assert torch.allclose(sage, rlvr * guide / (rlvr * guide).sum())
    scaled = solutions.tilted(reference, reward, beta, 7.3 * guide)
    assert torch.allclose(sage, scaled), "q need not be normalised"
    for epsilon in (0.01, 0.05, 0.2):
        condition = solutions.theorem_4_3(rlvr, guide, epsilon) & (reward == 1)
        assert torch.equal(condition, (sage > epsilon) & (reward == 1))


def test_forward_kl_ignores_the_reward_of_what_the_reference_cannot_draw():
    """By hand: beta ref/(L - R) over the two completions left sums to 1."""
    reference = torch.tensor([0.0, 0.4, 0.6], dtype=torch.float64)
    reward = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    solution, lagrange = solutions.forward_kl(reference, reward, 1.0)
    expected = torch.stack(
        [torch.tensor(0.0), 0.4 / (lagrange - reward[1]), 0.6 / torch.tensor(lagrange)]
    )
    assert lagrange > 0.5
    torch.testing.assert_close(solution, expected.double())
    assert float(solution.sum()) == pytest.approx(1)


def test_forward_kl_solution_is_exact_where_the_multiplier_is_close_to_the_reward():
    reference = torch.tensor([1 - 1e-9, 1e-9], dtype=torch.float64)
    reward = torch.tensor([0.0, 1.0], dtype=torch.float64)
    solution, _ = solutions.forward_kl(reference, reward, 0.01)
    # Two completions: beta a/(g+1) + beta b/g = 1 is a quadratic in the gap g.
    beta, a, b = 0.01, 1 - 1e-9, 1e-9
    p = 1 - beta * a - beta * b
    gap = 2 * beta * b / (p + np.sqrt(p**2 + 4 * beta * b))
    assert solution[1].item() == pytest.approx(beta * b / gap, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(0.05, 5))
def test_forward_kl_solution_is_normalised_and_optimal(seed, beta):
    tree, log_reference, reward, *_ = instance(seed)
    reference = tree.completion_probabilities(log_reference)
    solution, lagrange = solutions.forward_kl(reference, reward, beta)
    assert solution.sum().item() == pytest.approx(1)
    assert lagrange > 1

    def objective(p):
        return (p * reward).sum() - beta * (reference * (reference / p).log()).sum()

    rng = np.random.default_rng(seed)
    for _ in range(5):
        other = torch.as_tensor(rng.dirichlet(np.ones(len(reference))))
        assert objective(solution) >= objective(0.9 * solution + 0.1 * other) - 1e-12


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_entropy_bonus_is_optimal_and_keeps_the_order(seed):
    tree, log_reference, reward, _, beta = instance(seed)
    reference = tree.completion_probabilities(log_reference)
    solution = solutions.entropy_bonus(reference, reward, beta, 0.3)

    def objective(p):
        minus_entropy = torch.special.xlogy(p, p).sum()
        return (p * reward).sum() - beta * divergence(p, reference) - 0.3 * minus_entropy

    other = torch.as_tensor(np.random.default_rng(seed).dirichlet(np.ones(len(reference))))
    assert objective(solution) >= objective(0.9 * solution + 0.1 * other) - 1e-12
    without = solutions.tilted(reference, reward, beta)
    same_order = torch.equal(solution.argsort(stable=True), without.argsort(stable=True))
    assert same_order, "a temperature has no direction"


@pytest.mark.parametrize("estimator", estimators.ESTIMATORS)
def test_expected_gradient_equals_finite_differences_of_a_surrogate(estimator):
    tree, log_reference, _, log_q, _ = instance(11, depth=2)
    logits = torch.as_tensor(np.random.default_rng(1).normal(size=len(tree.edges)))
    start = tree.log_policy(logits)
    taken = tree.visits(start)

    def surrogate(x):
        log_pi = tree.log_policy(x)
        d = log_reference + log_q - log_pi
        if estimator == "sequence":
            return -(tree.completion_probabilities(log_pi) * (tree.paths @ d)).sum()
        term = {
            "k1_loss": -d,
            "k2": d**2 / 2,
            "k3": d.exp() - d - 1,
            "k3_corrected": (log_pi - start).exp() * (d.exp() - d - 1),
        }[estimator]
        return (taken * term).sum()

    ours = estimators.kl_gradient(tree, estimator, logits, log_reference, log_q)
    h = 1e-6
    for e in range(len(tree.edges)):
        step = torch.zeros_like(logits)
        step[e] = h
        slope = (surrogate(logits + step) - surrogate(logits - step)) / (2 * h)
        assert ours[e].item() == pytest.approx(slope.item(), abs=1e-7)


def test_every_anchor_of_the_trainer_that_estimates_is_among_the_estimators():
    assert set(kl_forms.KL_FORMS) - set(estimators.ESTIMATORS) == {kl_forms.ForwardKL.name}
    assert set(estimators.TERMS) == set(estimators.ESTIMATORS) - {kl_forms.Sequence.name}


def test_the_table_of_gradients_says_which_divergence_each_estimator_descends():
    frame = objectives.gradients(range(2)).set_index(["estimator", "kind"])
    assert len(frame) == len(estimators.ESTIMATORS) * len(objectives.KINDS)
    assert (frame["trees"] == 2).all()
    assert frame.loc["k3", "to_forward"].max() < 1e-9
    assert frame.loc[["k2", "k3_corrected"], "to_reverse"].max() < 1e-9
    assert (frame.loc["k1_loss", "to_reverse"] > 0.99).all(), "it has no expected effect"
    effect = frame["guide_effect"].unstack()
    assert (effect["none"] == 0).all()
    assert effect.loc["k3_corrected", "state"] < 1e-9
    changes = []  # a guide of the state scales k3 by q
    for seed in range(2):
        tree, *policies = objectives.random_policies(seed)
        q = objectives.log_guide(tree, "state", policies[0]).exp()
        plain = estimators.kl_gradient(tree, "k3", *policies)
        changes.append(float(((q - 1) * plain).norm() / plain.norm()))
    assert effect.loc["k3", "state"] == pytest.approx(max(changes)) and min(changes) < max(changes)


@pytest.mark.parametrize("depth", [1, 2])
def test_bias_corrected_k3_rests_at_eq_4_if_there_is_one_token(depth):
    tree, log_reference, reward = objectives.full_tree_instance(0, depth, 3, 1.0)
    log_q = objectives.log_guide(tree, "token", log_reference)
    reference = tree.completion_probabilities(log_reference)
    eq_4 = solutions.tilted(reference, reward, 0.5, solutions.product_guide(tree, log_q))
    for anchor, there in (("k3_corrected", depth == 1), ("sequence", True), ("k3", False)):
        rest = estimators.fixed_point(tree, anchor, reward, log_reference, 0.5, log_q)
        off = (tree.completion_probabilities(rest) - eq_4).abs().max()
        assert (off < 1e-8) == there, anchor


@pytest.mark.parametrize("beta", [-1.0, 0.0, np.nan])
def test_without_a_kl_term_no_solution_is_made_up(beta):
    tree, log_reference, reward, *_ = instance(2)
    reference = tree.completion_probabilities(log_reference)
    for call in (
        lambda: solutions.tilted(reference, reward, beta),
        lambda: solutions.forward_kl(reference, reward, beta),
        lambda: solutions.k3_fixed_point(tree, reward, log_reference, beta),
        lambda: estimators.fixed_point(tree, "k3", reward, log_reference, beta),
        lambda: optimum.success(0.5, beta),
        lambda: ladder.optimum_success(0.0, beta, 8),
        lambda: ladder.k3_rest(tree, reward, log_reference, beta, 8),
    ):
        with pytest.raises(SageError, match=f"beta must be positive, not {beta}"):
            call()


def test_an_entropy_alone_has_an_optimum_and_neither_has_none():
    """Eq. 21 at beta 0: a softmax of R/lambda."""
    reference, reward = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], dtype=torch.float64)
    found = solutions.entropy_bonus(reference, reward, 0.0, 2.0)
    assert found[0] / found[1] == pytest.approx(np.exp(0.5)) and found[1] == found[2]
    for strength in (0.0, -1.0):
        with pytest.raises(SageError, match=r"beta \+ lambda must be positive"):
            solutions.entropy_bonus(reference, reward, 0.0, strength)


def test_a_guide_of_each_kind_by_hand():
    """Three tokens; and 30 that are as likely, whose entropy is beyond the clamp."""
    tree, wide = Tree.full(1, 3), Tree.full(1, 30)
    log_policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()

    def q(kind, tree=tree, log_policy=log_policy):
        return objectives.log_guide(tree, kind, log_policy).exp()

    assert q("none").tolist() == [1, 1, 1]
    rarity = np.log(5 / 3) / np.log(5 / 2)
    assert q("token").tolist() == pytest.approx([1, 1 + 0.3 * rarity, 1.3]), "the rare ones more"
    entropy = 0.5 * np.log(2) - 0.3 * np.log(0.3) + 0.2 * np.log(5)
    assert q("state").tolist() == pytest.approx([1 + 0.3 * (entropy - 0.7)] * 3)
    assert q("state", wide, wide.log_policy(torch.zeros(30))).tolist() == pytest.approx([1.4] * 30)
    draws = [1 + 0.15 * NormalDist().inv_cdf((i + 0.5) / 64) for i in range(64)]
    np.testing.assert_allclose(q("noise"), np.tile(np.array(draws)[:, None], 3))


def test_the_sharpness_of_a_full_tree_scales_its_logits():
    (tree, one, reward), (_, two, _) = (objectives.full_tree_instance(0, 2, 3, x) for x in (1, 2))
    assert len(tree.completions) == 9 and reward.sum() == 5
    assert torch.allclose(2 * one.view(-1, 3).diff(), two.view(-1, 3).diff())
    assert one.view(-1, 3).diff().abs().min() > 0


def test_a_guide_of_the_token_is_1_where_all_tokens_are_as_likely():
    tree = Tree.full(2, 3)
    uniform = tree.log_policy(torch.zeros(len(tree.edges), dtype=torch.float64))
    assert objectives.log_guide(tree, "token", uniform).tolist() == [0] * len(tree.edges)


def test_wrong_input_is_refused():
    with pytest.raises(SageError, match="choose one of none, token, state, noise"):
        objectives.log_guide(Tree((("a",), ("b",))), "branch", torch.zeros(2))
