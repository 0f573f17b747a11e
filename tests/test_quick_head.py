"""What makes a large output layer quick on a CPU changes nothing that it computes."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sage_lib.policy import loading

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


def model_of(vocabulary):
    torch.manual_seed(0)
    made = LlamaConfig(vocab_size=vocabulary, num_attention_heads=4, **SIZES)
    return LlamaForCausalLM(made).eval()


@torch.no_grad()
def test_a_large_output_layer_is_given_whole_inputs_and_gives_the_same():
    ids = torch.arange(24).reshape(3, 8)
    model, given = model_of(40_000), []
    model.lm_head.register_forward_hook(lambda _, inputs, out: given.append(inputs[0]))
    before = model(input_ids=ids, logits_to_keep=2).logits
    assert not given[0].is_contiguous(), "transformers hands on a slice"
    after = loading.with_quick_head(model)(input_ids=ids, logits_to_keep=2).logits
    assert given[1].is_contiguous() and torch.allclose(after, before, atol=1e-5)


def test_a_small_output_layer_stays_as_it_is():
    model = loading.with_quick_head(model_of(40))
    assert not model.lm_head._forward_pre_hooks
