"""TRL's own tests of GRPOTrainer, with SageTrainer in its place, for the settings that it touches.

Each case is the name of one of TRL's tests, the arguments that it uses, and what it checks, on a
random model with a word-level tokenizer. Every case is run three times: by GRPOTrainer, by
SageTrainer with the KL that the arguments ask for, which must end with the same weights bit for
bit, and by SageTrainer with a guide.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset

from sage_lib.algorithm.guides import BranchGuide
from sage_lib.policy import tiny_qwen

pytestmark = pytest.mark.filterwarnings("ignore")

GUIDE = BranchGuide(threshold=0.5, ratio=0.3)
#: Two steps instead of TRL's nine, and what makes a run short and silent.
SHARED = {"learning_rate": 0.1, "max_steps": 2, "max_completion_length": 8, "seed": 5}
SHARED |= {"per_device_train_batch_size": 3, "num_generations": 3, "logging_steps": 1}
SHARED |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
SHARED |= {"use_cpu": True, "bf16": False}


def longer(completions, **kwargs):
    return [float(len(c)) for c in completions]


def letters(completions, **kwargs):
    return [float(len(set(c))) for c in completions]


def nones(completions, **kwargs):
    return [None] * len(completions)


@dataclass(frozen=True)
class Case:
    """One of TRL's tests."""

    test: str  # TRL's name of it
    settings: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig, beside SHARED
    rewards: tuple[Any, ...] = (longer,)
    kind: str = "qwen2"  # of the model
    lora: str = ""  # "config": TRL makes the adapter; "model": it is there already
    generated: str = ""  # what a stub of generate returns: "mixed" or "truncated" completions
    evaluated: bool = False  # there is an eval_dataset
    moves: bool = True  # all trained weights change
    logged: tuple[str, ...] = ()  # metrics of a step that must be there

    def __str__(self):
        said = [f"{v}" for v in self.settings.values()] + [self.kind]
        return "-".join([self.test.removeprefix("test_"), *said])


TWO = (longer, letters)
ENTROPY = ("policy_loss", "entropy_coef")
ADAPTIVE = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 15.0}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
TRUNCATED = {"mask_truncated_completions": True, "loss_type": "dapo"}


