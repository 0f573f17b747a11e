"""What SageTrainer refuses, and faults planted in the seam."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import IterableDataset
from trainer_cases import larger, losses, make, trained, weights
from transformers import TrainerCallback

from sage_lib.algorithm.guides import BranchGuide, IdentityGuide
from sage_lib.algorithm.kl_forms import KL_FORMS
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile, profile_names
from sage_lib.files import append_line, read_lines
from sage_lib.training.callbacks import Collapse, StepLog

__all__ = ["make"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore")


#: With them TRL's corrected KL has the ratio of the whole completion.
RATIOS = {"importance_sampling_level": "sequence", "use_bias_correction_kl": True}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kl_form": "sequence", "beta": 0.0}, "needs beta > 0"),
        ({"guide": BranchGuide(), "beta": 0.0}, "a guide needs beta > 0"),
        ({"kl_form": "k5"}, "no KL form 'k5'"),
        ({"dynamic_sampling": 2, "scale_rewards": "batch"}, "within their group"),
        (
            {"dynamic_sampling": 2, "multi_objective_aggregation": "normalize_then_sum"},
            "sum_then_normalize",
        ),
        ({"dynamic_sampling": 2, "data": IterableDataset}, "not an IterableDataset"),
        ({"advantage": "ppl"}, "no advantage 'ppl'"),
        ({"advantage": "kl_cov"}, "more updates a batch"),
        ({"reference_reset": 2, "lora": False}, "in place of peft_config, .* set sync_ref_model"),
        ({"reference_reset": 2, "beta": 0.0}, "beta > 0"),
        ({"guide": BranchGuide}, "hand over an instance"),
        ({"beta": -0.1}, r"at least 0, not -0\.1"),
        ({"reference_reset": 0.5}, r"reference_reset is a whole number, 0 or more, not 0\.5"),
        ({"dynamic_sampling": True}, "dynamic_sampling is a whole number, 0 or more, not True"),
        ({"advantage": {"name": "pass_at_k", "k": 4}}, "num_generations above 4, not 4"),
        ({"dynamic_sampling": 2, "advantage": "beta_normalised"}, "and no dynamic_sampling"),
        (RATIOS | {"kl_form": "k3_corrected"}, "which is not the corrected KL"),
        (RATIOS | {"kl_form": None}, "which is not the corrected KL"),
        (RATIOS | {"kl_form": None, "guide": BranchGuide()}, "which is not the corrected KL"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(make, settings, reason):
    with pytest.raises(SageError, match=reason):
        make(**{"guide": None} | settings)


@pytest.mark.parametrize("kl_form", ["k3", "forward_kl"])
def test_the_canary_stops_a_run_whose_anchor_does_not_reach_the_loss(make, monkeypatch, kl_form):
    """Beside the forward KL, TRL's is 0 at the first step whatever it reads: every step is seen."""
    guide = BranchGuide(threshold=0.5, ratio=0.4) if kl_form == "k3" else None
    trainer = make(guide, kl_form=kl_form)
    original = type(trainer)._shape

    def lost(self, passing, logps, entropies):
        reference = passing.batch["ref_per_token_logps"]
        original(self, passing, logps, entropies)
        # as if TRL read the reference somewhere else
        passing.batch["ref_per_token_logps"] = reference

    monkeypatch.setattr(type(trainer), "_shape", lost)
    with pytest.raises(SageError, match="did not reach the loss"):
        trainer.train()
    assert (trainer.state.global_step > 0) == (kl_form == "forward_kl")


def test_a_guide_whose_q_is_no_positive_weight_of_every_token_stops_the_run(make):
    with pytest.raises(SageError, match=r"positive finite.*smallest finite value -1\)"):
        make(lambda inputs: torch.full_like(inputs.logps, -1.0)).train()


def moved(trainer):
    """The trainer with a policy that is no longer its reference."""
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if p.requires_grad and ("lora_B" in name or "lora" not in name):
                p.add_(torch.ones_like(p) if "lora_B" in name else 0.1 * torch.randn_like(p))
    return trainer


@pytest.mark.parametrize("lora", [True, False, {"new": True}])
def test_a_policy_away_from_its_reference_is_refused_unless_it_is_meant(make, lora):
    advice = "does not start at its reference .* other_reference=True"
    with pytest.raises(SageError, match=advice):
        moved(make(None, lora=lora)).train()
    stock = trained(moved(make(lora=lora, max_steps=1)))
    meant = trained(moved(make(None, lora=lora, max_steps=1, other_reference=True)))
    assert meant.state.log_history[0]["kl_ref"] > 1e-3
    assert torch.equal(weights(stock), weights(meant))


