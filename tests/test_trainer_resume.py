"""SageTrainer resumed from checkpoints, bit for bit, and what it refuses to go on from."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_cases import LORA, adapters, losses, make, resumed, saved, trained, weights
from transformers import TrainerCallback

from sage_lib.errors import SageError

__all__ = ["make"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore")


def test_resume_is_bit_for_bit(make, tmp_path):
    def noisy(inputs):
        noise = torch.randn(inputs.logps.shape, generator=inputs.generator)
        return (1 + 0.1 * noise).clamp(0.6, 1.4)

    assert resumed(make, tmp_path, 2, noisy, **saved(tmp_path, max_steps=4, save_steps=2))[2]


class Counting:
    """A guide with state: q grows with the number of calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, inputs):
        self.calls += 1
        return torch.full_like(inputs.logps, 1 + 0.05 * self.calls)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_the_state_of_a_guide_is_kept(make, tmp_path):
    settings = saved(tmp_path, max_steps=4, save_steps=2)
    whole, again = trained(make(Counting(), **settings)), make(Counting(), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert whole.guide.calls == again.guide.calls == 4
    assert torch.equal(weights(whole), weights(again))


def test_a_state_that_no_run_could_read_is_refused_as_it_is_saved(make, tmp_path):
    guide = Counting()
    guide.calls = np.float64(0)
    with pytest.raises(SageError, match=r"the guide's state_dict\(\): it may hold tensors"):
        make(guide, **saved(tmp_path, max_steps=2, save_steps=1)).train()


def test_a_resume_goes_on_with_the_fresh_prompts_of_dynamic_sampling(make, tmp_path):
    """Equal rewards all along: each step asks its own prompts, and two times fresh ones."""

    def run(**resumed):
        asked = []

        def told(completions, answer, **_):
            asked.append(answer)
            return [0.0 for _ in completions]

        settings = saved(tmp_path, max_steps=2, save_steps=1, max_completion_length=2)
        make(None, dynamic_sampling=2, reward=told, **settings).train(**resumed)
        return asked

    whole = run()
    assert len(whole) == 2 * 3 and whole[1:3] != whole[4:6]
    assert run(resume_from_checkpoint=str(tmp_path / "checkpoint-1")) == whole[3:]


@pytest.mark.parametrize("step", [3, 4, 9])
def test_a_resume_in_a_later_epoch_goes_on_with_its_prompts(make, tmp_path, step):
    """Eight prompts, two a step: the second epoch begins at the fifth step, with another order than
    the first, which TRL's sampler would give again."""
    asked = []

    def told(completions, answer, **_):
        asked[-1].append(answer)
        return [len(c[0]["content"]) % 7 / 7 for c in completions]

    def run(**resumed):
        asked.append([])
        trainer = make(None, **saved(tmp_path, max_steps=10, save_steps=1, reward=told))
        trainer.train(**resumed)
        return asked[-1], weights(trainer)

    whole, end = run()
    assert whole[:4] != whole[4:8] and sorted(whole[0] + whole[1]) != sorted(whole[4] + whole[5])
    rest, again = run(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert rest == whole[step:]
    assert torch.equal(end, again)


@pytest.mark.parametrize("step", [2, 8])
def test_a_resume_between_draws_of_several_updates_is_bit_for_bit(make, tmp_path, step):
    """Four draws an epoch, two updates each; among the updates of one there is no such resume."""
    apart = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
    settings = saved(tmp_path, max_steps=10, save_steps=1, **apart)
    whole = trained(make(None, **settings))
    for start, same in ((step, True), (step + 1, False)):
        again = make(None, **settings)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{start}"))
        assert (losses(whole)[start:] == losses(again)[start:]) == same
        assert torch.equal(weights(whole), weights(again)) == same


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        ({"save_steps": 6, "steps_per_generation": 4}, 8),
        ({"save_steps": 6, "steps_per_generation": 3, "gradient_accumulation_steps": 2}, 6),
        ({"save_steps": 5, "gradient_accumulation_steps": 2, "num_iterations": 3}, 6),
        ({"save_steps": 0.25, "steps_per_generation": 4, "max_steps": 20}, 8),  # 5, raised
        ({"steps_per_generation": 3}, 501),  # TRL's default, raised
    ],
)
def test_checkpoints_of_a_run_fall_between_draws(settings, every):
    from sage_lib.training.rl import between_draws

    found = between_draws(settings)
    assert found.get("save_steps") == every
    assert {**found, "save_steps": 1} == {**settings, "save_steps": 1}


