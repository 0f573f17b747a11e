"""Merged adapters against the adapted model itself, and the weights against their copies."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sage_lib.algorithm import merging
from sage_lib.algorithm.merging import merged_adapters

IDS = torch.arange(24).reshape(2, 12)
#: Of logits, so that no two have the same gradient.
WEIGHTS = torch.linspace(-1, 1, 24).reshape(2, 12, 1)


def adapted(folder, dtype=torch.float32, second=False, **settings):
    """A model with adapters away from zero."""
    torch.manual_seed(0)
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    config = LoraConfig(**(chosen | settings), task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), config)
    if second:
        model.add_adapter("ref", config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_merged_logits_are_those_of_the_adapter_and_every_weight_stays(tiny_model):
    model = adapted(tiny_model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected, stream = logits(model), torch.get_rng_state()
    with merged_adapters(model) as count:
        assert count == 3 and not any("lora_" in name for name, _ in model.named_parameters())
        found = logits(model)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 0.01, "the adapter acts"
    assert (found - expected).abs().max() < 1e-5 and not torch.equal(found, expected)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(model), expected) and torch.equal(stream, torch.get_rng_state())


def test_the_active_one_of_two_adapters_is_merged_and_none_where_they_are_disabled(tiny_model):
    model = adapted(tiny_model, second=True)
    of_each = {}
    for name in ("default", "ref"):
        model.set_adapter(name)
        of_each[name] = logits(model)
        with merged_adapters(model):
            assert (logits(model) - of_each[name]).abs().max() < 1e-5
    assert (of_each["default"] - of_each["ref"]).abs().max() > 0.01
    model.base_model.set_adapter(["default", "ref"])
    both = logits(model)
    with merged_adapters(model):
        assert (logits(model) - both).abs().max() < 1e-5
    with model.disable_adapter():
        bare = logits(model)
        with merged_adapters(model):
            assert torch.equal(logits(model), bare)


@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"dtype": torch.bfloat16}, {"target_modules": ["embed_tokens"]}],
)
def test_what_is_no_product_in_single_precision_stays_as_it_is(tiny_model, settings):
    model = adapted(tiny_model, **settings)
    expected = logits(model)
    with merged_adapters(model) as count:
        assert count == 0 and torch.equal(logits(model), expected)


def test_large_layers_are_merged_for_passes_without_gradients_alone(tiny_model, monkeypatch):
    model = adapted(tiny_model)
    monkeypatch.setattr(merging, "SMALL", 0)
    expected = logits(model)
    with merged_adapters(model) as count:
        assert count == 0 and torch.equal(logits(model), expected)
    with torch.no_grad(), merged_adapters(model) as count:
        assert count == 3 and (logits(model) - expected).abs().max() < 1e-5


def test_layers_of_16_bits_are_merged_where_rounding_is_allowed(tiny_model):
    model = adapted(tiny_model, dtype=torch.bfloat16)
    expected = logits(model).float()
    with model.disable_adapter():
        acts = (logits(model).float() - expected).abs().max()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with merged_adapters(model, rounded=True) as count:
        found = logits(model)
    assert count == 3 and found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < acts / 10, "only roundings apart"
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_hooked_and_merged_layers_stay_and_modules_to_save_keep_their_own_weights(tiny_model):
    model = adapted(tiny_model, modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.add_(0.1)
    expected = logits(model)
    with merged_adapters(model) as count:
        assert count == 3 and (logits(model) - expected).abs().max() < 1e-5
    model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").register_forward_hook(
        lambda module, inputs, output: output + 1
    )
    expected = logits(model)
    with merged_adapters(model) as count:
        assert count == 2 and (logits(model) - expected).abs().max() < 1e-5
    model.merge_adapter()
    with merged_adapters(model) as count:
        assert count == 0


def test_gradients_arrive_at_the_adapter_as_without_merging_and_nowhere_else(tiny_model):
    model = adapted(tiny_model, second=True)
    found = {}
    for merges in (False, True):
        model.zero_grad()
        with merged_adapters(model) if merges else nullcontext():
            (model(input_ids=IDS).logits * WEIGHTS).sum().backward()
        found[merges] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert list(found[True]) == list(found[False]) and len(found[True]) == 6
    assert all("lora_" in name and ".default." in name for name in found[True])
    for name, gradient in found[False].items():
        assert gradient.abs().max() > 1e-3
        assert torch.allclose(found[True][name], gradient, rtol=1e-4, atol=1e-5), name