@pytest.mark.parametrize("lora", [True, False])
def test_a_reference_of_its_own_is_what_the_anchor_reads(make, tiny_model, lora):
    from transformers import AutoModelForCausalLM

    def other():
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        with torch.no_grad():
            head = model.lm_head.weight
            head.add_(0.2 * torch.sin(torch.arange(head.numel())).view_as(head))
        return model

    def kl(reference):
        trainer = trained(make(None, lora=lora, max_steps=1, ref_model=reference))
        return trainer, trainer.state.log_history[0]["kl_ref"]

    start, nearest = kl(None)
    same, also = kl(AutoModelForCausalLM.from_pretrained(tiny_model))
    moved_away, far = kl(other())
    assert nearest == pytest.approx(also, abs=1e-6) and far > 1e-3 > nearest
    assert not torch.equal(weights(start), weights(moved_away))
    assert torch.allclose(weights(start), weights(same), atol=1e-6)
    with pytest.raises(SageError, match="ref_model needs beta > 0"):
        make(None, kl_form=None, beta=0.0, lora=lora, ref_model=other())
    with pytest.raises(SageError, match="pass guide, too"):
        make(None, guide_model=tiny_model)


def test_a_reference_of_its_own_moves_where_trl_moves_its_own(make, tiny_model):
    moves = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trainer = make(None, lora=False, max_steps=1, ref_model=Path(tiny_model), **moves)
    before = trainer.ref_model.lm_head.weight.clone()
    trainer.train()
    assert not torch.equal(before, trainer.ref_model.lm_head.weight)
    with pytest.raises(SageError, match="an adapter's own reference: leave out ref_model"):
        make(None, reference_reset=2, ref_model=tiny_model)
    with pytest.raises(SageError, match="the policy itself: leave it out"):
        trainer._set_reference(trainer.model)


def test_the_canary_sees_a_lost_credit_of_returns_with_two_updates_of_a_batch(make, monkeypatch):
    guide = BranchGuide(threshold=0.5, ratio=0.4)
    trainer = make(guide, kl_form="sequence", num_iterations=2)
    original = type(trainer)._shape

    def lost(self, passing, logps, entropies):
        advantages = passing.batch["advantages"]
        original(self, passing, logps, entropies)
        passing.batch["advantages"] = advantages

    monkeypatch.setattr(type(trainer), "_shape", lost)
    with pytest.raises(SageError, match="did not reach the loss"):
        trainer.train()


def test_dropout_between_two_updates_of_a_batch_is_no_lost_guide(make):
    noisy = {"init_lora_weights": False, "lora_dropout": 0.5}
    trainer = make(None, kl_form="sequence", lora=noisy, change=larger, num_iterations=2)
    trainer.train()
    assert trainer.reached_loss


def with_dropout(model):
    larger(model)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5


#: Runs whose policy and reference have the same weights and other log-probabilities.
NOISY = {
    "adapter dropout": {
        "lora": {"init_lora_weights": False, "lora_dropout": 0.5},
        "change": larger,
    },
    "attention dropout": {"change": with_dropout},
    "attention dropout, new adapter": {"change": with_dropout, "lora": {"new": True}},
    "NEFTune": {"change": larger, "neftune_noise_alpha": 20.0},
    "bf16 checkpoint": {"lora": False, "half": True, "model_init_kwargs": {"dtype": "float32"}},
    "continuous batching": {
        "lora": False,
        "bf16": True,
        "use_transformers_continuous_batching": True,
    },
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if "batching" in n else []) for n in NOISY],
)
def test_noise_and_precision_do_not_make_another_reference(make, tiny_model, tmp_path, name):
    """A reference of its own has no dropout, and here float32; stock trains all of these."""
    from transformers import AutoModelForCausalLM

    settings = {"max_steps": 1, **NOISY[name]}
    half = settings.pop("half", False)
    if settings.get("lora") is False:
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        larger(model)
        with torch.no_grad():  # and sharp enough for bfloat16 to show beside float32
            model.model.norm.weight.mul_(3)
        model.to(torch.bfloat16 if half else torch.float32).save_pretrained(tmp_path / "base")
        settings["base"] = tmp_path / "base"
    stock, ours = trained(make(**settings)), trained(make(None, **settings))
    assert ours.state.log_history[0]["kl_ref"] > 1e-3, "a KL alone would stop this run"
    assert losses(stock) == losses(ours)
    assert torch.equal(weights(stock), weights(ours))


def test_a_policy_that_scores_as_its_reference_does_may_have_other_weights(make):
    """An adapter that adds next to nothing, beside the model without it, through dropout."""
    trainer = make(None, lora={"new": True}, change=with_dropout, max_steps=1)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p.add_(1e-6 if "lora_B" in name else 0.0)
    assert trained(trainer).state.log_history[0]["kl_ref"] > 1e-3


