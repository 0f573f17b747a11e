"""The exact forward KL in SageTrainer, on models that scale or cap their logits."""

import dataclasses

import pytest
import torch
from trainer_cases import both, larger, losses, make, one_batch, trained, weights

from sage_lib.algorithm import token_probabilities as probs
from sage_lib.algorithm.forward_kl import HiddenStates, require_same
from sage_lib.algorithm.guides import TokenGuide
from sage_lib.algorithm.kl_forms import Vocabulary
from sage_lib.errors import SageError

__all__ = ["make"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """Folders of tiny models of other kinds, with the vocabulary of the tiny one."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    shape = {
        "vocab_size": AutoModelForCausalLM.from_pretrained(tiny_model).config.vocab_size,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    kinds = {
        "gemma2": {"final_logit_softcapping": 3.0},
        "cohere": {"logit_scale": 0.25},
        "granite": {"logits_scaling": 4.0},
        "mixtral": {"num_local_experts": 2, "router_aux_loss_coef": 0.5},
    }

    def saved(kind):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape, **kinds[kind]))
        larger(model)
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        return folder

    return saved


@pytest.mark.parametrize("kind", ["", "gemma2"])
def test_the_forward_kl_below_an_adapter_learns_what_it_does_with_logits_made_twice(
    make, models, tiny_model, monkeypatch, kind
):
    """An adapter leaves the head alone, and the gradient is then taken with the logits."""
    settings = {"kl_form": "forward_kl", "temperature": 0.7, "beta": 1.0, "learning_rate": 0.1}
    settings["base"] = models(kind) if kind else tiny_model
    once = trained(make(None, **settings))
    original = HiddenStates.vocabulary

    def twice(self, batch, temperature):
        found = original(self, batch, temperature)
        assert not found.head_trained
        return dataclasses.replace(found, head_trained=True)

    monkeypatch.setattr(HiddenStates, "vocabulary", twice)
    again = trained(make(None, **settings))
    assert once.state.log_history[2]["kl"] > 1e-4, "there was something to descend"
    assert losses(once) == pytest.approx(losses(again), rel=1e-4, abs=1e-7)
    torch.testing.assert_close(weights(once), weights(again), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite"])
def test_the_forward_kl_is_that_of_the_logits_that_a_model_scales_or_caps(make, models, kind):
    """Against the model's whole forward, which gives the logits that it samples from."""
    from transformers import AutoModelForCausalLM

    made = make(None, lora=False, kl_form="forward_kl", base=models(kind), temperature=0.7)
    reference = AutoModelForCausalLM.from_pretrained(made.model.config._name_or_path)
    trainer, batch = one_batch(made)
    trainer._compute_loss(trainer.model, batch)
    ids, attention, width = both(batch)
    mask, laws = batch["completion_mask"], []
    for m in (trainer.model, reference):
        logits = m(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
        laws.append(torch.distributions.Categorical(logits=logits.double() / 0.7))
    pi, ref = laws
    kl = torch.distributions.kl_divergence(ref, pi)
    expected = ((kl * mask).sum() / mask.sum()).item()
    assert expected > 1e-3, "there was something to compare"
    assert trainer._metrics["train"]["kl"][-1] == pytest.approx(expected, rel=1e-3)


def test_the_canary_leaves_room_for_mixed_precision(make):
    trainer = trained(make(None, kl_form="forward_kl", change=larger, bf16=True, max_steps=2))
    assert trainer.state.log_history[1]["kl"] > 0


@pytest.mark.parametrize("fault", ["cap", "time"])
def test_the_canary_sees_distributions_that_are_not_those_of_the_loss(
    make, models, monkeypatch, fault
):
    made = make(None, lora=False, kl_form="forward_kl", base=models("gemma2"))
    if fault == "cap":  # the output matrix alone, as if nothing came after it
        monkeypatch.setattr(probs, "logits_from_hidden", lambda m: m.get_output_embeddings())
    else:  # the states after each token instead of those before it
        before = HiddenStates.before
        monkeypatch.setattr(HiddenStates, "before", lambda s, time: before(s, time).roll(1, 1))
    with pytest.raises(SageError, match="are not the policy's in TRL's loss"):
        made.train()


@pytest.mark.parametrize("side", ["policy", "reference"])
def test_the_canary_compares_the_counted_tokens_of_the_longest_completion(side):
    """The first row counts nothing, and what stands at its tokens, or at padding, is no matter."""
    noise = torch.Generator().manual_seed(0)
    states = {name: torch.randn(3, 5, 7, generator=noise) for name in ("policy", "reference")}
    ids = torch.randint(7, (3, 5), generator=noise)
    mask = torch.tensor([[0] * 5, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    logps = {
        name: torch.distributions.Categorical(logits=x / 0.7).log_prob(ids)
        for name, x in states.items()
    }

    def compared():
        batch = {"completion_ids": ids, "completion_mask": mask}
        batch["ref_per_token_logps"] = logps["reference"]
        heads = (lambda h: h, lambda h: h)
        v = Vocabulary(states["policy"], states["reference"], *heads, temperature=0.7)
        require_same(v, batch, logps["policy"], half=False)

    logps[side][mask == 0] -= 1.0
    compared()
    logps[side][1, :3] -= torch.tensor([0.0, 0.0, 0.0033])  # 1.1e-3 in the mean of three tokens
    with pytest.raises(SageError, match=f"not the {side}'s in TRL's loss"):
        compared()


def test_the_sequence_anchor_trains_a_mixture_of_experts(make, models):
    """The router's loss is TRL's: the canary counts it in."""
    lora = {"target_modules": ["q_proj"]}
    trainer = trained(make(TokenGuide(), kl_form="sequence", lora=lora, base=models("mixtral")))
    first = trainer.state.log_history[0]
    assert first["aux_loss"] > 0.5, "the term is there"
    assert len(losses(trainer)) == 3


def test_the_exact_forward_kl_keeps_no_hidden_states_beyond_the_loss(make):
    trainer, seen = make(None, kl_form="forward_kl", per_device_eval_batch_size=8), []
    trainer.evaluate(eval_dataset=trainer.train_dataset.select(range(2)))
    assert trainer.states.last is None, "an evaluation keeps none"
    decoder = trainer.model.get_base_model().get_decoder()
    decoder.register_forward_hook(lambda *_: seen.append(trainer.states.last is not None))
    trainer.train()
    # Scoring and loss of 3 steps, and none of the passes of generation.
    assert seen.count(True) == 2 * 3
    assert len(seen) > 6 and trainer.states.last is None
