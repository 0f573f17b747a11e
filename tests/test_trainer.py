"""SageTrainer against stock TRL, against a recomputation in float64, and against faults planted in the seam."""

import pytest
import torch
from datasets import Dataset

from sage_lib.algorithm.guides import (
    BranchGuide,
    CosineSchedule,
    GuideInputs,
    IdentityGuide,
    RandomGuide,
    TokenGuide,
)
from sage_lib.errors import SageError
from sage_lib.policy import tiny_qwen
from sage_lib.tasks import prompts

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def make(tiny_model, tmp_path_factory):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from sage_lib.algorithm.backend import GRPOConfig, GRPOTrainer
    from sage_lib.algorithm.trainer import SageTrainer

    rows = [
        {"prompt": prompts.messages(f"reach {n} from 1 2 3 4"), "answer": str(n)} for n in range(8)
    ]

    def reward(completions, **kwargs):  # any spread will do: how many even-length words
        return [len(c[0]["content"]) % 7 / 7 for c in completions]

    def trainer(
        guide="stock", lora=True, anchor=None, dynamic_sampling=0, reward=reward, **settings
    ):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        if lora:
            model = get_peft_model(
                model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            )
        config = (
            dict(
                output_dir=str(tmp_path_factory.mktemp("run")),
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=8,
                beta=0.05,
                learning_rate=1e-2,
                max_steps=3,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                report_to="none",
                logging_steps=1,
                save_strategy="no",
                use_bias_correction_kl=False,
                loss_type="grpo",
                seed=5,
                disable_tqdm=True,
                temperature=1.0,
            )
            | settings
        )
        arguments = dict(
            model=model,
            processing_class=tiny_qwen.load_tokenizer(tiny_model),
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            args=GRPOConfig(**config),
        )
        return (
            GRPOTrainer(**arguments)
            if guide == "stock"
            else SageTrainer(
                guide=guide, anchor=anchor, dynamic_sampling=dynamic_sampling, **arguments
            )
        )

    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def trained(trainer):
    """Train right after construction, where TRL seeds: another trainer made in between would draw from the same stream."""
    trainer.train()
    return trainer


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    "loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
)
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
    assert (
        first["kl_ref"] < 1e-6 < first["kl"]
        and first["guide/max"] <= 1.4
        and 0 < first["guide/acting"] <= 1
    )


#: anchor, guide, loss_type, what else is set.
ONE_BATCH = [
    (None, None, "grpo", {}),
    ("k3", BranchGuide(threshold=1.0, ratio=0.2), "grpo", {}),
    ("k3", TokenGuide(), "grpo", {}),
    ("k3", RandomGuide(probability=CosineSchedule(0.5, 0.5)), "grpo", {}),
    ("k3_corrected", BranchGuide(threshold=1.0, ratio=0.2), "grpo", {}),
    ("sequence", BranchGuide(threshold=1.0, ratio=0.2), "grpo", {}),
    ("sequence", None, "bnpo", {}),
    ("sequence", BranchGuide(threshold=1.0, ratio=0.2), "dapo", {}),
    ("forward_kl", None, "grpo", {}),
    ("forward_kl", None, "bnpo", {}),
    ("forward_kl", None, "dapo", {}),
    ("forward_kl", None, "dr_grpo", {}),
    ("k3", BranchGuide(threshold=1.0, ratio=0.2), "bnpo", {}),
    ("k3", BranchGuide(threshold=1.0, ratio=0.2), "dapo", {"epsilon_high": 0.28}),
    (None, None, "bnpo", {"beta": 0.0}),
    ("k3", None, "grpo", {"entropy_coef": 0.1}),
    ("forward_kl", None, "grpo", {"temperature": 0.7}),
]