def test_the_order_of_the_prompts_is_that_of_trl(make):
    stock, ours = (make(guide)._get_train_sampler() for guide in ("stock", None))
    assert len(ours) == len(stock)
    for epoch in range(3):
        ours.epoch = lambda epoch=epoch: epoch
        assert list(ours) == list(stock)


def test_a_merged_adapter_resumes_also_after_it_was_stopped_while_sampling(make, tmp_path):
    settings = saved(tmp_path, max_steps=4, save_steps=2)
    whole = trained(make(None, lora=LORA, merge_adapter=True, **settings))
    keys = set(load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors"))
    assert keys and all("lora_" in key for key in keys)
    stopped = make(None, lora=LORA, merge_adapter=True, **settings)
    before = {name: p.clone() for name, p in stopped.model.named_parameters()}

    def stop(*_):
        raise KeyboardInterrupt

    hook = stopped.model.get_base_model().get_decoder().register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    after = dict(stopped.model.named_parameters())
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    hook.remove()
    again = make(None, lora=LORA, merge_adapter=True, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(again))


@pytest.mark.parametrize("settings", [{}, {"beta": 0.0}, {"lora": False}])
def test_a_resume_on_another_base_model_is_refused(make, tiny_model, tmp_path, settings):
    """Checkpoints hold neither the model below an adapter nor the reference: one weight moved."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "other")
    run = saved(tmp_path, max_steps=2, save_steps=1, **settings)
    assert resumed(make, tmp_path, 1, None, **run)[2]
    folder = str(tmp_path / "checkpoint-1")
    with pytest.raises(SageError, match="base model or reference policy is not the one"):
        make(None, base=tmp_path / "other", **run).train(resume_from_checkpoint=folder)


def test_a_resume_with_another_reference_adapter_is_refused(make, tmp_path):
    """The adapter that TRL calls "ref" comes from the checkpoint: here it was changed there."""
    run, folder = saved(tmp_path, max_steps=2, save_steps=1), tmp_path / "checkpoint-1"
    make(None, **run).train()
    path = folder / "ref" / "adapter_model.safetensors"
    save_file({name: tensor + 1e-3 for name, tensor in load_file(path).items()}, path)
    with pytest.raises(SageError, match="reference policy is not the one"):
        make(None, **run).train(resume_from_checkpoint=str(folder))


def test_a_reference_reset_makes_the_policy_the_reference_and_forgets_the_moments(make):
    trainer = make(None, reference_reset=2, max_steps=4, learning_rate=0.05)
    at = {}

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            policy, reference = adapters(trainer)
            equal = all(torch.equal(a, b) for a, b in zip(policy, reference, strict=True))
            at[state.global_step] = (equal, len(optimizer.state))

    trainer.add_callback(Watch())
    trainer.train()
    assert [at[step][0] for step in range(1, 5)] == [False, True, False, True]
    assert at[1][1] > 0 and at[2][1] == 0 and at[3][1] > 0
    kl = [row["kl_ref"] for row in trainer.state.log_history if "loss" in row]
    assert kl[1] > 1e-4 and kl[2] < 1e-6 < kl[3], "the step after a reset starts at its reference"


def test_a_reference_that_is_reset_is_resumed_where_it_was(make, tmp_path):
    settings = saved(tmp_path, max_steps=6, save_steps=3, reference_reset=2)
    whole, again, same = resumed(make, tmp_path, 3, None, **settings)
    assert same
    for a, b in zip(adapters(whole)[1], adapters(again)[1], strict=True):
        assert torch.equal(a, b)
    never = trained(make(None, **settings | {"reference_reset": 0, "save_strategy": "no"}))
    assert not torch.equal(weights(never), weights(whole))


def test_a_reference_that_moves_is_resumed_where_it_was(make, tmp_path):
    moves = {"lora": False, "sync_ref_model": True, "ref_model_sync_steps": 1}
    settings = saved(tmp_path, max_steps=4, save_steps=2, **moves)
    assert resumed(make, tmp_path, 2, None, **settings)[2]
    (tmp_path / "checkpoint-2" / "sage_reference.pt").unlink()
    with pytest.raises(SageError, match=r"no sage_reference.pt, .*: start a new run"):
        make(None, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
