"""Enumeration against brute force over every token sequence of a tiny random Qwen2."""

import itertools

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from sage_lib.policy import enumeration

VOCABULARY, END, LONGEST = 5, 4, 5
PROMPT = [0, 3, 1]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=VOCABULARY, initializer_range=0.3, **sizes, **heads)
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def every(model):
    """Completion -> (log pi of each token, entropy before each token), a forward pass each."""
    found = {}
    for length in range(1, LONGEST + 1):
        for start in itertools.product(range(END), repeat=length - 1):
            ids = (*start, END)
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1]
            pi = logits.double().softmax(-1)
            drawn = pi[range(length), list(ids)].log()
            found[ids] = (drawn, -(pi * pi.log()).sum(-1))
    return found


@pytest.mark.parametrize("floor", [1e-9, 1e-3, 1e-2])
@pytest.mark.parametrize("at_a_time", [3, 1024])  # 3: groups are split, and caches copied
def test_it_finds_exactly_the_completions_above_the_floor(
    model, every, floor, at_a_time, monkeypatch
):
    monkeypatch.setattr(enumeration, "AT_A_TIME", at_a_time)
    found = enumeration.enumerate_completions(model, PROMPT, END, floor, LONGEST)
    wanted = {ids for ids, (logps, _) in every.items() if logps.sum().exp() >= floor}
    assert len(wanted) > 0 and (floor < 1e-4) == (len(wanted) == len(every))
    rows = [tuple(ids[mask].tolist()) for ids, mask in zip(found.ids, found.mask, strict=True)]
    assert len(rows) == len(set(rows)) and set(rows) == wanted
    for row, ids in enumerate(rows):
        logps, entropies = every[ids]
        assert torch.allclose(found.logps[row, : len(ids)].double(), logps, atol=1e-5)
        assert torch.allclose(found.entropies[row, : len(ids)].double(), entropies, atol=1e-5)
        for behind in (found.ids, found.logps, found.entropies):
            assert not behind[row, len(ids) :].any()
    assert (found.probabilities.diff() <= 1e-9).all()
    assert found.probabilities.sum() <= 1 + 1e-6


def test_a_floor_that_nothing_reaches_gives_nothing(model):
    found = enumeration.enumerate_completions(model, PROMPT, END, 0.999, LONGEST)
    assert found.ids.shape[0] == found.probabilities.shape[0] == 0
