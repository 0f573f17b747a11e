"""SageTrainer against stock TRL, against a recomputation in float64, and against faults planted in the seam."""

import pytest
import torch
from datasets import Dataset

from sage_lib import embedded_model, prompts
from sage_lib.errors import SageError
from sage_lib.guides import BranchGuide, IdentityGuide

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def make(tiny_model, tmp_path_factory):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from sage_lib.backend import GRPOConfig, GRPOTrainer
    from sage_lib.trainer import SageTrainer

    rows = [{"prompt": prompts.messages(f"reach {n} from 1 2 3 4"), "answer": str(n)} for n in range(8)]

    def reward(completions, **kwargs):  # any spread will do: how many even-length words
        return [len(c[0]["content"]) % 7 / 7 for c in completions]

    def trainer(guide="stock", lora=True, **settings):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        config = dict(
            output_dir=str(tmp_path_factory.mktemp("run")), per_device_train_batch_size=8, num_generations=4, max_completion_length=8, beta=0.05,
            learning_rate=1e-2, max_steps=3, bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none", logging_steps=1, save_strategy="no",
            use_bias_correction_kl=False, loss_type="grpo", seed=5, disable_tqdm=True, temperature=1.0,
        ) | settings
        arguments = dict(model=model, processing_class=embedded_model.load_tokenizer(tiny_model), reward_funcs=reward,
                         train_dataset=Dataset.from_list(rows), args=GRPOConfig(**config))
        return GRPOTrainer(**arguments) if guide == "stock" else SageTrainer(guide=guide, **arguments)

    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def trained(trainer):
    """Train right after construction, where TRL seeds: another trainer made in between would draw from the same stream."""
    trainer.train()
    return trainer


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("guide", [None, IdentityGuide()])
def test_no_guide_and_the_identity_guide_are_stock_trl_bit_for_bit(make, guide, loss_type):
    stock = trained(make(loss_type=loss_type))
    ours = trained(make(guide, loss_type=loss_type))
    assert losses(stock) == losses(ours)
    assert torch.equal(weights(stock), weights(ours))


def test_a_guide_changes_training(make):
    stock = trained(make())
    guided = trained(make(BranchGuide(threshold=0.5, ratio=0.3)))
    assert not torch.equal(weights(stock), weights(guided))
    first = guided.state.log_history[0]
    assert first["kl_ref"] < 1e-6 < first["kl"] and first["guide/max"] <= 1.4 and 0 < first["guide/acting"] <= 1


@pytest.mark.parametrize("corrected", [False, True])
def test_loss_and_gradient_equal_a_recomputation_in_float64(make, tiny_model, corrected):
    from transformers import AutoModelForCausalLM

    guide = BranchGuide(threshold=1.0, ratio=0.2)
    trainer = make(guide, lora=False, use_bias_correction_kl=corrected)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._prepare_inputs([trainer.train_dataset[i // 4] for i in range(8)])
    before = {k: v.clone() for k, v in batch.items() if torch.is_tensor(v)}
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert all(torch.equal(before[k], batch[k]) for k in before), "the buffered batch is as it was"

    model = AutoModelForCausalLM.from_pretrained(tiny_model).double()
    assert all(torch.equal(a.double(), b) for a, b in zip(trainer.model.parameters(), model.parameters(), strict=True))
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width, mask = batch["completion_ids"].shape[1], batch["completion_mask"].double()
    log_pi = model(input_ids=ids, attention_mask=attention).logits[:, -width - 1: -1].log_softmax(-1)
    logps = log_pi.gather(-1, batch["completion_ids"][..., None])[..., 0]
    entropy = -(log_pi.exp() * log_pi).sum(-1).detach()
    q = (1 + 0.2 * (entropy - 1.0).clamp(min=0)).clamp(0.6, 1.4).masked_fill(mask == 0, 1.0)
    difference = batch["ref_per_token_logps"].double() + q.log() - logps
    k3 = difference.exp() - difference - 1
    ratio = (logps - logps.detach()).exp()
    token = -ratio * batch["advantages"].double()[:, None] + 0.05 * k3 * (ratio if corrected else 1)
    expected = ((token * mask).sum(1) / mask.sum(1)).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    ours = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]).double()
    theirs = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.allclose(ours, theirs, atol=1e-6), (ours - theirs).abs().max()
    assert (q > 1).any() and theirs.abs().max() > 1e-4, "the guide acted and there was something to compare"


def test_no_forward_pass_is_added(make):
    passes = []
    for guide in ("stock", BranchGuide(threshold=0.5)):
        trainer, count = make(guide), [0]
        trainer.model.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        trainer.train()
        passes.append(count[0])
    assert passes[0] == passes[1] > 0


def test_q_stays_fixed_while_a_batch_is_optimised_and_is_refreshed_after(make):
    seen = []

    def guide(inputs):
        seen.append(inputs.progress)
        return IdentityGuide()(inputs)

    trainer = make(guide, num_iterations=2, max_steps=4)
    trainer.train()
    assert len(seen) == 2, "4 updates over 2 batches: one q each"


def test_the_canary_stops_a_run_whose_guide_does_not_reach_the_loss(make, monkeypatch):
    trainer = make(BranchGuide(threshold=0.5, ratio=0.4))
    original = type(trainer)._shape

    def lost(self, batch, logps, entropies):
        reference = batch["ref_per_token_logps"]
        original(self, batch, logps, entropies)
        batch["ref_per_token_logps"] = reference  # as if TRL read the reference somewhere else

    monkeypatch.setattr(type(trainer), "_shape", lost)
    with pytest.raises(SageError, match="did not reach the loss"):
        trainer.train()


def test_a_policy_away_from_its_reference_is_refused(make):
    trainer = make(None)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if "lora_B.default" in name:
                p.add_(1.0)
    with pytest.raises(SageError, match="does not start at its reference"):
        trainer.train()


def test_a_guide_without_an_anchor_is_refused(make):
    with pytest.raises(SageError, match="beta > 0"):
        make(BranchGuide(), beta=0.0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_guide_that_is_not_positive_is_refused(make, value):
    with pytest.raises(SageError, match="positive finite"):
        make(lambda inputs: torch.full_like(inputs.logps, value)).train()


def test_resume_is_bit_for_bit(make, tmp_path):
    def noisy(inputs):
        return (1 + 0.1 * torch.randn(inputs.logps.shape, generator=inputs.generator)).clamp(0.6, 1.4)

    whole = trained(make(noisy, max_steps=4, save_strategy="steps", save_steps=2, output_dir=str(tmp_path)))
    again = make(noisy, max_steps=4, save_strategy="steps", save_steps=2, output_dir=str(tmp_path))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [r["loss"] for r in whole.state.log_history if r["step"] > 2 and "loss" in r] == [r["loss"] for r in again.state.log_history if r["step"] > 2 and "loss" in r]
    assert torch.equal(weights(whole), weights(again))
