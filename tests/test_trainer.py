"""SageTrainer against stock TRL, a recomputation in float64, and faults planted in the seam."""

import dataclasses
import math

import pytest
import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from sage_lib.algorithm import padding
from sage_lib.algorithm.advantages import PassAtK
from sage_lib.algorithm.anchors import BesideTrl, ForwardKL, Sequence, Shaped
from sage_lib.algorithm.guides import (
    BranchGuide,
    CosineSchedule,
    GuideInputs,
    IdentityGuide,
    RandomGuide,
    TokenGuide,
)
from sage_lib.errors import SageError
from sage_lib.files import read_lines
from sage_lib.policy import tiny_qwen
from sage_lib.tasks import prompts
from sage_lib.training.callbacks import Collapse, StepLog

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
        guide="stock",
        lora=True,
        anchor=None,
        dynamic_sampling=0,
        reward=reward,
        base=tiny_model,
        data=Dataset,
        change=None,
        other_reference=False,
        reference=None,
        merge_adapter=False,
        trim_padding=False,
        advantage=None,
        reference_reset=0,
        **settings,
    ):
        """``lora``: what differs in the adapter's settings, or whether there is one; ``new``: TRL
        makes it. ``change``: what happens to the model before the trainer sees it."""
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(base)
        if change is not None:
            change(model)
        differs = dict(lora) if isinstance(lora, dict) else {}
        new = differs.pop("new", False)
        adapter = LoraConfig(
            **{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | differs
        )
        if lora and not new:
            model = get_peft_model(model, adapter)
        config = {
            "output_dir": str(tmp_path_factory.mktemp("run")),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
            "beta": 0.05,
            "learning_rate": 1e-2,
            "max_steps": 3,
            "bf16": False,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "report_to": "none",
            "logging_steps": 1,
            "save_strategy": "no",
            "use_bias_correction_kl": False,
            "loss_type": "grpo",
            "seed": 5,
            "disable_tqdm": True,
            "temperature": 1.0,
        }
        arguments = {
            "model": model,
            "processing_class": tiny_qwen.load_tokenizer(tiny_model),
            "reward_funcs": reward,
            "train_dataset": Dataset.from_list(rows),
            "args": GRPOConfig(**{k: v for k, v in (config | settings).items() if v != "default"}),
        }
        if data is IterableDataset:
            arguments["train_dataset"] = arguments["train_dataset"].to_iterable_dataset()
        if new:
            arguments["peft_config"] = adapter
        if guide == "stock":
            return GRPOTrainer(**arguments)
        return SageTrainer(
            guide=guide,
            anchor=anchor,
            dynamic_sampling=dynamic_sampling,
            other_reference=other_reference,
            reference=reference,
            merge_adapter=merge_adapter,
            trim_padding=trim_padding,
            advantage=advantage,
            reference_reset=reference_reset,
            **arguments,
        )

    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def trained(trainer):
    """Train right after construction, where TRL seeds: another trainer made in between would draw
    from the same stream."""
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


DEFAULTS = {"use_bias_correction_kl": "default", "loss_type": "default"}


@pytest.mark.parametrize(
    ("guide", "anchor"), [(None, None), (None, "k3_corrected"), (IdentityGuide(), "k3_corrected")]
)
def test_on_trls_defaults_no_guide_and_its_own_anchor_are_stock_bit_for_bit(make, guide, anchor):
    stock, ours = trained(make(**DEFAULTS)), trained(make(guide, anchor=anchor, **DEFAULTS))
    assert stock.args.use_bias_correction_kl, "TRL's default is the corrected KL"
    assert losses(stock) == losses(ours)
    assert torch.equal(weights(stock), weights(ours))


def test_a_guide_without_an_anchor_changes_trls_default_and_says_so(make, caplog):
    stock, ours = trained(make(**DEFAULTS)), trained(make(IdentityGuide(), **DEFAULTS))
    assert "use_bias_correction_kl is set to False" in caplog.text
    assert not torch.equal(weights(stock), weights(ours)), "q = 1 alone is not stock on defaults"


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


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("anchor", "guide", "loss_type", "settings"), ONE_BATCH)
def test_loss_and_gradient_equal_a_recomputation_in_float64(
    make, tiny_model, anchor, guide, loss_type, settings
):
    """One batch of each method, from the logits of another copy of the model, with the policy away
    from its reference."""
    from transformers import AutoModelForCausalLM

    made = make(guide, lora=False, anchor=anchor, loss_type=loss_type, **settings)
    trainer, batch = one_batch(made)
    beta, temperature = settings.get("beta", 0.05), settings.get("temperature", 1.0)
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

    def distributions(m):
        logits = m(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
        return (logits / temperature).log_softmax(-1)

    log_pi, log_ref = distributions(model), distributions(reference).detach()
    drawn = batch["completion_ids"][..., None]
    logps, refs = log_pi.gather(-1, drawn)[..., 0], log_ref.gather(-1, drawn)[..., 0]
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
            ids=batch["completion_ids"],
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
            "forward_kl": (log_ref.exp() * (log_ref - log_pi)).sum(-1),
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
    ours, theirs = gradient(trainer.model).double(), gradient(model)
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
        ({"anchor": "sequence", "top_entropy_quantile": 0.5}, "would go with the tokens"),
        ({"anchor": "sequence", "off_policy_mask_threshold": 0.5}, "would go with the tokens"),
        ({"dynamic_sampling": 2, "scale_rewards": "batch"}, "within their group"),
        (
            {"dynamic_sampling": 2, "multi_objective_aggregation": "normalize_then_sum"},
            "sum_then_normalize",
        ),
        ({"dynamic_sampling": 2, "data": IterableDataset}, "not on an IterableDataset"),
        ({"anchor": Sequence}, r"write Sequence\(\)"),
        ({"anchor": ForwardKL(), "beta": 0.0}, "needs beta > 0"),
        ({"advantage": "ppl"}, "no advantage 'ppl'"),
        ({"advantage": PassAtK}, r"write PassAtK\(\)"),
        ({"advantage": {"name": "pass_at_k", "k": 5}}, "groups of at least as many"),
        ({"advantage": "kl_cov"}, "with one update a batch they are the same"),
        ({"advantage": "entropy", "loss_type": "vespo"}, "not 'vespo'"),
        ({"advantage": "entropy", "importance_sampling_level": "sequence"}, "level token"),
        ({"advantage": "position", "off_policy_mask_threshold": 0.5}, "off-policy mask"),
        ({"reference_reset": 2, "lora": False}, "set sync_ref_model"),
        ({"reference_reset": 2, "beta": 0.0}, "beta > 0"),
        ({"guide": BranchGuide}, r"write BranchGuide\(\)"),
        ({"guide": "branch"}, "a choice and not yet a guide"),
        ({"guide": 1.2}, "cannot be called"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(make, settings, reason):
    with pytest.raises(SageError, match=reason):
        make(**{"guide": None} | settings)


def test_an_anchor_inside_ligers_kernel_is_refused(make):
    trainer = make(IdentityGuide())
    trainer.args.use_liger_kernel = True  # the package itself need not be there
    with pytest.raises(SageError, match="Liger"):
        trainer._require_usable()


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
    assert (batch["advantages"].view(2, 4).abs().amax(1) > 0).all()
    assert trainer._metrics["train"]["sampling/flat"] == [0.0]
    texts, before = completions(trainer, batch), completions(trainer, first)
    for i in range(8):
        assert flat[i // 4] or texts[i] == before[i], "groups with a spread stay"
    # Every row is still one prompt with its completion: the reference scores it the same alone.
    for i in range(8):
        ids, n = row_alone(batch, i)
        with torch.no_grad():
            log_pi = trainer.model(ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
        logps = log_pi.gather(-1, ids[-n:, None])[:, 0]
        assert torch.allclose(logps, batch["ref_per_token_logps"][i, :n], atol=1e-4)


@pytest.fixture
def refilled(make):
    """A batch whose first group one fresh batch replaced, by its second group: in either batch the
    first has equal rewards. And the ids of the completions that it must then have."""
    drawn = []

    def second_group_alone(completion_ids, **_):
        drawn.append(completion_ids)
        return [float(i >= 4 and i % 2 == 0) for i in range(8)]

    trainer = make(None, dynamic_sampling=1, reward=second_group_alone, max_completion_length=32)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(3)
    batch = trainer._generate_and_score_completions(
        [trainer.train_dataset[i // 4] for i in range(8)]
    )
    first, fresh = drawn
    return trainer, batch, fresh[4:] + first[4:], first


def test_dynamic_sampling_takes_the_fresh_groups_that_have_a_spread(refilled):
    trainer, batch, expected, _ = refilled
    rows = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    assert [ids[counted == 1].tolist() for ids, counted in rows] == expected
    assert trainer._metrics["train"]["sampling/flat"] == [0.0]


def test_dynamic_sampling_counts_the_tokens_of_what_it_kept(refilled):
    """By which loss_type dapo divides."""
    _, batch, _, first = refilled
    tokens = int(batch["completion_mask"].sum())
    assert tokens != sum(map(len, first)), "the count has changed"
    assert batch["num_items_in_batch"] == tokens


def test_dynamic_sampling_replaces_groups_of_equal_rewards_that_float32_cannot_average(make):
    """Eight rewards of 0.7: TRL's advantages are 6e-4 and not 0."""
    trainer = make(
        None,
        dynamic_sampling=2,
        num_generations=8,
        reward=lambda completions, **_: [0.7 for _ in completions],
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 8)
    assert batch["advantages"].abs().max() > 1e-5, "what TRL makes of such a group"
    logged = trainer._metrics["train"]
    assert logged["sampling/rounds"] == [3.0] and logged["sampling/flat"] == [1.0]
    assert "reward_terms" not in batch, "TRL's batch is handed on as it was"


def completions(trainer, batch):
    decode = trainer.processing_class.batch_decode
    return decode(batch["completion_ids"], skip_special_tokens=True)


def row_alone(batch, i):
    """Token ids of one row without its padding, and the length of its completion."""
    prompt = batch["prompt_ids"][i][batch["prompt_mask"][i] == 1]
    completion = batch["completion_ids"][i][batch["completion_mask"][i] == 1]
    return torch.cat([prompt, completion]), len(completion)


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
    seen.clear()  # it was tried
    trainer.train()
    assert len(seen) == 2, "4 updates over 2 batches: one q each"


def test_the_canary_stops_a_run_whose_guide_does_not_reach_the_loss(make, monkeypatch):
    trainer = make(BranchGuide(threshold=0.5, ratio=0.4))
    original = type(trainer)._shape

    def lost(self, passing, logps, entropies):
        reference = passing.batch["ref_per_token_logps"]
        original(self, passing, logps, entropies)
        # as if TRL read the reference somewhere else
        passing.batch["ref_per_token_logps"] = reference

    monkeypatch.setattr(type(trainer), "_shape", lost)
    with pytest.raises(SageError, match="did not reach the loss"):
        trainer.train()


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
            model.lm_head.weight.add_(
                0.2
                * torch.sin(torch.arange(model.lm_head.weight.numel())).view_as(
                    model.lm_head.weight
                )
            )
        return model

    def kl(reference):
        trainer = trained(make(None, lora=lora, max_steps=1, reference=reference))
        return trainer, trainer.state.log_history[0]["kl_ref"]

    start, nearest = kl(None)
    same, also = kl(AutoModelForCausalLM.from_pretrained(tiny_model))
    moved_away, far = kl(other())
    assert nearest == pytest.approx(also, abs=1e-6) and far > 1e-3 > nearest
    assert not torch.equal(weights(start), weights(moved_away))
    assert torch.allclose(weights(start), weights(same), atol=1e-6)
    with pytest.raises(SageError, match="a reference needs beta > 0"):
        make(None, anchor=None, beta=0.0, lora=lora, reference=other())


def larger(model):
    """The model with logits that are large enough for noise and rounding to show."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(50 if p.dim() > 1 else 1)


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


def test_a_guide_that_asks_for_what_there_is_not_is_refused_before_anything_is_made(make):
    with pytest.raises(SageError, match="a guide's inputs have no 'tokens': there are entropies"):
        make(lambda inputs: inputs.tokens)


def test_a_guide_without_an_anchor_is_refused(make):
    with pytest.raises(SageError, match="beta > 0"):
        make(BranchGuide(), beta=0.0)


@pytest.mark.parametrize(
    "q",
    [
        lambda inputs: torch.full_like(inputs.logps, 0.0),
        lambda inputs: torch.full_like(inputs.logps, -1.0),
        lambda inputs: torch.full_like(inputs.logps, float("nan")),
        lambda inputs: torch.ones(len(inputs.logps)),
        lambda inputs: 1.2,
    ],
)
def test_a_guide_whose_q_is_no_positive_weight_of_every_token_is_refused(make, q):
    with pytest.raises(SageError, match="positive finite"):
        make(q).train()


def test_a_guide_sees_the_ids_of_the_sampled_tokens(make):
    seen = []

    def guide(inputs):
        seen.append(inputs.ids)
        return IdentityGuide()(inputs)

    trainer, batch = one_batch(make(guide))
    trainer._compute_loss(trainer.model, batch)
    assert torch.equal(seen[-1], batch["completion_ids"])


def test_an_anchor_of_ones_own_reaches_the_loss(make):
    class K2(BesideTrl):
        """Half the squared log-ratio, differentiated as a loss."""

        name = "k2"

        def shape(self, tokens):
            half_square = (tokens.reference - tokens.live_logps) ** 2 / 2
            return Shaped(tokens.logps, kl=half_square.detach(), beside=half_square)

    trainer, batch = one_batch(make(None, lora=False, anchor=K2(), loss_type="bnpo"))
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    mask = batch["completion_mask"]
    plain, same = one_batch(make("stock", lora=False, loss_type="bnpo", beta=0.0))
    logps, *_ = plain._get_per_token_logps_and_entropies(
        plain.model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        torch.cat([batch["prompt_mask"], mask], 1),
        mask.shape[1],
    )
    assert torch.equal(same["completion_ids"], batch["completion_ids"])
    square = (batch["ref_per_token_logps"] - logps) ** 2 / 2
    kl = (square * mask).sum() / mask.sum()
    expected = plain._compute_loss(plain.model, same) + 0.05 * kl
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(gradient(trainer.model), gradient(plain.model), atol=1e-6)
    assert trainer._metrics["train"]["kl"][-1] == pytest.approx(kl.item(), abs=1e-6)


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
    settings = {
        "base": models(kind) if kind else tiny_model,
        "anchor": "forward_kl",
        "temperature": 0.7,
        "beta": 1.0,
        "learning_rate": 0.1,
    }
    once = trained(make(None, **settings))
    original = type(once)._vocabulary

    def twice(self, batch):
        found = original(self, batch)
        assert not found.head_trained
        return dataclasses.replace(found, head_trained=True)

    monkeypatch.setattr(type(once), "_vocabulary", twice)
    again = trained(make(None, **settings))
    assert once.state.log_history[2]["kl"] > 1e-4, "there was something to descend"
    assert losses(once) == pytest.approx(losses(again), rel=1e-4, abs=1e-7)
    torch.testing.assert_close(weights(once), weights(again), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [True, False])
def test_the_forward_kl_scores_the_reference_from_the_states_that_trl_left(make, monkeypatch, lora):
    """The same as with TRL's scoring of it, whose head sees one token of a completion once the
    canary has compared the two."""
    from sage_lib.algorithm.trainer import SageTrainer  # after the backend

    settings = {
        "lora": lora,
        "anchor": "forward_kl",
        "temperature": 0.7,
        "beta": 1.0,
        "learning_rate": 0.1 if lora else 0.01,
        "max_steps": 4,
    }
    scored = []
    original = SageTrainer._get_per_token_logps_and_entropies

    def score(self, *args, **kwargs):
        logps, *rest = original(self, *args, **kwargs)
        scored.append(None if torch.is_grad_enabled() else bool(logps.isnan().all()))
        return logps, *rest

    monkeypatch.setattr(SageTrainer, "_get_per_token_logps_and_entropies", score)
    ours = trained(make(None, **settings))
    left = [one for one in scored if one is not None]
    assert left == [False, True, True, True], "not before the canary has looked"
    monkeypatch.setattr(ForwardKL, "scores_reference", False)
    trls = trained(make(None, **settings))
    found, expected = (
        [step["kl_ref"] for step in run.state.log_history[:4]] for run in (ours, trls)
    )
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert expected[3] > 1e-3, "there was something to compare"
    assert losses(ours) == losses(trls) and torch.equal(weights(ours), weights(trls))


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite"])
def test_the_forward_kl_is_that_of_the_logits_that_a_model_scales_or_caps(make, models, kind):
    """Against the model's whole forward, which gives the logits that it samples from."""
    from transformers import AutoModelForCausalLM

    made = make(None, lora=False, anchor="forward_kl", base=models(kind), temperature=0.7)
    reference = AutoModelForCausalLM.from_pretrained(made.model.config._name_or_path)
    trainer, batch = one_batch(made)
    trainer._compute_loss(trainer.model, batch)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    mask = batch["completion_mask"]
    pi, ref = (
        torch.distributions.Categorical(
            logits=m(input_ids=ids, attention_mask=attention)
            .logits[:, -mask.shape[1] - 1 : -1]
            .double()
            / 0.7
        )
        for m in (trainer.model, reference)
    )
    kl = torch.distributions.kl_divergence(ref, pi)
    expected = ((kl * mask).sum() / mask.sum()).item()
    assert expected > 1e-3, "there was something to compare"
    assert trainer._metrics["train"]["kl"][-1] == pytest.approx(expected, rel=1e-3)


def test_the_canary_leaves_room_for_mixed_precision(make):
    trainer = trained(make(None, anchor="forward_kl", change=larger, bf16=True, max_steps=2))
    assert trainer.state.log_history[1]["kl"] > 0


@pytest.mark.parametrize("fault", ["cap", "time"])
def test_the_canary_sees_distributions_that_are_not_those_of_the_loss(
    make, models, monkeypatch, fault
):
    from sage_lib.algorithm import trainer as module

    made = make(None, lora=False, anchor="forward_kl", base=models("gemma2"))
    if fault == "cap":  # the output matrix alone, as if nothing came after it
        monkeypatch.setattr(module, "logits_from_hidden", lambda m: m.get_output_embeddings())
    else:  # the states after each token instead of those before it
        kept = type(made)._kept_hidden
        monkeypatch.setattr(type(made), "_kept_hidden", lambda s, time: kept(s, time).roll(1, 1))
    with pytest.raises(SageError, match="are not those of the policy in TRL's loss"):
        made.train()


def test_the_canary_sees_a_kl_of_trls_beside_an_anchor_of_its_own(make, monkeypatch):
    """At the first step that KL is 0 whatever TRL reads, so every step is looked at."""
    trainer = make(None, anchor="forward_kl")
    original = type(trainer)._shape

    def lost(self, passing, logps, entropies):
        reference = passing.batch["ref_per_token_logps"]
        original(self, passing, logps, entropies)
        passing.batch["ref_per_token_logps"] = reference

    monkeypatch.setattr(type(trainer), "_shape", lost)
    with pytest.raises(SageError, match="did not reach the loss"):
        trainer.train()
    assert trainer.state.global_step > 0


def test_the_sequence_anchor_trains_a_mixture_of_experts(make, models):
    """The router's loss is TRL's: the canary counts it in."""
    lora = {"target_modules": ["q_proj"]}
    trainer = trained(make(TokenGuide(), anchor="sequence", lora=lora, base=models("mixtral")))
    first = trainer.state.log_history[0]
    assert first["aux_loss"] > 0.5, "the term is there"
    assert len(losses(trainer)) == 3


def test_metrics_of_a_batch_without_a_counted_token_are_left_out(make):
    """TRL masks completions that ended at the length limit."""
    settings = {"max_completion_length": 1, "mask_truncated_completions": True, "max_steps": 1}
    log = trained(make(BranchGuide(threshold=0.5), **settings)).state.log_history[0]
    assert not {"guide/min", "guide/max", "guide/mean", "kl_ref"} & log.keys()
    assert log["loss"] == 0


def one_batch(trainer):
    """The trainer in its second step, moved off its reference, and a batch for its loss."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(3)
    batch = trainer._prepare_inputs([trainer.train_dataset[i // 4] for i in range(8)])
    trainer.state.global_step, trainer.state.max_steps = 1, 3
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return trainer, batch


def test_resume_is_bit_for_bit(make, tmp_path):
    def noisy(inputs):
        noise = torch.randn(inputs.logps.shape, generator=inputs.generator)
        return (1 + 0.1 * noise).clamp(0.6, 1.4)

    settings = saved(tmp_path, max_steps=4, save_steps=2)
    whole = trained(make(noisy, **settings))
    again = make(noisy, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(whole)[2:] == losses(again)[2:]
    assert torch.equal(weights(whole), weights(again))


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


@pytest.mark.parametrize("step", [3, 4, 5, 8, 9])
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


@pytest.mark.parametrize("step", [2, 6, 8])
def test_a_resume_between_draws_of_several_updates_is_bit_for_bit(make, tmp_path, step):
    """Four draws an epoch, two updates each; among the updates of one there is no such resume,
    and training.rl saves no checkpoint there."""
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
        ({"save_steps": 6}, 6),
        ({"save_steps": 6, "steps_per_generation": 4}, 8),
        ({"save_steps": 6, "steps_per_generation": 4, "gradient_accumulation_steps": 4}, 6),
        ({"save_steps": 6, "steps_per_generation": 3, "gradient_accumulation_steps": 2}, 6),
        ({"save_steps": 5, "gradient_accumulation_steps": 2, "num_iterations": 3}, 6),
        ({"save_steps": 0.25, "steps_per_generation": 4}, 0.25),
        ({"steps_per_generation": 4}, None),
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
    unshuffled = make(None, shuffle_dataset=False)._get_train_sampler()
    assert sorted(unshuffled) == list(unshuffled)


def saved(folder, **settings):
    """Settings of a run that keeps checkpoints in ``folder``."""
    return {"save_strategy": "steps", "output_dir": str(folder)} | settings


LORA = {"target_modules": ["q_proj", "v_proj", "down_proj"], "lora_alpha": 16}


@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"beta": 1.0}])
def test_a_merged_adapter_learns_the_same(make, settings):
    guide = BranchGuide(threshold=0.5, ratio=0.3) if settings["beta"] else None
    plain = trained(make(guide, lora=LORA, **settings))
    merged = trained(make(guide, lora=LORA, merge_adapter=True, **settings))
    assert losses(merged) == pytest.approx(losses(plain), rel=1e-4, abs=1e-6)
    assert torch.allclose(weights(merged), weights(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("again", "half", "in_loss"),
    [
        (None, False, False),
        ("the settings", False, True),
        ("the model", False, True),
        (None, True, True),
    ],
)
def test_a_merged_adapter_is_in_place_in_every_pass_that_allows_it(
    make, monkeypatch, again, half, in_loss
):
    """While completions are drawn, while the reference is scored, and in the loss: not where layers
    would run again without it, nor where half precision would round most of it away."""
    settings = {"max_steps": 2, "gradient_checkpointing": again == "the settings"}
    trainer = make(None, lora=LORA, merge_adapter=True, **settings)
    if again == "the model":
        trainer.model.gradient_checkpointing_enable()
    if half:  # which Unsloth takes back on a processor that does not have it
        kind = type(trainer.accelerator)
        monkeypatch.setattr(kind, "mixed_precision", property(lambda self: "bf16"))
    seen = set()
    model = trainer.model
    model.get_base_model().get_decoder().register_forward_hook(
        lambda *_: seen.add((torch.is_grad_enabled(), any("lora_A" in n for n in named(model))))
    )
    trainer.train()
    assert {adapted for graded, adapted in seen if graded} == {in_loss}
    assert (False, False) in seen, "none is left while completions are drawn"
    assert ((False, True) in seen) == half, "the reference is scored likewise"


@pytest.mark.parametrize(
    "settings",
    [
        {"guide": BranchGuide(threshold=0.5, ratio=0.3), "beta": 1.0},
        {"guide": None, "beta": 0.0, "num_iterations": 2},
        {"guide": None, "advantage": {"name": "perplexity", "alpha": 0.01}},
        # Adam would divide a gradient of nearly 0 by itself, rounding and all.
        {
            **{"guide": TokenGuide(), "lora": False, "loss_type": "dapo", "temperature": 0.7},
            **{"optim": "sgd", "learning_rate": 0.1},
        },
    ],
)
def test_trimmed_padding_learns_the_same_from_fewer_columns(make, monkeypatch, settings):
    guide, others = settings["guide"], {k: v for k, v in settings.items() if k != "guide"}
    # Rows of this size are worth a pass each, and end where their end token is drawn.
    monkeypatch.setattr(padding, "WORTH", 0.0)
    columns = {}
    for trims in (False, True):
        trainer = make(guide, trim_padding=trims, max_completion_length=24, **others)
        seen = columns[trims] = []
        trainer.model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(
                inputs[0].numel() if torch.is_grad_enabled() else 0
            )
        )
        columns[f"{trims} trained"] = trained(trainer)
    plain, trimmed = columns["False trained"], columns["True trained"]
    assert sum(columns[True]) < 0.95 * sum(columns[False])
    assert losses(trimmed) == pytest.approx(losses(plain), rel=1e-4, abs=1e-6)
    assert torch.allclose(weights(trimmed), weights(plain), rtol=1e-4, atol=1e-6)


def named(model):
    return [name for name, _ in model.named_modules()]


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


def test_a_resume_far_from_the_reference_goes_on(make, tmp_path):
    settings = saved(tmp_path, max_steps=6, save_steps=3, learning_rate=0.3)
    first = trained(make(None, **settings))
    assert first.state.log_history[3]["kl_ref"] > 1e-3, "the policy has left its reference"
    again = make(None, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(weights(first), weights(again))


def test_a_reference_that_moves_is_resumed_where_it_was(make, tmp_path):
    moves = {"lora": False, "sync_ref_model": True, "ref_model_sync_steps": 1}
    settings = saved(tmp_path, max_steps=4, save_steps=2, **moves)
    whole = trained(make(None, **settings))
    again = make(None, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(whole)[2:] == losses(again)[2:]
    assert torch.equal(weights(whole), weights(again))
    (tmp_path / "checkpoint-2" / "sage_reference.pt").unlink()
    with pytest.raises(SageError, match="does not hold the reference that sync_ref_model"):
        make(None, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.fixture
def checkpoint(make, tmp_path):
    """Of a run of two steps, with LoRA, without a KL term or with all weights trained."""

    def run(**settings):
        trained(make(None, **saved(tmp_path, max_steps=2, save_steps=1), **settings))
        return str(tmp_path / "checkpoint-1")

    return run


@pytest.fixture
def other_base(tiny_model, tmp_path):
    """The base model with one weight moved a little."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


@pytest.mark.parametrize("settings", [{}, {"beta": 0.0}, {"lora": False}])
def test_a_resume_on_another_base_model_is_refused(
    make, checkpoint, other_base, tmp_path, settings
):
    """Checkpoints hold neither the model below an adapter nor the reference."""
    folder = checkpoint(**settings)
    run = saved(tmp_path, max_steps=2, save_steps=1)
    make(None, **run, **settings).train(resume_from_checkpoint=folder)
    with pytest.raises(SageError, match="base model or reference policy is not the one"):
        make(None, base=other_base, **run, **settings).train(resume_from_checkpoint=folder)


def test_a_resume_with_another_reference_adapter_is_refused(make, checkpoint, tmp_path):
    """The adapter that TRL calls "ref" comes from the checkpoint: here it was changed there."""
    folder = checkpoint()
    path = f"{folder}/ref/adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor + 1e-3 for name, tensor in tensors.items()}, path)
    with pytest.raises(SageError, match="reference policy is not the one"):
        make(None, **saved(tmp_path, max_steps=2)).train(resume_from_checkpoint=folder)


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
    # Scoring and loss of 3 steps, and none of the passes of generation.
    assert seen.count(True) == 2 * 3
    assert len(seen) > 6 and trainer._hidden is None


def test_an_evaluation_keeps_no_hidden_states(make):
    trainer = make(None, anchor="forward_kl", max_steps=2, per_device_eval_batch_size=8)
    trainer.evaluate(eval_dataset=trainer.train_dataset.select(range(2)))
    assert trainer._hidden is None
    trainer.train()
    assert len(losses(trainer)) == 2


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


# -- advantages ------------------------------------------------------------------------------------

#: Settings of which each leaves the advantages as they are, and what else they need.
IDENTITIES = [
    ({"name": "perplexity", "alpha": 0.0}, {}),
    ({"name": "position", "gamma": 0.0}, {}),
    ({"name": "entropy", "alpha": 0.0}, {}),
    ({"name": "negative_samples", "positive": 1.0, "of": "advantages"}, {}),
    ({"name": "pass_at_k", "k": 1}, {}),
    ({"name": "clip_cov", "share": 0.0}, {}),
    ({"name": "kl_cov", "share": 0.0}, {"num_iterations": 2}),
]


@pytest.mark.parametrize("beta", [0.05, 0.0])
@pytest.mark.parametrize(("advantage", "settings"), IDENTITIES)
def test_an_advantage_at_its_identity_is_stock_trl_bit_for_bit(make, advantage, settings, beta):
    stock = trained(make(beta=beta, **settings))
    ours = trained(make(None, advantage=advantage, beta=beta, **settings))
    assert losses(stock) == losses(ours)
    assert torch.equal(weights(stock), weights(ours))
    assert ours.state.log_history[0]["advantage/touched"] == 0


def binary(completions, **kwargs):
    """A reward of 0 or 1 that differs within groups of the tiny model."""
    return [float(len(c[0]["content"]) % 2) for c in completions]


#: Settings of which each acts.
ACTING = [
    ({"name": "perplexity", "alpha": 0.5}, {}),
    ({"name": "position", "gamma": 1.0}, {}),
    ({"name": "entropy"}, {}),
    ({"name": "negative_samples"}, {}),
    ({"name": "pass_at_k", "k": 2}, {}),
    ({"name": "clip_cov", "share": 0.5, "low": 0.0}, {}),
    ({"name": "kl_cov", "share": 0.3}, {"num_iterations": 2}),
]


@pytest.mark.parametrize(("advantage", "settings"), ACTING)
def test_an_advantage_changes_training_and_is_resumed_bit_for_bit(
    make, tmp_path, advantage, settings
):
    settings = saved(tmp_path, max_steps=4, save_steps=2, reward=binary, **settings)
    plain = trained(make(None, **settings | {"save_strategy": "no"}))
    whole = trained(make(None, advantage=advantage, **settings))
    assert not torch.equal(weights(plain), weights(whole))
    log = whole.state.log_history
    assert any(0 < row["advantage/touched"] <= 1 for row in log if "loss" in row)
    assert any(row["advantage/size"] > 0 for row in log if "loss" in row)
    again = make(None, advantage=advantage, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(whole)[2:] == losses(again)[2:]
    assert torch.equal(weights(whole), weights(again))


def shaped_by_loop(advantage, batch, logps, entropies):
    """The advantages of tokens, one by one, and what is added to the loss beside them."""
    mask = batch["completion_mask"]
    shaped = batch["advantages"].unsqueeze(1).repeat(1, mask.shape[1])
    beside = torch.zeros(mask.shape)
    counted = [(i, t) for i in range(len(mask)) for t in range(mask.shape[1]) if mask[i, t]]
    if advantage["name"] == "kl_cov":
        mean_logp = sum(float(logps[p]) for p in counted) / len(counted)
        mean_a = sum(float(shaped[p]) for p in counted) / len(counted)
        cov = {p: float((logps[p] - mean_logp) * (shaped[p] - mean_a)) for p in counted}
        for p in sorted(counted, key=cov.get)[-int(0.3 * len(counted)) :]:
            beside[p] = (logps[p] - batch["old_per_token_logps"][p]).abs()
        return shaped, beside
    for i, t in counted:
        a, last = float(shaped[i, t]), max(int(mask[i].sum()) - 1, 1)
        if advantage["name"] == "entropy":
            shaped[i, t] = a + min(0.4 * float(entropies[i, t]), abs(a) / 2)
        else:
            bonus = 1 / (1 + math.exp(-15 * (t / last - 0.5)))
            shaped[i, t] = a + math.copysign(bonus, a) * (a != 0)
    return shaped, beside


@pytest.mark.parametrize("advantage", [{"name": "entropy"}, {"name": "position", "gamma": 1.0}])
@pytest.mark.parametrize(
    ("guide", "anchor", "settings"),
    [
        (None, None, {"beta": 0.0}),
        (None, None, {"top_entropy_quantile": 0.5}),
        (BranchGuide(threshold=1.0, ratio=0.2), "k3", {}),
        (TokenGuide(), "k3_corrected", {"loss_type": "dapo"}),
        (RandomGuide(probability=CosineSchedule(0.5, 0.5)), "sequence", {"loss_type": "bnpo"}),
        (None, "forward_kl", {"loss_type": "dr_grpo"}),
    ],
)
def test_advantages_of_tokens_compose_with_every_guide_and_anchor(
    make, advantage, guide, anchor, settings
):
    """The loss is that of the same guide and anchor without a shaper, on a batch whose advantages
    were shaped by a loop."""
    require_composition(make, advantage, guide, anchor, settings)


def test_kl_cov_composes_with_a_guide_and_adds_its_term_beside_the_loss(make):
    guide = BranchGuide(threshold=1.0, ratio=0.2)
    advantage = {"name": "kl_cov", "share": 0.3}
    for loss_type in ("grpo", "bnpo"):
        settings = {"num_iterations": 2, "loss_type": loss_type}
        require_composition(make, advantage, guide, "k3", settings)


def require_composition(make, advantage, guide, anchor, settings):
    ours, batch = one_batch(make(guide, anchor=anchor, advantage=advantage, lora=False, **settings))
    before = batch["advantages"].clone()
    loss = ours._compute_loss(ours.model, batch)
    loss.backward()
    assert torch.equal(before, batch["advantages"]), "the buffered batch is as it was"
    plain, same = one_batch(make(guide, anchor=anchor, lora=False, **settings))
    assert torch.equal(same["completion_ids"], batch["completion_ids"])
    logps, entropies, *_ = plain._get_per_token_logps_and_entropies(
        plain.model,
        torch.cat([same["prompt_ids"], same["completion_ids"]], 1),
        torch.cat([same["prompt_mask"], same["completion_mask"]], 1),
        same["completion_mask"].shape[1],
        compute_entropy=True,
    )
    shaped, beside = shaped_by_loop(advantage, same, logps, entropies.detach())
    mask = same["completion_mask"]
    reduced = {
        "grpo": lambda x: ((x * mask).sum(1) / mask.sum(1)).mean(),
        "bnpo": lambda x: (x * mask).sum() / mask.sum(),
    }
    expected = plain._compute_loss(plain.model, same | {"advantages": shaped})
    if advantage["name"] == "kl_cov":
        added = reduced[settings["loss_type"]](beside)
        assert added > 1e-4, "there was something to add"
        expected = expected + added
    else:
        assert (shaped != before[:, None]).any(), "there was something to shape"
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient(ours.model), gradient(plain.model), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["perplexity", "negative_samples", "pass_at_k"])
@pytest.mark.parametrize("anchor", ["k3", "sequence", "forward_kl"])
def test_advantages_of_completions_are_those_of_their_groups(make, name, anchor):
    """From the texts of the completions, their rewards and the model's own log-probabilities, row
    by row; the anchor leaves them alone until the loss."""
    choice = {"perplexity": {"alpha": 0.5}, "pass_at_k": {"k": 2}}.get(name, {})
    guide = None if anchor == "forward_kl" else BranchGuide(threshold=0.5)
    trainer = make(
        guide, anchor=anchor, advantage={"name": name, **choice}, reward=binary, lora=False
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(4)
    batch = trainer._generate_and_score_completions(
        [trainer.train_dataset[i // 4] for i in range(8)]
    )
    rewards = torch.tensor(binary([[{"content": text}] for text in completions(trainer, batch)]))
    groups = rewards.view(2, 4)
    assert groups.std(1).max() > 0, "there was something to learn"
    stock = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(8)
    if name == "perplexity":
        surprisal = []
        for i in range(8):
            ids, n = row_alone(batch, i)
            with torch.no_grad():
                log_pi = trainer.model(ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
            surprisal.append(-log_pi.gather(-1, ids[-n:, None]).mean())
        by_group = torch.stack(surprisal).view(2, 4)
        w = (by_group - by_group.mean(1, keepdim=True)) / by_group.std(1, False, keepdim=True)
        expected = stock * (1 - 0.5 * w.view(8))
    elif name == "negative_samples":
        expected = torch.where(rewards == 1, 0.1, -1.0)
    else:  # of 6 pairs of 4 completions, by the number of correct ones: right, wrong
        table = {0: (0, 0), 1: (1, -(1 / 3)), 2: (5**-0.5, -(5**-0.5)), 3: (0, 0), 4: (0, 0)}
        pairs = [table[int(g.sum())] for g in groups]
        expected = torch.tensor([pairs[i // 4][int(rewards[i] == 0)] for i in range(8)])
    torch.testing.assert_close(batch["advantages"], expected.float(), atol=1e-4, rtol=1e-4)


def test_the_policys_own_signals_are_those_at_the_sampling_temperature(make):
    trainer, batch = one_batch(make(None, lora=False, temperature=0.7, change=larger))
    logps, entropies = trainer._policy_signals(batch)
    with torch.no_grad():
        for i in range(8):
            ids, n = row_alone(batch, i)
            logits = trainer.model(ids[None]).logits[0, -n - 1 : -1]
            law = torch.distributions.Categorical(logits=logits / 0.7)
            torch.testing.assert_close(logps[i, :n], law.log_prob(ids[-n:]), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(entropies[i, :n], law.entropy(), atol=1e-4, rtol=1e-4)


def test_advantages_of_completions_reach_every_update_of_a_split_batch(make):
    """Two updates a batch: the groups are apart by then, and each row still has what its own group
    gave it. A mean of four advantages of a standardised weight is no longer 0 in each half."""
    settings = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "beta": 0.0}
    ours = make(None, advantage={"name": "perplexity", "alpha": 0.5}, **settings)
    ours.model.train()
    ours.current_gradient_accumulation_steps = 1
    rows = [ours.train_dataset[i // 4] for i in range(8)]
    torch.manual_seed(3)
    scored = ours._generate_and_score_completions(rows)
    kept = {tuple(r): a for r, a in zip(*(scored[k].tolist() for k in KEPT), strict=True)}
    torch.manual_seed(3)
    ours._step = 0
    halves = []
    for _ in range(2):
        halves.append(ours._prepare_inputs(rows))
        ours._step += 1
    for half in halves:
        for ids, advantage in zip(*(half[k].tolist() for k in KEPT), strict=True):
            assert kept[tuple(ids)] == advantage


KEPT = ("completion_ids", "advantages")


def test_advantages_compose_with_dynamic_sampling(make):
    advantage = {"name": "negative_samples"}
    trainer = trained(make(None, advantage=advantage, reward=binary, dynamic_sampling=4))
    assert all(row["advantage/touched"] == 1 for row in trainer.state.log_history if "loss" in row)


# -- rivals that are settings of TRL's -------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon_high": 0.28, "num_iterations": 2, "learning_rate": 0.1, "change": larger},
        {"entropy_coef": 0.1},
        {"top_entropy_quantile": 0.2},
        {"lora": False, "sync_ref_model": True, "ref_model_sync_steps": 1},
    ],
)
def test_rivals_of_trls_own_are_stock_bit_for_bit_and_act(make, settings):
    stock, ours = trained(make(**settings)), trained(make(None, **settings))
    assert losses(stock) == losses(ours)
    assert torch.equal(weights(stock), weights(ours))
    neutral = {"epsilon_high": 0.2, "entropy_coef": 0.0, "top_entropy_quantile": 1.0}
    neutral["sync_ref_model"] = False
    without = trained(make(None, **settings | {k: v for k, v in neutral.items() if k in settings}))
    assert not torch.equal(weights(ours), weights(without))


def test_clip_higher_is_grpo_where_a_batch_has_one_update(make):
    """The ratio is 1: nothing is clipped at either bound. Hence the rivals' 4 updates a batch."""
    higher, plain = trained(make(None, epsilon_high=0.28)), trained(make(None, epsilon_high=0.2))
    assert torch.equal(weights(higher), weights(plain))


def adapters(trainer):
    """Weights of the trained adapter and of the reference's, by TRL's names of them."""
    named = dict(trainer.model.named_parameters())
    kept = [name for name in named if ".ref." in name]
    trained_ones = [named[name.replace(".ref.", ".default.")] for name in kept]
    return [p.detach().clone() for p in trained_ones], [named[name].detach() for name in kept]


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
    assert {step: equal for step, (equal, _) in at.items()} == {
        1: False,
        2: True,
        3: False,
        4: True,
    }
    assert at[1][1] > 0 and at[2][1] == 0 and at[3][1] > 0
    kl = [row["kl_ref"] for row in trainer.state.log_history if "loss" in row]
    assert kl[1] > 1e-4 and kl[2] < 1e-6 < kl[3], "the step after a reset starts at its reference"


def test_a_reference_that_is_reset_is_resumed_where_it_was(make, tmp_path):
    settings = saved(tmp_path, max_steps=6, save_steps=3, reference_reset=2)
    whole = trained(make(None, **settings))
    again = make(None, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(whole)[3:] == losses(again)[3:]
    assert torch.equal(weights(whole), weights(again))
    for a, b in zip(adapters(whole)[1], adapters(again)[1], strict=True):
        assert torch.equal(a, b)
    never = trained(make(None, **settings | {"reference_reset": 0, "save_strategy": "no"}))
    assert not torch.equal(weights(never), weights(whole))
