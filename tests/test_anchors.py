"""The pieces of the anchors against loops and closed forms; what the guide adds against notebook 03's exact trees."""

import numpy as np
import pytest
import torch

from sage_lib.algorithm import anchors
from sage_lib.errors import SageError
from sage_lib.evaluation import expected_gradients
from sage_lib.theory import estimators
from sage_lib.theory.tree import Tree


def test_return_credit_is_minus_the_log_ratio_of_this_and_later_tokens():
    rng = torch.Generator().manual_seed(0)
    logps, reference, log_q = (torch.randn(3, 5, generator=rng) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    credit = anchors.return_credit(logps, reference, log_q, mask)
    for b in range(3):
        for t in range(5):
            assert credit[b, t].item() == pytest.approx(
                -sum(
                    (logps - reference - log_q)[b, s].item() * mask[b, s].item()
                    for s in range(t, 5)
                ),
                abs=1e-5,
            )


def test_exact_forward_kl_in_chunks_is_that_of_torch_distributions(monkeypatch):
    monkeypatch.setattr(anchors, "CHUNK_TOKENS", 8)
    head, reference_head = torch.nn.Linear(6, 11).double(), torch.nn.Linear(6, 11).double()
    hidden, reference_hidden = (
        torch.randn(5, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i in range(2)
    )
    hidden.requires_grad_()
    found = anchors.exact_forward_kl(
        hidden, reference_hidden, head, reference_head, temperature=0.5
    )
    p, q = (
        torch.distributions.Categorical(logits=h(x).float() / 0.5)
        for h, x in ((reference_head, reference_hidden), (head, hidden))
    )
    assert torch.allclose(found, torch.distributions.kl_divergence(p, q), atol=1e-5)
    found.sum().backward()
    assert hidden.grad.abs().max() > 0 and reference_head.weight.grad is None


def test_reduce_refuses_what_it_does_not_know():
    with pytest.raises(SageError, match="loss_type 'cispo'"):
        anchors.reduce(torch.ones(1, 1), torch.ones(1, 1), "cispo", 1, None, 1, 1, 1)


def test_replaced_rows_come_whole_and_padded_on_their_side():
    batch = {
        "prompt_ids": torch.tensor([[0, 1], [2, 3]]),
        "completion_ids": torch.tensor([[4, 5], [6, 0]]),
        "advantages": torch.tensor([0.0, 1.0]),
        "num_items_in_batch": torch.tensor(3),
    }
    fresh = {
        "prompt_ids": torch.tensor([[7, 8, 9]]),
        "completion_ids": torch.tensor([[7]]),
        "advantages": torch.tensor([2.0]),
    }
    merged = anchors.replace_rows(batch, [0], fresh, [0], pad_token=0)
    assert merged["prompt_ids"].tolist() == [[7, 8, 9], [0, 2, 3]] and merged[
        "completion_ids"
    ].tolist() == [[7, 0], [6, 0]]
    assert merged["advantages"].tolist() == [2.0, 1.0] and batch["advantages"].tolist() == [
        0.0,
        1.0,
    ]


@pytest.mark.parametrize("anchor", expected_gradients.ANCHORS)
def test_token_weights_give_the_enumerated_gradients_of_the_trees(anchor):
    """Every completion of a tree as a batch, weighted by its probability: the weights' gradient is estimators.kl_gradient."""
    tree = Tree.full(2, 3)
    rng = np.random.default_rng(3)
    logits, reference = (torch.as_tensor(rng.normal(size=len(tree.edges))) for _ in range(2))
    state_q = torch.as_tensor(rng.uniform(1, 1.4, len(tree.states)))
    log_pi, log_ref, log_q = (
        tree.log_policy(logits),
        tree.log_policy(reference),
        state_q.log()[tree.state_of],
    )
    expected = estimators.kl_gradient(tree, anchor, logits, log_ref, log_q)
    free = logits.clone().requires_grad_()
    live, edges = tree.log_policy(free), {edge: i for i, edge in enumerate(tree.edges)}
    probability, total = tree.completion_probabilities(log_pi), 0.0
    for y, completion in enumerate(tree.completions):
        index = torch.tensor([[[edges[completion[:t], b] for b in "012"] for t in range(2)]])
        drawn = torch.tensor([[int(token) for token in completion]])
        state = log_q[index[..., 0]]
        taken = [x[index].gather(-1, drawn[..., None])[..., 0] for x in (log_pi, log_ref)]
        ratio = taken[0] - taken[1] - state
        later = ratio.flip(1).cumsum(1).flip(1) - ratio
        w = expected_gradients.weights(anchor, log_pi[index], log_ref[index], state, later, drawn)
        total = total + probability[y] * (w * live[index]).sum()
    assert torch.allclose(torch.autograd.grad(total, free)[0], expected, atol=1e-10)


def test_pair_means_of_noise_are_zero_and_of_a_constant_its_square():
    rng = np.random.default_rng(0)
    noise = [expected_gradients.pair_mean(x, x) for x in rng.normal(size=(400, 6, 50))]
    assert abs(np.mean(noise)) < 4 * np.std(noise) / 20
    constant = np.tile(np.arange(3.0), (4, 1))
    assert expected_gradients.pair_mean(constant, constant) == pytest.approx(5.0)