def test_a_divergence_is_a_collapse_that_leaves_the_weights_as_they_were(make, tmp_path):
    """A gradient of which one part is not a number, from the second step on."""
    trainer, factor = make(guide=None), torch.ones(())

    class Diverge(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            factor.fill_(torch.nan)
            self.kept = weights(trainer)

    diverge = Diverge()
    trainer.add_callback(diverge)
    trainer.add_callback(StepLog(tmp_path / "steps.jsonl"))
    last = [p for p in trainer.model.parameters() if p.requires_grad][-1]
    last.register_hook(lambda gradient: gradient * factor)
    with pytest.raises(Collapse, match="collapsed at step 2: the gradient is not finite") as found:
        trainer.train()
    assert found.value.step == 2 and len(read_lines(tmp_path / "steps.jsonl")) == 1
    assert torch.equal(weights(trainer), diverge.kept) and diverge.kept.isfinite().all()


def test_steps_of_equal_rewards_are_counted_on_through_a_resume(tmp_path):
    """32 were logged when the run was killed, and its checkpoint is that of the 30th."""
    log, state = tmp_path / "steps.jsonl", SimpleNamespace(global_step=30)
    equal = {"frac_reward_zero_std": 1.0}
    for step in range(1, 33):
        append_line(log, {"step": step, **equal})
    callback = StepLog(log)
    callback.on_train_begin(None, state, None)
    with pytest.raises(Collapse, match="collapsed at step 50: every group of the last 50 steps"):
        for state.global_step in range(31, 60):
            callback.on_log(None, state, None, logs=equal)
    assert [row["step"] for row in read_lines(log)] == list(range(1, 51))


def test_steps_between_two_rows_of_a_log_count_as_well(tmp_path):
    callback, state = StepLog(tmp_path / "steps.jsonl"), SimpleNamespace(global_step=0)
    callback.on_train_begin(None, state, None)
    with pytest.raises(Collapse, match="collapsed at step 60"):
        for state.global_step in range(20, 100, 20):  # logging_steps: 20
            callback.on_log(None, state, None, logs={"frac_reward_zero_std": 1.0})


def test_a_spread_of_rewards_begins_the_count_anew_and_steps_follow_earlier_trainers(tmp_path):
    callback, state = StepLog(tmp_path / "steps.jsonl", before=100), SimpleNamespace(global_step=0)
    callback.on_train_begin(None, state, None)
    with pytest.raises(Collapse, match="collapsed at step 190"):
        for state.global_step in range(1, 120):
            share = 0.75 if state.global_step == 40 else 1.0
            callback.on_log(None, state, None, logs={"frac_reward_zero_std": share})
    model = torch.nn.Linear(1, 2)
    model.bias.grad = torch.tensor([0.0, torch.inf])
    callback.on_pre_optimizer_step(SimpleNamespace(fp16=True), state, None, model=model)
    with pytest.raises(Collapse, match="collapsed at step 191: the gradient is not finite"):
        callback.on_pre_optimizer_step(SimpleNamespace(fp16=False), state, None, model=model)


@pytest.mark.parametrize("name", profile_names())
def test_a_profiles_methods_train_a_named_kl_with_a_guide_and_without(name, monkeypatch, tmp_path):
    """What the trainer of each run is handed, with what loads and checks left out. Without a name
    the KL would be what TRL's setting says, and a guide's effect that of another estimator."""
    from sage_lib.training import rl

    profile, model = load_profile(name), SimpleNamespace()
    for stub in ("add_lora", "within_limit", "require_golds", "reward", "rows"):
        monkeypatch.setattr(rl, stub, lambda *_: SimpleNamespace())
    monkeypatch.setattr(rl, "Dataset", SimpleNamespace(from_list=lambda _: None))
    monkeypatch.setattr(rl, "load_model", lambda *_: (model, None))
    monkeypatch.setattr(rl, "arguments", lambda kind, section, *_, **__: section)
    monkeypatch.setattr(rl.runs, "guide_of", lambda *_: IdentityGuide())
    for name_of_method, method in profile.methods.items():
        if method.rft is not None:
            continue
        training = profile.training(name_of_method, 3407)
        handed, *_ = rl.make_trainer(training, profile, tmp_path, lambda **keywords: keywords)
        assert (handed["guide"] is None) == (method.guide is None)
        assert handed["kl_form"] == (method.kl_form if handed["args"]["beta"] else None)
        assert handed["args"]["use_bias_correction_kl"] is False
        assert handed["args"]["importance_sampling_level"] == "token"
        assert method.kl_form in KL_FORMS


@pytest.mark.parametrize(("former", "name"), [("anchor", "kl_form"), ("reference", "ref_model")])
def test_the_former_name_of_an_argument_works_with_a_warning(make, tiny_model, former, name):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    value = "sequence" if name == "kl_form" else model
    with pytest.warns(FutureWarning, match=f"{former} is called {name}"):
        trainer = make(None, **{former: value})
    if name == "kl_form":
        assert isinstance(trainer.kl_form, KL_FORMS["sequence"])
    else:
        assert trainer.ref_model is model and trainer.other_reference
    with pytest.raises(SageError, match=f"{former} and {name} are the same"):
        make(None, **{former: value, name: "k3_corrected" if name == "kl_form" else model})
