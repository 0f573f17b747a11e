"""Log-probabilities and entropies from logits, against torch's own and one token at a time."""

import ast
import math
import re

import pytest
import torch
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM

from sage_lib import paths
from sage_lib.algorithm import token_probabilities
from sage_lib.algorithm.token_probabilities import (
    completion_logits,
    completion_logits_and_hidden,
    drawn_log_probabilities,
    entropies,
    entropies_of,
    log_probabilities,
)


def random_logits(*shape: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("temperature", [1, 1.0, 0.7, 1.3])
@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 7, 20), (8, 33, 47), (2, 5, 49_152)])
def test_entropies_are_those_of_categorical_to_the_last_bit(shape, temperature):
    """A guide's threshold comes from them, and through it the weights of every guided run."""
    logits = random_logits(*shape)
    inside = random_logits(shape[0], shape[1] + 4, shape[2])[:, 3:-1]  # as a completion's are
    for given in (logits, inside, logits.bfloat16()):
        expected = Categorical(logits=given.float() / temperature).entropy()
        assert torch.equal(entropies(given, temperature), expected)


@pytest.mark.parametrize("shape", [(8, 33, 47), (2, 5, 151_936)])
def test_entropies_of_log_probabilities_differ_by_rounding_alone(shape):
    """Both against double precision. A logit has a rounding of its own; and the order in which a
    processor adds n terms moves their sum by as much as grows with the root of n (Higham and Mary
    2019)."""
    logits = random_logits(*shape)
    exact = Categorical(logits=logits.double() / 0.7).entropy()
    largest = (logits / 0.7).abs().amax(-1)
    allowed = torch.finfo(torch.float32).eps * (largest + math.sqrt(shape[-1]) * exact)
    for found in (entropies(logits, 0.7), entropies_of(log_probabilities(logits, 0.7))):
        assert found.dtype == torch.float32
        assert ((found - exact).abs() < allowed).all()


def test_numbers_by_hand():
    logits = torch.tensor([[math.log(8), math.log(4), math.log(4)], [0.0, 0.0, -math.inf]])
    log_pi = log_probabilities(logits)
    assert log_pi[0].exp().tolist() == pytest.approx([0.5, 0.25, 0.25])
    drawn = drawn_log_probabilities(log_pi, torch.tensor([2, 0]))
    assert drawn.tolist() == pytest.approx([math.log(0.25), math.log(0.5)])
    assert entropies(logits).tolist() == pytest.approx([1.5 * math.log(2), math.log(2)])
    colder = log_probabilities(logits[0], 0.5).exp()
    assert colder.tolist() == pytest.approx([64 / 96, 16 / 96, 16 / 96])


def test_logits_of_completions_are_those_of_each_state_alone(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    prompts, completion, pad = [[5, 6, 7], [8]], [9, 10, 11, 12], 0
    ids, mask = [], []
    for prompt in prompts:
        padding = 3 - len(prompt)
        ids.append([pad] * padding + prompt + completion)
        mask.append([0] * padding + [1] * (len(prompt) + len(completion)))
    with torch.no_grad():
        found, hidden = completion_logits_and_hidden(
            model, torch.tensor(ids), 3, torch.tensor(mask)
        )
        assert torch.equal(
            completion_logits(model, torch.tensor(ids), 3, torch.tensor(mask)), found
        )
        assert torch.allclose(model.get_output_embeddings()(hidden), found, atol=1e-5)
        assert found.shape == (2, 4, model.config.vocab_size)
        for row, prompt in enumerate(prompts):
            for token in range(4):
                before = torch.tensor([prompt + completion[:token]])
                alone = model(before).logits[0, -1]
                assert torch.allclose(found[row, token], alone, atol=1e-5)
    assert completion_logits(model, torch.tensor(ids[:1]), 3).requires_grad


def test_nothing_else_makes_probabilities_of_logits():
    """Exact trees (theory) have no logits; sampling and scipy's softmax answer other questions."""
    own = token_probabilities.__file__
    makes = re.compile(r"log_softmax|logsumexp|\bCategorical\b|cross_entropy")
    library = paths.ROOT / "sage_lib"
    for path in library.rglob("*.py"):
        if str(path) == own or "theory" in path.relative_to(library).parts:
            continue
        code = ast.parse(path.read_text())
        docstring = ast.get_docstring(code, clean=False) or ""  # the trainer's shows its loss
        text = path.read_text().replace(docstring, "")
        assert not makes.search(text), f"{path.name} has a way of its own"
