"""SageTrainer on Unsloth's trainer: its own functions of log-probabilities and loss, on a CPU,
with prompts of unequal length, against plain TRL."""

import os

import pytest
import torch
import unsloths
from datasets import Dataset
from trainer_cases import SETTINGS, spread, trained, weights

from sage_lib.algorithm import trainer as trainers
from sage_lib.algorithm import unsloth_first
from sage_lib.algorithm.guides import BranchGuide
from sage_lib.algorithm.unsloth_seam import Packing
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.tasks import prompts

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not unsloth_first.is_installed(), reason="needs Unsloth"),
]

LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
#: Questions of 4 to 8 numbers.
ROWS = [
    {"prompt": prompts.messages(f"reach {n} from {' '.join('123456789'[: 3 + n % 5])}")}
    for n in range(10)
]


def test_its_statistics_are_not_sent():
    assert os.environ["UNSLOTH_DISABLE_STATISTICS"] == "1"


def by_token(inputs):
    """q from 0.7 to 1.3 by the token's id: another one in nearly each place."""
    return torch.where(inputs.mask.bool(), 0.7 + 0.1 * (inputs.ids % 7), 1.0)


@pytest.fixture
def make(tiny_model, tmp_path, monkeypatch):
    from sage_lib.algorithm.backend import GRPOConfig
    from sage_lib.training.models import add_lora, load_model

    def trainer(guide, unsloth, kl_form="k3", lora=True, change=None, more=None, **settings):
        """On Unsloth's functions or on TRL's; ``change``: what happens to the model before."""
        with monkeypatch.context() as patched:
            if unsloth:
                unsloths.patch(monkeypatch)
            patched.setattr(trainers, "REPLACED", unsloth)
            model, tokenizer = load_model(
                load_profile("smoke"), tiny_model, not lora, False, by_unsloth=True
            )
            if lora:
                model = add_lora(model, LORA, 0, False, by_unsloth=True)
            if change is not None:
                change(model)
            config = {**SETTINGS, "output_dir": str(tmp_path), "beta": 0.5}
            return trainers.SageTrainer(
                model=model,
                processing_class=tokenizer,
                reward_funcs=spread,
                train_dataset=Dataset.from_list(ROWS),
                args=GRPOConfig(**config | settings),
                guide=guide,
                kl_form=kl_form,
                **more or {},
            )

    with torch.compiler.set_stance("force_eager"):  # which takes a minute to compile
        yield trainer


