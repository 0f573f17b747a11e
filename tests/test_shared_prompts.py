"""A prompt that rows have in common is read once, and nothing that follows it changes."""

from contextlib import nullcontext

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from sage_lib.algorithm.shared_prompts import ROOM, RoomyLayer, prompts_read_once

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 40}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
PROMPT, ROWS = 6, 5


def model_of(make=LlamaForCausalLM, config=LlamaConfig, **more):
    torch.manual_seed(0)
    return make(config(**SIZES, **HEADS, **more)).eval()


def batch(prompts=(0, 1, 0, 0, 1)):
    """Rows of 6 columns of prompt, the second prompt padded left, and 4 of completions."""
    torch.manual_seed(1)
    ids = torch.randint(1, 40, (ROWS, PROMPT + 4))
    mask = torch.ones_like(ids)
    for row, number in enumerate(prompts):
        ids[row, :PROMPT] = torch.arange(1, PROMPT + 1) * (number + 1)
        mask[row, : 2 * (number == 1)] = 0
    mask[2, -2:] = 0  # a completion that ends
    return {"input_ids": ids, "attention_mask": mask}


def read_by(model):
    """A list that grows by the token ids of each pass."""
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda m, given, out: seen.append(given[0]))
    return seen


def test_log_probabilities_and_gradients_are_the_same_from_fewer_tokens():
    model, given, found = model_of(), batch(), []
    seen = read_by(model)
    real = given["attention_mask"][:, PROMPT - 1 :] == 1
    for block in (nullcontext(), prompts_read_once(model, PROMPT)):
        model.zero_grad()
        with block:
            logits = model(**given).logits[:, PROMPT - 1 :][real]
        logits.log_softmax(-1)[:, 3].sum().backward()
        found.append((logits, torch.cat([p.grad.flatten() for p in model.parameters()])))
    read = [ids.numel() for ids in seen]
    assert read == [ROWS * (PROMPT + 4), 2 * (PROMPT - 1), ROWS * 5]
    for plain, shared in zip(*found, strict=True):
        torch.testing.assert_close(shared, plain, atol=1e-4, rtol=1e-4)


def test_the_same_is_generated():
    model = model_of()
    given = {name: rows[:, :PROMPT] for name, rows in batch().items()}
    plain = model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)
    seen = read_by(model)
    with prompts_read_once(model):
        shared = model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(plain, shared)
    assert [ids.shape[1] for ids in seen[:3]] == [PROMPT - 1, 1, 1]
    assert len(seen[0]) == 2 and len(seen[1]) == ROWS


def test_keys_with_room_are_those_that_transformers_keeps_and_are_seldom_copied():
    plain, roomy, places = DynamicLayer(), DynamicLayer(), set()
    first = torch.randn(2, 3, 2, 5, 4)
    for layer in (plain, roomy):
        layer.update(*first)
    roomy.__class__ = RoomyLayer
    for columns in [1] * (ROOM + 10) + [3]:
        new = torch.randn(2, 3, 2, columns, 4)
        if columns == 3:  # as many rows, but others, as in a search for beams
            for layer in (plain, roomy):
                layer.reorder_cache(torch.tensor([2, 0, 0]))
        for one, other in zip(plain.update(*new), roomy.update(*new), strict=True):
            assert torch.equal(one, other)
        places.add(roomy.keys.data_ptr())
    assert len(places) == 3, "at the start, when the room is full, and for other rows"


@pytest.mark.parametrize(
    "case",
    ["all differ", "a window", "layers that run again", "inner states", "positions of the width"],
)
def test_a_pass_that_cannot_share_stays_as_it_is(case):
    given, more = batch(range(ROWS) if case == "all differ" else (0, 1, 0, 0, 1)), {}
    if case == "a window":
        model = model_of(Gemma2ForCausalLM, Gemma2Config, head_dim=8, sliding_window=4)
    elif case == "positions of the width":
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
        model = model_of(rope_parameters=rope, max_position_embeddings=4)
    else:
        model = model_of()
    if case == "layers that run again":
        model.gradient_checkpointing_enable()
        model.train()
    if case == "inner states":
        more["output_hidden_states"] = True
    plain = model(**given, **more).logits
    with prompts_read_once(model, PROMPT):
        found = model(**given, **more)
    assert torch.equal(found.logits, plain)


def test_the_hooks_are_gone_after_the_block():
    model = model_of()
    with pytest.raises(ZeroDivisionError), prompts_read_once(model, PROMPT):
        raise ZeroDivisionError
    backbone = model.base_model
    assert not backbone._forward_pre_hooks and not backbone._forward_hooks