def loss_type_case(loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    longest = {"max_completion_length": 16, "gradient_accumulation_steps": 2}
    settings = {"loss_type": loss_type, "importance_sampling_level": level, **longest}
    return Case("test_train_loss_types", settings)


CASES = [
    Case("test_train", kind="qwen3_moe"),  # whose router has a loss of its own
    # test_trainer.py has the other losses against stock.
    *map(loss_type_case, ("dapo", "luspo", "vespo")),
    Case("test_train_with_eval", EVALUATED, evaluated=True),
    Case("test_train_multiple_iterations", {"num_iterations": 2}),
    Case("test_train_peft_config", lora="config"),
    Case("test_train_peft_model", lora="model"),
    Case("test_train_peft_config", {"gradient_checkpointing": True}, lora="config"),
    Case("test_train_multiple_reward_funcs_with_weights", {"reward_weights": [0.7, 0.3]}, TWO),
    Case("test_train_multiple_reward_funcs_with_None_output", rewards=(longer, nones)),
    Case(
        "test_train_with_sync_ref_model",
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    ),
    Case("test_train_with_off_policy_mask", {"off_policy_mask_threshold": 0.5}),
    Case("test_train_bias_correction_kl", {"beta": 0.1, "use_bias_correction_kl": True}),
    Case("test_train_bias_correction_kl", {"beta": 0.1, "use_bias_correction_kl": False}),
    Case(
        "test_train_with_adaptive_entropy_gradient_accumulation",
        {**ADAPTIVE, "gradient_accumulation_steps": 2},
        logged=ENTROPY,
    ),
    Case("test_train_with_entropy_filter", {"top_entropy_quantile": 0.2}),
    *(Case("test_train_scale_rewards", {"scale_rewards": how}) for how in ("batch", "none")),
    Case("test_train_with_mask_truncated_completions", TRUNCATED, generated="mixed"),
    Case(
        "test_train_with_mask_truncated_completions_all_masked",
        TRUNCATED,
        generated="truncated",
        moves=False,
    ),
    Case("test_train_delta_clipping", {"delta": 2.0}),
    Case(
        "test_train_sequence_importance_sampling",
        {"num_iterations": 2, "importance_sampling_level": "sequence"},
    ),
    *(
        Case(
            "test_entropy_bonus_scale",
            {
                "loss_type": loss_type,
                "importance_sampling_level": "sequence" if loss_type == "luspo" else "token",
                "top_entropy_quantile": quantile,
                "entropy_coef": 0.5,
                "max_completion_length": 16,
            },
            logged=ENTROPY,
        )
        for loss_type, quantile in (("grpo", 1.0), ("luspo", 1.0), ("dapo", 0.2))
    ),
]


SHAPE = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {"num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096}
SHAPE |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


@pytest.fixture(scope="module")
def models_of(tmp_path_factory):
    """From a kind and a tokenizer to the folder of a random model of that kind."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    made = {}

    def folder(kind, tokenizer):
        if kind not in made:
            torch.manual_seed(1)
            shape = {**SHAPE, **(MOE if kind == "qwen3_moe" else {}), "vocab_size": len(tokenizer)}
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape))
            with torch.no_grad():  # logits that differ, as those of a trained model do
                for p in model.parameters():
                    p.mul_(10 if p.dim() > 1 else 1)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


def rows():
    """Twelve prompts."""
    return Dataset.from_list([{"prompt": f"reach {n} from 1 2 3 4"} for n in range(12)])


@pytest.fixture(scope="module")
def build(models_of, tmp_path_factory):
    """From a case and a method ("stock", "plain", "guided") to its trainer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from sage_lib.algorithm.backend import GRPOConfig, GRPOTrainer
    from sage_lib.algorithm.trainer import SageTrainer

    def trainer(case, method):
        tokenizer = tiny_qwen.tokenizer(99, 1024)
        settings = SHARED | case.settings
        if method == "guided" and not settings.get("beta"):
            settings["beta"] = 0.1
        folder = models_of(case.kind, tokenizer)  # which draws, the first time
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder)
        more = {}
        if case.lora:
            adapter = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
            if case.lora == "config":
                more["peft_config"] = adapter
            else:
                model = get_peft_model(model, adapter)
        if case.evaluated:
            more["eval_dataset"] = rows().select(range(3))
        if method != "stock":
            more |= {"guide": GUIDE} if method == "guided" else {"kl_form": None}
        return (GRPOTrainer if method == "stock" else SageTrainer)(
            model=model,
            processing_class=tokenizer,
            reward_funcs=list(case.rewards),
            train_dataset=rows(),
            args=GRPOConfig(output_dir=str(tmp_path_factory.mktemp("run")), **settings),
            **more,
        )

    return trainer


def parameters(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def generates(kind):
    """A stub of generate: three completions of 8 tokens over and over, of which the first, or all
    of them, do not end."""
    ended = [[9, 10, 11, 1, 0, 0, 0, 0], [12, 13, 14, 15, 16, 17, 18, 1]]
    rows = [[3, 4, 5, 6, 7, 8, 9, 10], *(ended if kind == "mixed" else [[11] * 8, [12] * 8])]

    def generate(input_ids, **kwargs):
        drawn = torch.tensor([rows[i % 3] for i in range(len(input_ids))])
        return torch.cat([input_ids, drawn], 1)

    return generate


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_of_trls_is_bit_for_bit_the_same_and_takes_a_guide(build, case, monkeypatch):
    def run(method):
        trainer = build(case, method)
        if case.generated:
            monkeypatch.setattr(trainer.model, "generate", generates(case.generated))
        before = parameters(trainer)
        reference = None if trainer.ref_model is None else trainer.ref_model.state_dict()
        moved = {} if reference is None else {n: p.clone() for n, p in reference.items()}
        trainer.train()
        log = trainer.state.log_history
        assert log[-1]["train_loss"] is not None
        steps = [row for row in log if "loss" in row]
        assert len(steps) == 2 and all(key in row for row in steps for key in case.logged)
        after = parameters(trainer)
        for name, weight in before.items():
            frozen = not trainer.model.get_parameter(name).requires_grad
            same = torch.equal(weight, after[name])
            # An anchor that is not where the policy starts moves it without a reward, too.
            moves = case.moves or (method == "guided" and case.generated != "truncated")
            assert same == (frozen or not moves), f"{method}: {name} has {'not ' * same}changed"
        if case.settings.get("sync_ref_model"):
            now = trainer.ref_model.state_dict()
            assert all(not torch.equal(moved[n], now[n]) for n in moved)
        if case.evaluated:
            assert any("eval_loss" in row for row in log)
        if "use_adaptive_entropy" in case.settings:  # once for every update, not for every batch
            assert trainer.entropy_coef == pytest.approx(0.01 + 0.005 * 2)
        return trainer, after, steps

    (stock, theirs, _), (plain, ours, plainly) = run("stock"), run("plain")
    assert losses(stock) == losses(plain)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    _, _, guided = run("guided")
    acted = any(row.get("guide/acting", 0) > 0 for row in guided)
    assert acted == (case.generated != "truncated"), "a completion that counts is guided"
    if case.test == "test_entropy_bonus_scale" and case.settings["top_entropy_quantile"] == 1:
        for row in (*plainly, *guided):  # the mean entropy of tokens, whatever the loss type
            bonus = row["policy_loss"] - row["loss"]
            assert bonus == pytest.approx(0.5 * row["entropy"], rel=1e-3)