def one_batch(trainer):
    """A batch of two prompts of other lengths, as the loss is handed it."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[i] for i in (0, 0, 0, 0, 4, 4, 4, 4)]
    return trainer._prepare_inputs(rows)


def test_the_layout_is_unsloths_own():
    from unsloth_zoo.rl_replacements import create_completion_attention_mask, left_pack_padding

    prompt = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7], [0, 0, 0, 0, 9]])
    completion = torch.tensor([[11, 12, 13, 0], [21, 22, 23, 24], [31, 0, 0, 0]])
    packing = Packing(prompt, completion, 0)
    ids = torch.cat([prompt, completion], 1)
    assert torch.equal(packing.moved(ids), left_pack_padding(ids, 0))
    packed, pads = packing.pack(completion), (prompt == 0).sum(1)
    assert packing.width == packed.shape[1] == 4 + 4
    kept = left_pack_padding(ids, 0)[:, -packing.width :]
    counted = create_completion_attention_mask(kept, pads, packing.padding, 0)
    assert torch.equal(packed * counted, kept * counted), "each token in its column"
    assert torch.equal(counted.sum(1), (completion != 0).sum(1))
    assert torch.equal(packing.unpack(packed), completion)


def test_log_q_lies_where_unsloths_loss_reads_it(make):
    """The loss of one batch again, row by row from the ids: the policy is its reference yet."""
    trainer = make(by_token, unsloth=True)
    batch = one_batch(trainer)
    width = batch["completion_ids"].shape[1]
    most = int((batch["prompt_mask"] == 0).sum(1).max())
    assert most > 0 and batch["ref_per_token_logps"].shape[1] == width + most
    loss = trainer.compute_loss(trainer.model, batch)

    expected = []
    for row in range(8):
        answer = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        q = 0.7 + 0.1 * (answer % 7).double()
        expected.append((-batch["advantages"][row] + 0.5 * (q - q.log() - 1)).mean())
    assert loss.item() == pytest.approx(torch.stack(expected).mean().item(), abs=1e-6)


CASES = {
    "grpo": {},
    "dapo": {"loss_type": "dapo"},
    "two iterations": {"num_iterations": 2, "max_steps": 4},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "all weights": {"lora": False, "learning_rate": 1e-3},
    "bias corrected": {"kl_form": "k3_corrected", "num_iterations": 2, "max_steps": 4},
    "temperature": {"temperature": 0.7},
    "dynamic sampling": {"more": {"dynamic_sampling": 3}},
}


@pytest.mark.parametrize("name", CASES)
def test_training_on_unsloths_functions_ends_where_trls_ends(make, name):
    """And elsewhere than without the guide."""
    plain = trained(make(by_token, unsloth=False, **CASES[name]))
    fast = trained(make(by_token, unsloth=True, **CASES[name]))
    start = weights(make(by_token, unsloth=True, **CASES[name]))
    moved = (weights(plain) - start).abs().max()
    assert (weights(plain) - weights(fast)).abs().max() < 1e-2 * moved
    for a, b in zip(plain.state.log_history, fast.state.log_history, strict=True):
        for key in ("loss", "kl_ref", "guide/mean", "guide/acting"):
            if key in a and key in b:  # at scoring once a draw, and of all its rows together
                assert a[key] == pytest.approx(b[key], abs=5e-3), key


def test_without_a_guide_it_is_grpo_with_the_plain_reference(make):
    plain, fast = (trained(make(None, unsloth=one)) for one in (False, True))
    assert torch.allclose(weights(plain), weights(fast), atol=1e-5)
    guided = trained(make(by_token, unsloth=True))
    assert (weights(guided) - weights(fast)).abs().max() > 1e-3


@pytest.mark.parametrize("half", [False, True])
def test_a_guide_in_the_wrong_columns_stops_the_run(make, monkeypatch, half):
    """As it was: added from the left, though the completions begin elsewhere; or lost."""
    change = (lambda model: model.to(torch.bfloat16)) if half else None
    trainer = make(by_token, unsloth=True, change=change, lora=False)
    pack = Packing.pack

    def lost(self, values):
        return pack(self, values * 0 + values.min())

    monkeypatch.setattr(Packing, "pack", lost)
    with pytest.raises(SageError, match="the KL form did not reach the loss"):
        trainer.train()


def test_another_layout_of_unsloths_is_refused(make, monkeypatch):
    trainer = make(BranchGuide(), unsloth=True)
    monkeypatch.setattr(Packing, "__init__", _of_no_padding)
    with pytest.raises(SageError, match=r"columns, not \d+: use the pinned version"):
        trainer.train()


def _of_no_padding(self, prompt_ids, completion_ids, pad_token):
    self.start, self.width, self.padding = prompt_ids.shape[1], completion_ids.shape[1], 0


def test_a_sampled_token_of_padding_is_not_in_the_kl_to_the_reference(make):
    """Unsloth's loss leaves it out, and keeps 0 as its log-probability."""
    trainer = make(by_token, unsloth=True)
    batch = one_batch(trainer)
    trainer._unpack(batch)
    batch["completion_ids"][0, 1] = trainer.processing_class.pad_token_id
    batch["ref_per_token_logps"] = trainer._policy_signals(batch)[0]
    batch["ref_per_token_logps"][0, 1] = 0.0
    trainer._shape_scored(batch)
    assert trainer._metrics["train"]["kl_ref"][-1] == pytest.approx(0, abs=1e-6)


def test_a_policy_that_does_not_start_at_its_reference_is_stopped_there_too(make):
    def change(model):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn(weight.shape))

    with pytest.raises(SageError, match="does not start at its reference"):
        make(None, unsloth=True, lora=False, change=change).train()
    make(None, unsloth=True, lora=False, change=change, more={"other_reference": True}).train()


def test_forms_that_are_no_reference_are_refused(make):
    with pytest.raises(SageError, match="no KL form 'sequence': use plain TRL"):
        make(BranchGuide(), unsloth=True, kl_form="sequence")
