"""The fixed point of per-token k3, and what a guide of the state does to the success there."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_lib.theory import estimators, losses, solutions
from sage_lib.theory.losses import Loss
from sage_lib.theory.tree import Tree, random_tree

SEEDS = st.integers(0, 10**6)
BETAS = st.sampled_from([0.05, 0.2, 0.8, 3.0])
LOG_1_4 = float(np.log(1.4))


def instance(seed):
    """A random tree, log pi_ref (E,), a random reward (L,), and the generator for a guide."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    log_reference = tree.log_policy(torch.as_tensor(rng.normal(size=len(tree.edges))))
    reward = torch.as_tensor((rng.random(len(tree.completions)) < 0.4).astype(float))
    return tree, log_reference, reward, rng


def success(tree, log_policy, reward):
    return float(tree.completion_probabilities(log_policy) @ reward)


@settings(max_examples=30, deadline=None)
@given(SEEDS, BETAS)
def test_the_closed_form_is_where_the_expected_update_is_0(seed, beta):
    tree, log_reference, reward, rng = instance(seed)
    log_q = torch.as_tensor(rng.uniform(0.6, 1.4, len(tree.edges))).log()  # a guide of the token
    for guide in (None, log_q):
        rest, values = solutions.k3_fixed_point(tree, reward, log_reference, beta, guide)
        gain = estimators.reward_gradient(tree, rest, reward)
        pull = estimators.kl_gradient(tree, "k3", rest, log_reference, guide)
        assert (gain - beta * pull).abs().max() < 1e-12
        assert tree.sum_by_state(rest.exp()).tolist() == pytest.approx([1] * len(tree.states))
        assert values[0].item() == pytest.approx(success(tree, rest, reward), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(SEEDS, BETAS)
def test_a_guide_of_the_state_of_at_least_1_raises_the_value_of_no_state(seed, beta):
    tree, log_reference, reward, rng = instance(seed)
    log_q = LOG_1_4 * torch.as_tensor(rng.integers(0, 2, len(tree.states)), dtype=torch.float64)
    _, plain = solutions.k3_fixed_point(tree, reward, log_reference, beta)
    _, guided = solutions.k3_fixed_point(tree, reward, log_reference, beta, log_q[tree.state_of])
    assert (guided - plain).max() < 1e-12
    # It falls exactly from where a state with q > 1 comes, whose next values differ.
    value = dict(zip(tree.completions, reward.tolist(), strict=True))
    value |= dict(zip(tree.states, plain.tolist(), strict=True))
    falls = {}
    for number in reversed(range(len(tree.states))):
        state = tree.states[number]
        following = [(*state, token) for before, token in tree.edges if before == state]
        differ = np.ptp([value[node] for node in following]) > 1e-9
        falls[state] = bool(log_q[number] > 0 and differ) or any(map(falls.get, following))
        assert (guided[number] < plain[number] - 1e-12) == falls[state]


def test_a_smaller_q_or_a_guide_of_the_token_can_raise_success():
    tree, log_reference, reward, log_q = (
        Tree((("a",), ("b",))),
        *torch.tensor([[0.5, 0.5], [1.0, 0.0], [LOG_1_4, 0.0]], dtype=torch.float64),
    )
    log_reference = log_reference.log()

    def value(guide):
        _, [found] = solutions.k3_fixed_point(tree, reward, log_reference, 0.5, guide)
        return found.item()

    none = torch.zeros(2, dtype=torch.float64)
    assert value(none + LOG_1_4) < value(none) < value(none - LOG_1_4)
    assert value(none) < value(log_q), "q above 1 on the right token alone"


@pytest.mark.parametrize("seed", [2, 5, 6])
def test_with_group_normalisation_success_falls_as_well(seed):
    tree, log_reference, reward, rng = instance(seed)
    log_q = LOG_1_4 * torch.as_tensor(rng.integers(0, 2, len(tree.states)), dtype=torch.float64)
    grouped, beta, at_rest = Loss(group=8), 0.3, []
    assert log_q.any() and 0 < reward.sum() < len(reward)
    for guide in (None, log_q[tree.state_of]):
        rest = estimators.fixed_point(tree, "k3", reward, log_reference, beta, guide, grouped)
        at_rest.append(success(tree, rest, reward))
        kappa = losses.kappa(at_rest[-1], 8)
        _, values = solutions.k3_fixed_point(tree, reward, log_reference, beta / kappa, guide)
        assert values[0].item() == pytest.approx(at_rest[-1], abs=1e-8)
    assert at_rest[1] < at_rest[0]


def test_divided_by_unequal_lengths_the_same_guide_can_raise_success():
    """The theorem's limit: q > 1 then favours short completions; here the short one is right."""
    end = ("long", "on")
    tree = Tree((("short",), (*end, "right"), (*end, "wrong")))
    chances = {((), "short"): 0.5, ((), "long"): 0.5, (end, "right"): 0.1, (end, "wrong"): 0.9}
    log_reference = tree.by_edge(chances, otherwise=1.0).log()
    reward = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    log_q = tree.by_edge({((), "short"): LOG_1_4, ((), "long"): LOG_1_4})

    def change(loss):
        plain, guided = (
            estimators.fixed_point(tree, "k3", reward, log_reference, 0.8, guide, loss)
            for guide in (None, log_q)
        )
        return success(tree, guided, reward) - success(tree, plain, reward)

    assert change(Loss()) == pytest.approx(-0.0247, abs=5e-5)
    assert change(Loss("dr_grpo", 8, scaled=False, longest=8)) < -0.01
    assert change(Loss("sum", 8)) < -0.01 < 0.006 < change(Loss("grpo", 8))


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.sampled_from([0.2, 0.8]))
def test_without_a_guide_no_kl_of_the_tokens_ends_below_the_reference(seed, beta):
    tree, log_reference, reward, _ = instance(seed)
    start = success(tree, log_reference, reward)
    for estimator in estimators.OFFERED:
        rest = estimators.fixed_point(tree, estimator, reward, log_reference, beta)
        assert success(tree, rest, reward) >= start - 1e-9
