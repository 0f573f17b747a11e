"""What is read off a distribution over the next token, against autograd and by hand."""

import numpy as np
import pytest
import torch

from sage_lib.policy import token_signals


def test_gradient_norm_is_that_of_autograd():
    rng = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 5, dtype=torch.float64, generator=rng, requires_grad=True)
    hidden = torch.randn(3, 5, dtype=torch.float64, generator=rng)
    drawn, weight = torch.tensor([0, 6, 2]), torch.tensor([1.5, -0.3, 2.0], dtype=torch.float64)
    logits = hidden @ matrix.T
    expected = []
    for alpha, row, token in zip(weight, logits, drawn, strict=True):
        objective = alpha * row.log_softmax(-1)[token]
        (gradient,) = torch.autograd.grad(objective, matrix, retain_graph=True)
        expected.append(gradient.norm().item())
    logits = logits.detach()
    for given in (logits, logits.log_softmax(-1)):
        found = token_signals.gradient_norm(
            weight.numpy(), given.numpy(), drawn.numpy(), hidden.numpy()
        )
        assert found == pytest.approx(expected)


def test_the_runner_up_is_not_the_drawn_token_even_where_that_is_not_the_likeliest():
    logits = np.array([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    assert token_signals.runner_up(logits, [0, 2]).tolist() == [2, 1]
    assert logits[0, 0] == 3.0, "what is given stays as it was"


def test_perplexity_and_branching_factor_by_hand():
    assert token_signals.perplexity(np.log([0.5, 0.125])) == pytest.approx(4.0)
    assert np.isnan(token_signals.perplexity(np.array([])))
    states = [[0.5, 0.3, 0.15, 0.05], [0.96, 0.02, 0.01, 0.01], [0.25] * 4]
    found = token_signals.branching_factor(torch.tensor(states, dtype=torch.float64))
    assert found.tolist() == [3, 1, 4]


def test_kept_mass_by_hand():
    log_pi = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25] * 4]).log()
    assert token_signals.kept_mass(log_pi, 0.2).tolist() == pytest.approx([0.95, 1.0])
    assert token_signals.kept_mass(log_pi, 0.0).tolist() == pytest.approx([1.0, 1.0])


def test_a_summary_holds_every_token():
    values = np.arange(101) / 100
    found = token_signals.summary(values)
    assert found["tokens"] == sum(found["histogram"]["counts"]) == 101
    assert found["mean"] == pytest.approx(0.5)
    assert found["quantiles"]["0.9"] == pytest.approx(0.9) and found["quantiles"]["1.0"] == 1.0
    assert len(found["histogram"]["edges"]) == token_signals.BINS + 1
