"""What makes a model quick on a CPU changes nothing that it computes."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from sage_lib.policy import loading

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4}


def model_of(vocabulary, dtype=torch.float32, kind=(LlamaForCausalLM, LlamaConfig), **more):
    torch.manual_seed(0)
    make, config = kind
    more = {"num_key_value_heads": 2, **more}
    made = config(vocab_size=vocabulary, initializer_range=0.3, **SIZES, **HEADS, **more)
    return make(made).to(dtype).eval()


@torch.no_grad()
def test_a_large_output_layer_is_given_whole_inputs_and_gives_the_same():
    ids = torch.arange(24).reshape(3, 8)
    model, given = model_of(40_000), []
    model.lm_head.register_forward_hook(lambda _, inputs, out: given.append(inputs[0]))
    before = model(input_ids=ids, logits_to_keep=2).logits
    assert not given[0].is_contiguous(), "transformers hands on a slice"
    after = loading.quick(model)(input_ids=ids, logits_to_keep=2).logits
    assert given[1].is_contiguous() and torch.allclose(after, before, atol=1e-5)


def test_a_small_output_layer_stays_as_it_is():
    model = loading.quick(model_of(40))
    assert not model.lm_head._forward_pre_hooks


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
@torch.no_grad()
def test_16_bits_and_shared_keys_attend_plainly_to_the_same():
    ids, mask = torch.arange(24).reshape(3, 8), torch.ones(3, 8)
    mask[0, :3] = 0

    def logits(dtype, quick, keys):
        model = model_of(40, dtype, num_key_value_heads=keys)
        model = loading.quick(model) if quick else model
        asked = loading.GROUPED if quick and (dtype == torch.bfloat16 or keys == 2) else "sdpa"
        assert model.config._attn_implementation == asked
        return model(input_ids=ids, attention_mask=mask).logits[mask == 1].float()

    for keys in (2, 4):
        exact = logits(torch.float32, False, keys)
        torch.testing.assert_close(logits(torch.float32, True, keys), exact)
        error, of_fused = ((logits(torch.bfloat16, q, keys) - exact).std() for q in (True, False))
        assert error < 0.02 * exact.std() and error < 2 * of_fused


@pytest.mark.parametrize("cap", [None, 0.5])
@torch.no_grad()
def test_grouped_attention_is_transformers_own_plain_one(cap):
    """With four heads of queries for two of keys; and where a cap leaves it to the model."""
    more = {"head_dim": 8, "attn_logit_softcapping": cap, "sliding_window": 4}
    kind = (Gemma2ForCausalLM, Gemma2Config) if cap else (LlamaForCausalLM, LlamaConfig)
    model = model_of(40, kind=kind, **more if cap else {})
    ids, mask, found = torch.arange(24).reshape(3, 8), torch.ones(3, 8), []
    mask[0, :3] = 0
    for name in ("eager", loading.GROUPED):
        model.set_attn_implementation(name)
        found.append(model(input_ids=ids, attention_mask=mask).logits[mask == 1])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
