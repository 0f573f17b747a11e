"""The expectations of the loss that is trained, and trees with tokens of probability 0."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sage_lib.algorithm.rollouts import Rollouts
from sage_lib.errors import SageError
from sage_lib.theory import estimators, losses, objectives, solutions, two_path
from sage_lib.theory.losses import Loss
from sage_lib.theory.tree import Tree

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
    trainer = SimpleNamespace(
        loss_type=loss.normaliser,
        max_completion_length=loss.longest,
        accelerator=SimpleNamespace(num_processes=1),
        args=SimpleNamespace(steps_per_generation=1),
        current_gradient_accumulation_steps=1,
    )
    batch = {"completion_mask": mask, "num_items_in_batch": mask.sum()}
    return Rollouts._reduced(trainer, per_token, batch)


def advantages_of(drawn, loss):
    if loss.group is None:
        return UNEQUAL_REWARD[list(drawn)]
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
    "grpo, no groups": Loss("grpo", batch=2),
    "bnpo, no groups": Loss("bnpo", batch=2),
}


@pytest.mark.parametrize("estimator", ["k3", "k3_corrected", "sequence"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_expected_update_is_that_of_all_batches_reduced_as_the_trainer_does(name, estimator):
    loss, beta = LOSSES[name], 0.3
    log_policy, log_reference, log_q = unequal_policies()
    probabilities = UNEQUAL.completion_probabilities(log_policy)
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
        value = batch_loss(drawn, logits, loss, terms, advantages_of(drawn, loss))
        expected += probabilities[list(drawn)].prod() * torch.autograd.grad(value, logits)[0]
    gain = estimators.reward_gradient(UNEQUAL, log_policy, UNEQUAL_REWARD, loss)
    pull = estimators.kl_gradient(UNEQUAL, estimator, log_policy, log_reference, log_q, loss)
    assert torch.allclose(beta * pull - gain, expected, atol=1e-12)


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


def test_kappa_against_groups_drawn_at_random():
    assert losses.kappa(0.5, 8) == pytest.approx(1.74, abs=0.005)
    assert losses.kappa(0.01, 8) == losses.kappa(0.99, 8) == pytest.approx(2.44, abs=0.005)
    rewards = (np.random.default_rng(0).random((200_000, 8)) < 0.3).astype(float)
    spread = rewards.std(1, ddof=1) + 1e-4
    advantage = (rewards[:, 0] - rewards.mean(1)) / spread
    right = rewards[:, 0] == 1
    drawn = advantage[right].mean() - advantage[~right].mean()
    assert losses.kappa(0.3, 8) == pytest.approx(drawn, abs=0.01)


def test_a_loss_that_cannot_be_is_refused():
    for given in (
        {"normaliser": "mean"},
        {"group": 1},
        {"group": 8, "batch": 12},
        {"batch": 0},
        {"longest": 0},
    ):
        with pytest.raises(SageError, match="a loss needs"):
            Loss(**given)
    with pytest.raises(SageError, match="a group needs at least 2 completions, not 1"):
        losses.kappa(0.5, 1)
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
    reward = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    ours, theirs = solutions.tilted(ref, reward, 0.5), solutions.tilted(ref_small, reward[:2], 0.5)
    assert ours[:2].tolist() == pytest.approx(theirs.tolist()) and ours[2:].tolist() == [0, 0]
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


def test_a_divergence_that_is_infinite_is_refused():
    policy, reference, log_q, *_ = with_a_closed_edge()
    open_policy = torch.zeros_like(policy)
    with pytest.raises(SageError, match="the divergence is infinite"):
        estimators.kl_gradient(UNEQUAL, "k3", open_policy, reference)
    with pytest.raises(SageError, match="the policy has a token that the reference gives prob"):
        estimators.reverse_kl_gradient(UNEQUAL, open_policy, reference, 0 * log_q)
    with pytest.raises(SageError, match="the reference has a token that the policy gives prob"):
        estimators.forward_kl_gradient(UNEQUAL, policy, open_policy, 0 * log_q)
    uniform = UNEQUAL.log_policy(open_policy)
    finite = estimators.reverse_kl_gradient(UNEQUAL, policy, uniform, 0 * log_q)
    assert finite.isfinite().all(), "0 log 0 is 0"
    assert estimators.forward_kl_gradient(UNEQUAL, uniform, reference, 0 * log_q).isfinite().all()
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
        lambda: estimators.reward_gradient(UNEQUAL, right, reward[:3]),
        lambda: estimators.fixed_point(UNEQUAL, "k3", reward[:3], right, 0.5),
    ):
        with pytest.raises(SageError, match="each of the tree's 4 completions"):
            call()
