"""Forms of eq. 8's gradient: the whole sum, k2 of it, and the return-to-go, by enumeration."""

import numpy as np
import pytest
import torch
from test_theory import divergence, instance

from sage_lib.algorithm import kl_forms
from sage_lib.theory import estimators, solutions


@pytest.mark.parametrize("seed", range(6))
def test_the_return_to_go_and_the_whole_sum_have_the_gradient_of_eq_8(seed):
    """The trainer's own credit of every completion, beside finite differences of eq. 8."""
    tree, log_reference, _, log_q, _ = instance(seed)
    logits = torch.as_tensor(np.random.default_rng(seed + 1).normal(size=len(tree.edges)))
    index = {edge: i for i, edge in enumerate(tree.edges)}
    padded = torch.zeros(len(tree.completions), int(tree.lengths.max()), dtype=torch.long)
    mask = torch.zeros(padded.shape, dtype=torch.float64)
    for row, completion in enumerate(tree.completions):
        for t, token in enumerate(completion):
            padded[row, t], mask[row, t] = index[completion[:t], token], 1
    log_policy = tree.log_policy(logits)
    probability = tree.completion_probabilities(log_policy)
    taken = log_policy[padded], log_reference[padded], log_q[padded]
    to_go = kl_forms.return_credit(*taken, mask)
    whole = to_go[:, :1].expand_as(to_go)
    own = -(taken[0] - taken[1] - taken[2])

    def gradient(credit):
        free = logits.clone().requires_grad_()
        scores = (tree.log_policy(free)[padded] * credit * mask).sum(1)
        return torch.autograd.grad(probability @ scores, free)[0]

    anchor = solutions.product_guide(tree, log_q) * tree.completion_probabilities(log_reference)

    def eq_8(x):
        policy = tree.completion_probabilities(tree.log_policy(x))
        return -float(divergence(policy, anchor))

    steps = torch.eye(len(logits), dtype=torch.float64) * 1e-6
    slopes = torch.tensor([(eq_8(logits + s) - eq_8(logits - s)) / 2e-6 for s in steps])
    assert torch.allclose(gradient(to_go), slopes.double(), atol=1e-7)
    assert torch.allclose(gradient(whole), gradient(to_go), atol=1e-12)
    assert gradient(whole - to_go).abs().max() < 1e-12, "earlier tokens add nothing"
    assert (gradient(own) - gradient(whole)).abs().max() > 1e-3, "later ones do"
    assert (whole - to_go).abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(6))
def test_k2_as_a_loss_has_the_gradient_of_k1_in_the_reward(seed):
    """Of the whole completion that of eq. 8, of each token that of the token's own k1."""
    tree, log_reference, _, log_q, _ = instance(seed)
    logits = torch.as_tensor(np.random.default_rng(seed + 1).normal(size=len(tree.edges)))
    k1 = tree.log_policy(logits) - log_q - log_reference
    drawn = tree.completion_probabilities(tree.log_policy(logits))
    scores = torch.autograd.functional.jacobian(tree.log_policy, logits)  # (E, E)
    in_reward = (drawn * (tree.paths @ k1)) @ tree.paths @ scores
    of_token = (drawn @ tree.paths * k1) @ scores

    def k2(x):
        moved = tree.log_policy(x) - log_q - log_reference
        return float(drawn @ (tree.paths @ moved) ** 2 / 2)

    steps = torch.eye(len(logits), dtype=torch.float64) * 1e-6
    slopes = torch.tensor([(k2(logits + s) - k2(logits - s)) / 2e-6 for s in steps])
    assert torch.allclose(in_reward, slopes.double(), atol=1e-7)
    eq_8, token = (
        estimators.kl_gradient(tree, name, logits, log_reference, log_q)
        for name in ("sequence", "k2")
    )
    assert torch.allclose(in_reward, eq_8) and torch.allclose(of_token, token)
    assert (eq_8 - token).norm() > 0.01 * eq_8.norm()