@pytest.mark.parametrize(("anchor", "guide", "loss_type", "settings"), ONE_BATCH)
def test_loss_and_gradient_equal_a_recomputation_in_float64(
    make, tiny_model, anchor, guide, loss_type, settings
):
    """One batch of each method, from the logits of another copy of the model, with the policy away from its reference."""
    from transformers import AutoModelForCausalLM

    trainer = make(guide, lora=False, anchor=anchor, loss_type=loss_type, **settings)
    beta, temperature = settings.get("beta", 0.05), settings.get("temperature", 1.0)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._prepare_inputs([trainer.train_dataset[i // 4] for i in range(8)])
    trainer.state.global_step, trainer.state.max_steps = (
        1,
        3,
    )  # the policy has moved: no longer the first step
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    before = {k: v.clone() for k, v in batch.items() if torch.is_tensor(v)}
    noise = trainer.guide_generator.get_state()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert all(torch.equal(before[k], batch[k]) for k in before), "the buffered batch is as it was"

    reference = AutoModelForCausalLM.from_pretrained(tiny_model).double()
    model = AutoModelForCausalLM.from_pretrained(tiny_model).double()
    model.load_state_dict({k: v.double() for k, v in trainer.model.state_dict().items()})
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width, mask = batch["completion_ids"].shape[1], batch["completion_mask"].double()
    log_pi, log_ref = (
        (
            m(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1] / temperature
        ).log_softmax(-1)
        for m in (model, reference)
    )
    logps, refs = (
        x.gather(-1, batch["completion_ids"][..., None])[..., 0] for x in (log_pi, log_ref.detach())
    )
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    log_q = torch.zeros_like(mask)
    if guide is not None:
        generator = torch.Generator()
        generator.set_state(noise)
        inputs = GuideInputs(
            entropies=entropy.detach().float(),
            logps=logps.detach().float(),
            mask=batch["completion_mask"],
            progress=1 / 3,
            generator=generator,
        )
        log_q = guide(inputs).double().log()
        assert (log_q[mask == 1] != 0).any(), "the guide acts"
    ratio = (logps - logps.detach()).exp()
    d = refs + log_q - logps
    advantages = batch["advantages"].double()[:, None]
    k3 = d.exp() - d - 1
    if anchor == "sequence":  # return to go, by a plain loop
        later = torch.zeros_like(mask)
        for t in range(width):
            later[:, t] = ((-d).detach() * mask)[:, t:].sum(1)
        token = -ratio * (advantages - beta * later)
    else:
        divergence = {
            None: k3,
            "k3": k3,
            "k3_corrected": k3 * ratio,
            "forward_kl": (log_ref.detach().exp() * (log_ref.detach() - log_pi)).sum(-1),
        }[anchor]
        token = -ratio * advantages + beta * divergence
    expected = {
        "grpo": lambda x: ((x * mask).sum(1) / mask.sum(1)).mean(),
        "bnpo": lambda x: (x * mask).sum() / mask.sum(),
        "dapo": lambda x: (x * mask).sum() / mask.sum(),
        "dr_grpo": lambda x: (x * mask).sum() / (8 * 8),
    }[loss_type](token)
    expected = expected - settings.get("entropy_coef", 0.0) * (entropy * mask).sum() / mask.sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=2e-6)
    ours = torch.cat(
        [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    ).double()
    theirs = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.allclose(ours, theirs, atol=2e-6, rtol=1e-4), (ours - theirs).abs().max()
    assert theirs.abs().max() > 1e-4, "there was something to compare"
    if beta:
        logged = trainer._metrics["train"]["kl"][-1]
        kl = (-d if anchor == "sequence" else divergence).detach()
        assert logged == pytest.approx(((kl * mask).sum() / mask.sum()).item(), abs=1e-5)


@pytest.mark.parametrize(("anchor", "loss_type"), [("sequence", "cispo"), ("forward_kl", "sapo")])
def test_anchors_that_a_loss_type_does_not_support_are_refused(make, anchor, loss_type):
    with pytest.raises(SageError, match=f"not '{loss_type}'"):
        make(None, anchor=anchor, loss_type=loss_type)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"anchor": "sequence", "beta": 0.0}, "needs beta > 0"),
        ({"anchor": "k5"}, "no anchor 'k5'"),
        ({"guide": IdentityGuide(), "anchor": "forward_kl"}, "no sampled token for a guide"),
        ({"anchor": "sequence", "importance_sampling_level": "sequence"}, "one by one"),
        ({"dynamic_sampling": 2, "scale_rewards": "batch"}, "within their group"),
        ({"guide": IdentityGuide(), "use_liger_kernel": True}, "Liger"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(make, settings, reason, monkeypatch):
    settings = {"guide": None} | settings
    if settings.pop(
        "use_liger_kernel", False
    ):  # the package itself need not be there for the refusal
        trainer = make(settings["guide"])
        trainer.args.use_liger_kernel = True
        with pytest.raises(SageError, match=reason):
            trainer._require_usable()
        return
    with pytest.raises(SageError, match=reason):
        make(**settings)


def test_dynamic_sampling_leaves_no_group_without_a_spread_and_keeps_rows_whole(make):
    trainer = make(
        None,
        dynamic_sampling=8,
        reward=lambda completions, **_: [float("L" in c[0]["content"]) for c in completions],
        beta=0.05,
    )
    plain = make(None, reward=trainer.reward_funcs[0], beta=0.05)
    for t in (plain, trainer):
        t.model.train()
        t.current_gradient_accumulation_steps = 1
    rows = [plain.train_dataset[i // 4] for i in range(8)]
    torch.manual_seed(3)
    first = plain._generate_and_score_completions(rows)
    torch.manual_seed(3)
    batch = trainer._generate_and_score_completions(rows)
    flat = first["advantages"].view(2, 4).abs().amax(1) < 1e-6
    assert flat.any(), "there was something to replace"
    assert (batch["advantages"].view(2, 4).abs().amax(1) > 0).all() and trainer._metrics["train"][
        "sampling/flat"
    ] == [0.0]
    kept = [4 * g + i for g in range(2) if not flat[g] for i in range(4)]
    text = trainer.processing_class.batch_decode
    assert text(batch["completion_ids"], skip_special_tokens=True)[
        slice(*([kept[0], kept[-1] + 1] if kept else [0, 0]))
    ] == [text(first["completion_ids"], skip_special_tokens=True)[i] for i in kept]
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    with (
        torch.no_grad()
    ):  # every row is still one prompt with its completion: the reference scores it the same alone
        for i in range(8):
            ids = torch.cat(
                [
                    batch["prompt_ids"][i][batch["prompt_mask"][i] == 1],
                    batch["completion_ids"][i][batch["completion_mask"][i] == 1],
                ]
            )
            n = int(batch["completion_mask"][i].sum())
            logps = (
                trainer.model(ids[None])
                .logits[0, -n - 1 : -1]
                .log_softmax(-1)
                .gather(-1, ids[-n:, None])[:, 0]
            )
            assert torch.allclose(logps, batch["ref_per_token_logps"][i, :n], atol=1e-4)


def test_no_forward_pass_is_added(make):
    passes = []
    for guide, anchor in (
        ("stock", None),
        (BranchGuide(threshold=0.5), "k3"),
        (TokenGuide(), "sequence"),
        (None, "forward_kl"),
    ):
        trainer, count = make(guide, anchor=anchor), [0]
        trainer.model.register_forward_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        trainer.train()
        passes.append(count[0])
    assert len(set(passes)) == 1 and passes[0] > 0


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
        return (1 + 0.1 * torch.randn(inputs.logps.shape, generator=inputs.generator)).clamp(
            0.6, 1.4
        )

    whole = trained(
        make(noisy, max_steps=4, save_strategy="steps", save_steps=2, output_dir=str(tmp_path))
    )
    again = make(noisy, max_steps=4, save_strategy="steps", save_steps=2, output_dir=str(tmp_path))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [r["loss"] for r in whole.state.log_history if r["step"] > 2 and "loss" in r] == [
        r["loss"] for r in again.state.log_history if r["step"] > 2 and "loss" in r
    ]
    assert torch.equal(weights(whole), weights(again))


def test_a_resume_far_from_the_reference_goes_on_and_another_reference_is_refused(make, tmp_path):
    settings = dict(
        max_steps=6,
        learning_rate=0.3,
        save_strategy="steps",
        save_steps=3,
        output_dir=str(tmp_path),
    )
    first = trained(make(None, **settings))
    assert first.state.log_history[3]["kl_ref"] > 1e-3, "the policy has left its reference"
    checkpoint = str(tmp_path / "checkpoint-3")
    again = make(None, **settings)
    again.train(resume_from_checkpoint=checkpoint)
    assert torch.equal(weights(first), weights(again))
    torch.save(
        {
            k: v if k != "reference" else "another"
            for k, v in torch.load(f"{checkpoint}/sage_state_0.pt").items()
        },
        f"{checkpoint}/sage_state_0.pt",
    )
    with pytest.raises(SageError, match="reference policy is not the one"):
        make(None, **settings).train(resume_from_checkpoint=checkpoint)


def test_shaping_at_scoring_as_on_unsloths_gpu_trainer_trains_alike(make):
    guide = BranchGuide(threshold=0.5)
    at_loss, trainer = trained(make(guide)), make(guide)
    trainer._seam = "scoring"
    trainer.train()
    assert torch.allclose(weights(at_loss), weights(trainer), atol=1e-5)
    for a, b in zip(at_loss.state.log_history[:3], trainer.state.log_history[:3], strict=True):
        assert all(
            a[k] == pytest.approx(b[k], abs=1e-4)
            for k in ("kl", "kl_ref", "guide/mean", "guide/acting")
        )
    assert (weights(trained(make(None))) - weights(trainer)).abs().max() > 1e-4, (
        "and not as without a guide"
    )


def test_on_unsloths_trainer_other_anchors_are_refused(make):
    trainer = make(BranchGuide())
    trainer._seam, trainer.anchor = "scoring", "sequence"
    with pytest.raises(SageError, match="anchor 'k3' only"):
        trainer._require_usable()


def test_the_exact_forward_kl_keeps_no_hidden_states_beyond_the_loss(make, monkeypatch):
    trainer = make(None, anchor="forward_kl")
    seen, keep = [], type(trainer)._keep_hidden

    def watched(self, *args):
        seen.append(self._hidden is not None)
        keep(self, *args)

    for module in trainer.model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") == "_keep_hidden":
                module._forward_hooks[key] = lambda *args: watched(trainer, *args)
    trainer.train()
    assert seen.count(True) == 2 * 3, (
        "scoring and loss of 3 steps, and none of the passes of generation"
    )
    assert len(seen) > 6 and trainer._hidden is None
