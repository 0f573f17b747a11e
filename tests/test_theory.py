"""The exact theory against optimisers, finite differences, Monte Carlo and random trees."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from sage_lib.algorithm import anchors
from sage_lib.errors import SageError
from sage_lib.theory import estimators, losses, objectives, solutions, two_path
from sage_lib.theory.losses import Loss
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


def test_a_tree_knows_its_states_and_edges():
    tree = Tree((("a", "x"), ("a", "y"), ("b",)))
    assert tree.states == ((), ("a",))
    assert tree.edges == (((), "a"), ((), "b"), (("a",), "x"), (("a",), "y"))
    policy = tree.log_policy(torch.tensor([0.0, np.log(3), 0.0, 0.0], dtype=torch.float64))
    assert tree.completion_probabilities(policy).tolist() == pytest.approx([0.125, 0.125, 0.75])
    assert tree.entropies(policy)[1].item() == pytest.approx(np.log(2))
    with pytest.raises(SageError, match="none of them the beginning"):
        Tree((("a",), ("a", "x")))


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_policies_are_normalised_and_conditionals_invert_the_product(seed):
    tree, log_reference, *_ = instance(seed)
    p = tree.completion_probabilities(log_reference)
    assert p.sum().item() == pytest.approx(1)
    assert torch.allclose(tree.conditionals(p), log_reference)
    of_root = tree.sum_by_state(tree.visits(log_reference))[tree.states.index(())]
    assert of_root.item() == pytest.approx(1)


def test_sums_and_means_by_state():
    tree = Tree((("a", "x"), ("a", "y"), ("b",)))
    values = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)
    assert tree.sum_by_state(values).tolist() == [3, 8]
    assert tree.mean_by_state(values).tolist() == [1.5, 4]


@pytest.mark.parametrize("seed", range(5))
def test_eq_2_and_4_are_where_gradient_ascent_ends(seed):
    tree, log_reference, reward, log_q, beta = instance(seed)
    reference = tree.completion_probabilities(log_reference)
    start = torch.as_tensor(np.random.default_rng(seed).normal(size=len(tree.edges)))
    for guide in (torch.ones_like(reference), solutions.product_guide(tree, log_q)):
        anchor = guide * reference

        def objective(p, anchor=anchor):
            return (p * reward).sum() - beta * solutions.pseudo_kl(p, anchor)

        found = solutions.ascend(tree, objective, start)
        solution = solutions.tilted(reference, reward, beta, guide)
        assert (found - solution).abs().max() < 1e-6


def test_eq_2_by_an_optimiser_that_knows_no_gradient_of_ours():
    tree, log_reference, reward, _, beta = instance(3, depth=2)
    reference = tree.completion_probabilities(log_reference).numpy()

    def softmax(z):
        return np.exp(z - z.max()) / np.exp(z - z.max()).sum()

    def loss(z):
        p = softmax(z)
        return -(p @ reward.numpy() - beta * p @ np.log(p / reference))

    found = softmax(minimize(loss, np.zeros(len(reference)), tol=1e-12).x)
    solution = solutions.tilted(torch.as_tensor(reference), reward, beta).numpy()
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
        assert torch.equal(condition, solutions.support(sage, reward, epsilon))


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


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(0.05, 2))
def test_reweighting_and_separation(seed, beta):
    tree, log_reference, reward, log_q, _ = instance(seed)
    reference = tree.completion_probabilities(log_reference)
    guide = solutions.product_guide(tree, log_q)
    forward, lagrange = solutions.forward_kl(reference, reward, beta)
    sage = solutions.tilted(reference, reward, beta, guide)
    weight = guide * (reward / beta).exp() * (lagrange - reward)
    eq_28 = weight * forward / (weight * forward).sum()
    assert torch.allclose(sage, eq_28), "pi_ref cancels"
    eq_30, eq_32 = solutions.separation(guide, reward, beta, lagrange)
    assert eq_30 or not eq_32, "eq. 32 implies eq. 30"
    if eq_30:
        assert sage[reward == 0].sum() < forward[reward == 0].sum(), "eq. 31"


def test_separation_can_fail_and_then_so_can_its_conclusion():
    reference = torch.tensor([0.5, 0.5], dtype=torch.float64)
    reward = torch.tensor([1.0, 0.0], dtype=torch.float64)
    forward, lagrange = solutions.forward_kl(reference, reward, 2.0)
    guide = torch.tensor([0.6, 1.4], dtype=torch.float64)  # towards the wrong completion
    assert solutions.separation(guide, reward, 2.0, lagrange) == (False, False)
    assert solutions.tilted(reference, reward, 2.0, guide)[1] > forward[1]


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_entropy_bonus_is_optimal_and_keeps_the_order(seed):
    tree, log_reference, reward, _, beta = instance(seed)
    reference = tree.completion_probabilities(log_reference)
    solution = solutions.entropy_bonus(reference, reward, beta, 0.3)

    def objective(p):
        minus_entropy = torch.special.xlogy(p, p).sum()
        divergence = solutions.pseudo_kl(p, reference)
        return (p * reward).sum() - beta * divergence - 0.3 * minus_entropy

    other = torch.as_tensor(np.random.default_rng(seed).dirichlet(np.ones(len(reference))))
    assert objective(solution) >= objective(0.9 * solution + 0.1 * other) - 1e-12
    without = solutions.tilted(reference, reward, beta)
    same_order = torch.equal(solution.argsort(stable=True), without.argsort(stable=True))
    assert same_order, "a temperature has no direction"


def test_detection_probability_is_the_share_of_budgets_that_see_it():
    draws = np.random.default_rng(0).random((20000, 8)) < 0.05
    share = draws.any(1).mean()
    error = np.sqrt(share * (1 - share) / 20000)
    assert solutions.detection_probability(0.05, 8).item() == pytest.approx(share, abs=4 * error)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_expected_gradients_are_those_of_the_divergence_they_claim(seed):
    tree, log_reference, _, log_q, _ = instance(seed)
    logits = torch.as_tensor(np.random.default_rng(seed + 1).normal(size=len(tree.edges)))

    def gradient(estimator):
        return estimators.kl_gradient(tree, estimator, logits, log_reference, log_q)

    reverse = estimators.reverse_kl_gradient(tree, logits, log_reference, log_q)
    forward = estimators.forward_kl_gradient(tree, logits, log_reference, log_q)
    assert torch.allclose(gradient("k2"), reverse)
    assert torch.allclose(gradient("k3_corrected"), reverse)
    assert torch.allclose(gradient("k3"), forward)
    assert gradient("k1_loss").abs().max() < 1e-12, "k1 as a loss has no expected effect"


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


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_corrected"])
def test_sampled_estimators_average_to_the_enumerated_gradient(estimator):
    tree, log_reference, _, log_q, _ = instance(5, depth=2)
    logits = torch.as_tensor(np.random.default_rng(2).normal(size=len(tree.edges)))
    log_pi = tree.log_policy(logits)
    n = 40_000
    rng = torch.Generator().manual_seed(7)
    probabilities = tree.completion_probabilities(log_pi)
    drawn = torch.multinomial(probabilities, n, replacement=True, generator=rng)
    per_completion = []  # the gradient of one completion's tokens, by autograd
    for leaf in range(len(tree.completions)):
        x = logits.clone().requires_grad_()
        lp = tree.log_policy(x)
        terms = estimators.token_terms(estimator, log_reference + log_q - lp, lp)
        per_completion.append(torch.autograd.grad((tree.paths[leaf] * terms).sum(), x)[0])
    samples = torch.stack(per_completion)[drawn]
    enumerated = estimators.kl_gradient(tree, estimator, logits, log_reference, log_q)
    spread = samples.std(0)
    z = (samples.mean(0) - enumerated) / (spread / n**0.5)
    assert z[spread > 0].abs().max() < 4


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_a_guide_of_the_state_alone_scales_plain_k3_and_is_nothing_to_the_corrected_one(seed):
    tree, log_reference, *_ = instance(seed)
    rng = np.random.default_rng(seed)
    logits = torch.as_tensor(rng.normal(size=len(tree.edges)))
    q_of_state = torch.as_tensor(rng.uniform(1.0, 1.4, len(tree.states)))
    log_q = q_of_state.log()[tree.state_of]

    def gradient(estimator, guide):
        return estimators.kl_gradient(tree, estimator, logits, log_reference, guide)

    nothing = torch.zeros_like(log_q)
    assert torch.allclose(gradient("k3_corrected", log_q), gradient("k3_corrected", nothing))
    scaled = q_of_state[tree.state_of] * gradient("k3", nothing)
    assert torch.allclose(gradient("k3", log_q), scaled)


@pytest.mark.parametrize("seed", range(6))
def test_where_each_estimator_leads(seed):
    tree, log_reference, reward, log_q, beta = instance(seed, depth=2)
    reference = tree.completion_probabilities(log_reference)
    eq_4 = solutions.tilted(reference, reward, beta, solutions.product_guide(tree, log_q))

    def distance(estimator):
        found = estimators.fixed_point(tree, estimator, reward, log_reference, beta, log_q)
        return (tree.completion_probabilities(found) - eq_4).abs().max()

    assert distance("sequence") < 1e-8, "eq. 4 is the sequence-level objective's solution"
    assert distance("k3") > 1e-3, "plain k3 leads elsewhere"


def test_on_a_single_choice_the_corrected_estimator_leads_to_eq_4_and_plain_k3_to_eq_27():
    tree = Tree((("a",), ("b",), ("c",)))
    reference = torch.tensor([0.90, 0.08, 0.02], dtype=torch.float64)
    log_reference = reference.log()
    reward = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    beta = 0.5
    k3 = estimators.fixed_point(tree, "k3", reward, log_reference, beta).exp()
    corrected = estimators.fixed_point(tree, "k3_corrected", reward, log_reference, beta).exp()
    assert torch.allclose(corrected, solutions.tilted(reference, reward, beta), atol=1e-9)
    assert torch.allclose(k3, solutions.forward_kl(reference, reward, beta)[0], atol=1e-9)


def test_every_anchor_of_the_trainer_that_estimates_is_among_the_estimators():
    assert set(anchors.ANCHORS) - set(estimators.ESTIMATORS) == {anchors.ForwardKL.name}
    assert set(estimators.TERMS) == set(estimators.ESTIMATORS) - {anchors.Sequence.name}


def test_the_table_of_gradients_says_which_divergence_each_estimator_descends():
    frame = objectives.gradients(range(2), depth=2).set_index(["estimator", "kind"])
    assert len(frame) == len(estimators.ESTIMATORS) * len(objectives.KINDS)
    assert (frame["trees"] == 2).all()
    assert frame.loc["k3", "to_forward"].max() < 1e-9
    assert frame.loc["k3_corrected", "to_reverse"].max() < 1e-9
    effect = frame["guide_effect"].unstack()
    assert (effect["none"] == 0).all()
    assert effect.loc["k3_corrected", "state"] < 1e-9 < effect.loc["k3", "state"]


def test_distances_to_eq_4():
    frame = objectives.distances([0.5], [1, 2], [1.0], [0], kind="state")
    far = frame.set_index(["depth", "estimator"])["distance"]
    assert far[1, "k3_corrected"] < 1e-8 < far[2, "k3_corrected"]
    assert max(far[1, "sequence"], far[2, "sequence"]) < 1e-8
    assert frame["entropy"].between(0, np.log(3)).all()


def test_an_instance_without_a_fixed_point_is_left_out(monkeypatch):
    fixed_point = estimators.fixed_point

    def without_k3(tree, estimator, *given):
        if estimator == "k3":
            raise SageError("no fixed point")
        return fixed_point(tree, estimator, *given)

    monkeypatch.setattr(estimators, "fixed_point", without_k3)
    frame = objectives.distances([0.5], [1], [1.0], [0])
    assert frame["estimator"].tolist() == [n for n in estimators.OFFERED if n != "k3"]


def test_the_ratio_moves_the_rare_completion_as_eq_4_says_or_the_other_way():
    frame = objectives.by_ratio([0, 0.5], 0.5, 1.2, ("rare", "b0", "end"))
    change = frame.iloc[1] - frame.iloc[0]
    assert change["eq. 4"] > 0 > change["k3"]
    assert change["sequence"] == pytest.approx(change["eq. 4"], abs=1e-8)
    assert change["k3_corrected"] == pytest.approx(0, abs=1e-8)
    tree, log_reference, reward = two_path.branch_tree()
    plain = objectives.fixed_points(
        tree, log_reference, reward, 0.5, torch.zeros_like(log_reference)
    )
    row = tree.completions.index(("rare", "b0", "end"))
    assert plain.loc[row, "k3"] == pytest.approx(frame.loc[0, "k3"])


def test_wrong_input_is_refused():
    with pytest.raises(SageError, match="beta must be positive"):
        solutions.tilted(torch.tensor([1.0]), torch.tensor([1.0]), 0.0)
    with pytest.raises(SageError, match="both must be there"):
        solutions.separation(torch.ones(2), torch.ones(2), 1.0, 2.0)
    with pytest.raises(SageError, match="choose one of"):
        estimators.token_terms("k4", torch.zeros(1), torch.zeros(1))
    with pytest.raises(SageError, match="choose one of none, token, state, noise"):
        objectives.log_guide(Tree((("a",), ("b",))), "branch", torch.zeros(2))


# -- the loss that is trained ----------------------------------------------------------------------

#: Completions of 1, 2 and 3 tokens.
UNEQUAL = Tree((("a",), ("b", "c"), ("b", "d", "e"), ("b", "d", "f")))
UNEQUAL_REWARD = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)


def unequal_policies(seed=3):
    rng = np.random.default_rng(seed)
    e = len(UNEQUAL.edges)
    draws = [torch.as_tensor(rng.normal(size=e)) for _ in range(2)]
    log_q = torch.as_tensor(np.log(rng.uniform(0.6, 1.4, e)))
    return UNEQUAL.log_policy(draws[0]), UNEQUAL.log_policy(draws[1]), log_q


def batch_loss(drawn, logits, loss, terms, advantage):
    """One batch as TRL has it: padded tokens, a mask, the reduction that the trainer uses."""
    log_pi = UNEQUAL.log_policy(logits)
    per_token = torch.zeros(len(drawn), 3, dtype=torch.float64)
    mask = torch.zeros_like(per_token)
    for i, y in enumerate(drawn):
        completion = UNEQUAL.completions[y]
        for t in range(len(completion)):
            edge = UNEQUAL.edges.index((completion[:t], completion[t]))
            mask[i, t] = 1
            policy = -advantage[i] * log_pi[edge]
            per_token[i, t] = policy + terms(completion, t, edge, log_pi)
    if loss.normaliser == "sum":
        return (per_token * mask).sum() / len(drawn)
    tokens = mask.sum()
    return anchors.reduce(per_token, mask, loss.normaliser, loss.longest, tokens, 1, 1, 1)


def advantages_of(drawn, loss):
    rewards = UNEQUAL_REWARD[list(drawn)].reshape(-1, loss.group)
    centred = rewards - rewards.mean(1, keepdim=True)
    if loss.scaled:
        centred = centred / (rewards.std(1, keepdim=True) + 1e-4)
    return centred.flatten()


LOSSES = {
    "sum": Loss(group=2, batch=2),
    "grpo": Loss("grpo", 3, batch=3),
    "grpo, not scaled": Loss("grpo", 2, scaled=False, batch=2),
    "dr_grpo": Loss("dr_grpo", 2, scaled=False, batch=2, longest=7),
    "bnpo": Loss("bnpo", 2, batch=2),
    "dapo, two groups": Loss("dapo", 2, batch=4),
    "dapo, two groups, min-p": Loss("dapo", 2, batch=4, min_p=0.4),
}


@pytest.mark.parametrize("estimator", ["k3", "k3_corrected", "sequence"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_expected_update_is_that_of_all_batches_reduced_as_the_trainer_does(name, estimator):
    loss, beta = LOSSES[name], 0.3
    log_policy, log_reference, log_q = unequal_policies()
    drawn_from = log_policy
    if loss.min_p:
        kept = [p >= loss.min_p for p in shares_of_the_best(log_policy)]
        drawn_from = UNEQUAL.log_policy(torch.where(torch.tensor(kept), log_policy, -torch.inf))
        assert not all(kept), "something is cut off"
    probabilities = UNEQUAL.completion_probabilities(drawn_from)
    d = log_reference + log_q - log_policy

    def terms(completion, t, edge, log_pi):
        if estimator == "sequence":  # a credit: the log-ratios from here to the end, a constant
            later = [(completion[:s], completion[s]) for s in range(t, len(completion))]
            credit = sum(d[UNEQUAL.edges.index(e)] for e in later)
            return -beta * credit * log_pi[edge]
        now = log_reference[edge] + log_q[edge] - log_pi[edge]
        weight = (log_pi[edge] - log_policy[edge]).exp() if estimator == "k3_corrected" else 1
        return beta * weight * (now.exp() - now - 1)

    logits = log_policy.clone().requires_grad_()
    expected = torch.zeros_like(logits)
    for drawn in product(range(4), repeat=loss.batch):
        chance = probabilities[list(drawn)].prod()
        if chance > 0:
            value = batch_loss(drawn, logits, loss, terms, advantages_of(drawn, loss))
            expected += chance * torch.autograd.grad(value, logits)[0]
    gain = estimators.reward_gradient(UNEQUAL, log_policy, UNEQUAL_REWARD, loss)
    pull = estimators.kl_gradient(UNEQUAL, estimator, log_policy, log_reference, log_q, loss)
    assert torch.allclose(beta * pull - gain, expected, atol=1e-12)


def shares_of_the_best(log_policy):
    """pi(token)/max pi of its state, per edge, by hand."""
    p = log_policy.exp().tolist()
    best = {}
    for (state, _), value in zip(UNEQUAL.edges, p, strict=True):
        best[state] = max(best.get(state, 0), value)
    return [value / best[state] for (state, _), value in zip(UNEQUAL.edges, p, strict=True)]


def test_the_claims_hold_for_a_sum_and_fail_by_these_numbers_under_one_over_length():
    frame = objectives.claims(range(20), {"sum": Loss(), "grpo": Loss("grpo")})
    frame = frame[frame["unequal"]]
    assert frame["seed"].nunique() == 16
    of_sum = frame[frame["loss"] == "sum"]
    assert of_sum["difference"].max() < 1e-14
    grpo = frame[frame["loss"] == "grpo"].groupby("claim")["difference"].agg(["median", "max"])
    assert grpo.loc["forward"].tolist() == pytest.approx([0.21, 0.58], abs=0.005)
    assert grpo.loc["nothing"].tolist() == pytest.approx([0.012, 0.51], abs=0.005)
    assert grpo.loc["eq. 8", "median"] == pytest.approx(0.09, abs=0.005)


def test_dr_grpo_keeps_every_claim_and_a_larger_batch_comes_near():
    by_name = {
        "dr_grpo": Loss("dr_grpo", longest=12),
        "bnpo": Loss("bnpo", batch=8),
        "dapo": Loss("dapo", batch=64),
    }
    frame = objectives.claims(range(6), by_name)
    worst = frame.groupby(["claim", "loss"])["difference"].max().unstack()
    assert worst["dr_grpo"].max() < 1e-14
    assert (worst["dapo"] < worst["bnpo"] / 4).all() and worst["dapo"].min() > 1e-6


def test_where_lengths_are_equal_every_normaliser_is_the_sum_up_to_a_factor():
    tree, log_reference, reward = objectives.full_tree_instance(0, 2, 3, 1.0)
    log_policy = tree.log_policy(torch.as_tensor(np.random.default_rng(1).normal(size=12)))
    plain = estimators.kl_gradient(tree, "sequence", log_policy, log_reference)
    for normaliser in losses.NORMALISERS[1:]:
        loss = Loss(normaliser, longest=2)
        ours = estimators.kl_gradient(tree, "sequence", log_policy, log_reference, loss=loss)
        assert torch.allclose(ours, plain / 2, atol=1e-14)
        gain = estimators.reward_gradient(tree, log_policy, reward, loss)
        whole = estimators.reward_gradient(tree, log_policy, reward)
        assert torch.allclose(gain, whole / 2, atol=1e-14)


def test_kappa_against_groups_drawn_at_random():
    assert losses.kappa(0.5, 8) == pytest.approx(1.74, abs=0.005)
    assert losses.kappa(0.01, 8) == losses.kappa(0.99, 8) == pytest.approx(2.44, abs=0.005)
    assert losses.kappa(0.3, 8, scaled=False) == pytest.approx(7 / 8)
    rewards = (np.random.default_rng(0).random((200_000, 8)) < 0.3).astype(float)
    spread = rewards.std(1, ddof=1) + 1e-4
    advantage = (rewards[:, 0] - rewards.mean(1)) / spread
    right = rewards[:, 0] == 1
    drawn = advantage[right].mean() - advantage[~right].mean()
    assert losses.kappa(0.3, 8) == pytest.approx(drawn, abs=0.01)


def test_with_groups_eq_4_holds_at_beta_over_kappa_and_not_at_beta():
    frame = objectives.by_groups([0.5], [0, 1], 8)
    assert frame["at_beta_kappa"].max() < 1e-9 < 0.01 < frame["at_beta"].min()
    assert frame["kappa"].between(1.73, 2.48).all()
    # The same of k3, whose rest has no closed form: at beta/kappa without groups.
    tree, log_reference, reward = objectives.full_tree_instance(0, 2, 3, 1.0)
    grouped = Loss(group=8)
    rest = estimators.fixed_point(tree, "k3", reward, log_reference, 0.5, loss=grouped)
    success = float(tree.completion_probabilities(rest) @ reward)
    beta = 0.5 / losses.kappa(success, 8)
    without = estimators.fixed_point(tree, "k3", reward, log_reference, beta)
    assert torch.allclose(rest, without, atol=1e-8)


def test_min_p_takes_what_it_cuts_off():
    frame = objectives.by_truncation([0.01], [1], 0.5).set_index(["seed", "estimator"])
    one = frame.loc[1, "sequence"]
    assert one["cut"] > 0.002 and one["pushed"] > 0.004
    assert one["moved"] == pytest.approx(one["cut"], abs=1e-9)
    assert frame.loc[(1, "k3"), "pushed"] < 1e-12, "nothing is cut there, nothing moves"


def test_where_each_loss_leads_with_the_branch_guide():
    frame = objectives.by_loss({"sum": Loss(), "grpo": Loss("grpo", 8)}, 0.5, 1.2)
    change = frame.set_index(["loss", "estimator"])["change"]
    assert abs(change["sum", "k3_corrected"]) < 1e-6 < 1e-3 < abs(change["grpo", "k3_corrected"])
    assert change["sum", "k3"] < 0 < change["sum", "sequence"]
    guide = np.exp(np.log(1 + 0.3 * (np.log(6) - 1.2)))  # q of the rare way's state
    assert change["sum", "sequence"] == pytest.approx(guide - 1, abs=0.01)


def test_a_loss_that_cannot_be_is_refused():
    with pytest.raises(SageError, match="no normaliser 'mean'"):
        Loss("mean")
    with pytest.raises(SageError, match="at least 2"):
        Loss(group=1)
    with pytest.raises(SageError, match="whole groups"):
        Loss("bnpo", 8, batch=12)
    with pytest.raises(SageError, match="min_p"):
        Loss(min_p=1.0)
    log_policy, *_ = unequal_policies()
    with pytest.raises(SageError, match="rewards of 0 and 1"):
        estimators.reward_gradient(UNEQUAL, log_policy, UNEQUAL_REWARD * 0.5, Loss(group=8))


# -- tokens of probability 0, and the order of the edges -------------------------------------------


def with_a_closed_edge():
    """The unequal tree, ("b", "d") of probability 0, and the tree without it."""
    log_policy, log_reference, log_q = unequal_policies()
    closed = UNEQUAL.edges.index((("b",), "d"))
    policy, reference = (
        UNEQUAL.log_policy(x.index_fill(0, torch.tensor([closed]), -torch.inf))
        for x in (log_policy, log_reference)
    )
    small = Tree((("a",), ("b", "c")))
    kept = [UNEQUAL.edges.index(edge) for edge in small.edges]
    return policy, reference, log_q, small, kept


def test_an_edge_of_probability_0_is_as_if_it_were_not_there():
    policy, reference, _, small, kept = with_a_closed_edge()
    p, ref = (UNEQUAL.completion_probabilities(x) for x in (policy, reference))
    p_small, ref_small = (small.completion_probabilities(x[kept]) for x in (policy, reference))
    assert p[:2].tolist() == p_small.tolist() and p[2:].tolist() == [0, 0]
    state = UNEQUAL.states.index(("b",))
    assert UNEQUAL.entropies(policy)[state] == small.entropies(policy[kept])[1]
    assert UNEQUAL.conditionals(p)[kept].tolist() == pytest.approx(policy[kept].tolist())
    reward = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    for ours, theirs in (
        (solutions.tilted(ref, reward, 0.5), solutions.tilted(ref_small, reward[:2], 0.5)),
        (
            solutions.forward_kl(ref, reward, 0.5)[0],
            solutions.forward_kl(ref_small, reward[:2], 0.5)[0],
        ),
    ):
        assert ours[:2].tolist() == pytest.approx(theirs.tolist()) and ours[2:].tolist() == [0, 0]
    ours, theirs = solutions.pseudo_kl(p, ref), solutions.pseudo_kl(p_small, ref_small)
    assert ours.item() == pytest.approx(theirs.item())
    sure = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert solutions.pseudo_kl(1 - sure, sure) == torch.inf
    assert objectives.log_guide(UNEQUAL, "token", policy).isfinite().all()
    assert two_path.tree_guide(UNEQUAL, policy, 0.1, 0.3).isfinite().all()


@pytest.mark.parametrize("loss", [Loss(), Loss("bnpo", 4, batch=4)], ids=["sum", "bnpo"])
@pytest.mark.parametrize("estimator", estimators.ESTIMATORS)
def test_gradients_and_fixed_points_with_an_edge_of_probability_0(estimator, loss):
    policy, reference, log_q, small, kept = with_a_closed_edge()
    ours = estimators.kl_gradient(UNEQUAL, estimator, policy, reference, log_q, loss)
    few = estimators.kl_gradient(small, estimator, policy[kept], reference[kept], log_q[kept], loss)
    assert ours[kept].tolist() == pytest.approx(few.tolist(), abs=1e-14)
    assert ours.isfinite().all() and ours.abs().sum() == pytest.approx(few.abs().sum().item())
    for gradient in (estimators.reverse_kl_gradient, estimators.forward_kl_gradient):
        ours = gradient(UNEQUAL, policy, reference, log_q, loss)[kept]
        few = gradient(small, policy[kept], reference[kept], log_q[kept], loss)
        assert ours.tolist() == pytest.approx(few.tolist(), abs=1e-14)
    if estimator in estimators.OFFERED:
        rest = estimators.fixed_point(
            UNEQUAL, estimator, UNEQUAL_REWARD, reference, 0.5, log_q, loss
        )
        few = estimators.fixed_point(
            small, estimator, UNEQUAL_REWARD[:2], reference[kept], 0.5, log_q[kept], loss
        )
        assert rest[kept].tolist() == pytest.approx(few.tolist(), abs=1e-8)


def test_ascent_leaves_an_edge_of_probability_0_alone():
    _, reference, *_ = with_a_closed_edge()
    ref = UNEQUAL.completion_probabilities(reference)

    def eq_1(policy):
        return policy @ UNEQUAL_REWARD - 0.5 * solutions.pseudo_kl(policy, ref)

    found = solutions.ascend(UNEQUAL, eq_1, reference)
    assert torch.allclose(found, solutions.tilted(ref, UNEQUAL_REWARD, 0.5), atol=1e-6)


def test_a_divergence_that_is_infinite_is_refused():
    policy, reference, *_ = with_a_closed_edge()
    open_policy = torch.zeros_like(policy)
    with pytest.raises(SageError, match="the divergence is infinite"):
        estimators.kl_gradient(UNEQUAL, "k3", open_policy, reference)
    shut = open_policy.index_fill(0, UNEQUAL.state_of.eq(0).nonzero().flatten(), -torch.inf)
    with pytest.raises(SageError, match="every token after"):
        UNEQUAL.log_policy(shut)


def test_logits_are_given_by_edge_whatever_the_order_of_completions():
    tree = Tree((("z",), ("a", "y"), ("a", "b")))
    chances = {((), "z"): 0.7, ((), "a"): 0.3, (("a",), "y"): 0.9, (("a",), "b"): 0.1}
    policy = tree.log_policy(tree.by_edge(chances).log())
    found = tree.completion_probabilities(policy).tolist()
    assert found == pytest.approx([0.7, 0.27, 0.03])
    assert tree.by_edge({((), "z"): 2.0}, otherwise=-1.0).tolist() == [-1, 2, -1, -1]
    with pytest.raises(SageError, match="no edge"):
        tree.by_edge({((), "q"): 1.0})


def test_a_wrong_number_of_edges_or_completions_is_named():
    right, wrong = torch.zeros(6).double(), torch.zeros(5).double()
    edges = "each of the tree's 6 edges"
    reward = UNEQUAL_REWARD
    for call in (
        lambda: UNEQUAL.log_policy(wrong),
        lambda: UNEQUAL.completion_probabilities(wrong),
        lambda: UNEQUAL.entropies(wrong),
        lambda: UNEQUAL.visits(wrong),
        lambda: solutions.product_guide(UNEQUAL, wrong),
        lambda: estimators.kl_gradient(UNEQUAL, "k3", right, wrong),
        lambda: estimators.kl_gradient(UNEQUAL, "k3", right, right, wrong),
        lambda: estimators.reverse_kl_gradient(UNEQUAL, right, wrong, right),
        lambda: estimators.forward_kl_gradient(UNEQUAL, right, right, wrong),
        lambda: estimators.fixed_point(UNEQUAL, "k3", reward, wrong, 0.5),
        lambda: objectives.log_guide(UNEQUAL, "token", wrong),
    ):
        with pytest.raises(SageError, match=edges):
            call()
    for call in (
        lambda: UNEQUAL.conditionals(reward[:3]),
        lambda: estimators.reward_gradient(UNEQUAL, right, reward[:3]),
        lambda: estimators.fixed_point(UNEQUAL, "k3", reward[:3], right, 0.5),
    ):
        with pytest.raises(SageError, match="each of the tree's 4 completions"):
            call()
