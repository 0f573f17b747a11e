"""TRL's own tests of GRPOTrainer, with SageTrainer in its place, on tiny local models.

TRL's wheel and source archive hold no tests, and its tests load models and data from a hub. So each
case here is the name of one of TRL's tests, the arguments that it uses, and what it checks, on a
random model with a word-level tokenizer. Every case is run three times: by GRPOTrainer, by
SageTrainer without any argument of its own, which must end with the same weights bit for bit, and
by SageTrainer with a guide. The names are those of TRL's tests/test_grpo_trainer.py between 1.14
and 1.16; what is left out stands in LEFT_OUT with its reason.
"""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sage_lib.algorithm.guides import BranchGuide
from sage_lib.policy import tiny_qwen

pytestmark = pytest.mark.filterwarnings("ignore")

GUIDE = BranchGuide(threshold=0.5, ratio=0.3)
#: What nearly all of TRL's tests set, two steps instead of its nine, and what makes a run short and
#: silent.
SHARED = {
    "learning_rate": 0.1,
    "per_device_train_batch_size": 3,
    "num_generations": 3,
    "max_completion_length": 8,
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "seed": 5,
}


# -- rewards, as TRL's tests have them -------------------------------------------------------------


def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def longer(completions, **kwargs):
    return [float(len(text_of(c))) for c in completions]


def letters(completions, **kwargs):
    return [float(len(set(text_of(c)))) for c in completions]


def ones(completions, **kwargs):
    return [1.0] * len(completions)


def zeros(completions, **kwargs):
    return [0.0] * len(completions)


def nones(completions, **kwargs):
    return [None] * len(completions)


async def later(completions, **kwargs):
    await asyncio.sleep(0)
    return letters(completions)


def near_the_column(completions, some_values, **kwargs):
    pairs = zip(completions, some_values, strict=True)
    return [float(abs(len(c) - value)) for c, value in pairs]


def reads_the_state(completions, trainer_state, **kwargs):
    assert trainer_state.global_step >= 0
    return letters(completions)


def logs_a_column(completions, log_extra, **kwargs):
    log_extra("test_column", [c[:5] for c in completions])
    return longer(completions)


def logs_a_metric(completions, log_metric, **kwargs):
    log_metric("custom_accuracy", 0.75)
    return longer(completions)


# -- the cases -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One of TRL's tests."""

    test: str  # TRL's name of it
    settings: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig, beside SHARED
    rewards: tuple[Any, ...] = ("model",)  # "model": a sequence classifier
    data: str = "standard"  # of the training rows: standard, conversational, iterable
    kind: str = "qwen2"  # of the model
    lora: str = ""  # "config": TRL makes the adapter; "model": it is there already
    generated: str = ""  # what a stub of generate returns: "mixed" or "truncated" completions
    evaluated: bool = False  # there is an eval_dataset
    moves: bool = True  # all trained weights change
    logged: tuple[str, ...] = ()  # metrics of a step that must be there
    slow: bool = False  # it asks little that another one does not

    def __str__(self):
        said = [f"{v}" for v in self.settings.values()] + [self.data, self.kind]
        return "-".join([self.test.removeprefix("test_"), *said])


WEIGHTED = {"reward_weights": [0.7, 0.3]}
ENTROPY = ("policy_loss", "entropy_coef")
ADAPTIVE = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 15.0}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}


def loss_type_case(loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    longest = {"max_completion_length": 16, "gradient_accumulation_steps": 2}
    settings = {"loss_type": loss_type, "importance_sampling_level": level, **longest}
    # test_trainer.py has the others against stock, too.
    slow = loss_type not in ("dapo", "luspo", "vespo")
    return Case("test_train_loss_types", settings, slow=slow)


CASES = [
    *(Case("test_train", kind=k) for k in ("qwen2", "cohere2", "qwen3_moe")),
    Case("test_train", kind="gpt_oss", slow=True),
    Case("test_train_dataset_format", data="standard", slow=True),
    Case("test_train_dataset_format", data="conversational"),
    *map(loss_type_case, ("bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")),
    Case("test_train_with_eval", EVALUATED, evaluated=True),
    Case(
        "test_train_with_num_generations_eval",
        {**EVALUATED, "num_generations_eval": 1},
        evaluated=True,
    ),
    Case(
        "test_train_eval_on_start",
        {**EVALUATED, "eval_on_start": True, "loss_type": "grpo"},
        evaluated=True,
    ),
    Case("test_train_with_iterable_dataset", data="iterable"),
    Case("test_train_multiple_iterations", {"num_iterations": 2}),
    Case("test_train_peft_config", lora="config"),
    Case("test_train_peft_model", lora="model"),
    Case("test_train_moe_peft_model", {"beta": 0.1}, kind="gpt_oss", lora="experts"),
    Case(
        "test_train_peft_with_gradient_checkpointing",
        {"gradient_checkpointing": True},
        lora="config",
    ),
    Case("test_train_different_reward_model", rewards=("other model",), data="conversational"),
    Case("test_train_reward_func_standard", rewards=(longer,)),
    Case("test_train_reward_func_conversational", rewards=(longer,), data="conversational"),
    Case("test_train_multiple_reward_funcs", rewards=(longer, letters)),
    Case("test_train_sync_and_async_reward_funcs", rewards=(longer, ones, later)),
    Case("test_train_multiple_reward_funcs_with_None_output", rewards=(longer, nones)),
    Case(
        "test_train_multiple_reward_funcs_with_weights",
        WEIGHTED,
        rewards=(longer, letters),
        logged=("rewards/longer/mean", "rewards/longer/std", "rewards/letters/std"),
    ),
    Case("test_train_multiple_mixed_reward_funcs", rewards=(longer, "model")),
    Case("test_train_reward_func_additional_column", rewards=(near_the_column,)),
    Case(
        "test_train_with_sync_ref_model",
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    ),
    Case("test_train_beta_non_zero", {"beta": 0.1}),
    Case("test_train_with_pad_to_multiple_of", {"pad_to_multiple_of": 8}),
    Case("test_train_with_off_policy_mask", {"off_policy_mask_threshold": 0.5}),
    Case("test_train_bias_correction_kl", {"beta": 0.1, "use_bias_correction_kl": True}),
    Case("test_train_bias_correction_kl", {"beta": 0.1, "use_bias_correction_kl": False}),
    Case("test_train_with_cast_lm_head_to_fp32", {"cast_lm_head_to_fp32": True}, kind="qwen3"),
    Case("test_train_with_cast_lm_head_to_fp32", {"cast_lm_head_to_fp32": True}, kind="gemma2"),
    Case("test_train_with_static_entropy", {"entropy_coef": 0.1}, logged=ENTROPY),
    Case("test_train_with_adaptive_entropy", ADAPTIVE, logged=ENTROPY),
    Case(
        "test_train_with_adaptive_entropy_gradient_accumulation",
        {**ADAPTIVE, "gradient_accumulation_steps": 2},
    ),
    Case("test_train_with_entropy_filter", {"top_entropy_quantile": 0.2}),
    Case(
        "test_train_with_additional_generation_kwargs",
        {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1},
    ),
    Case(
        "test_train_with_generation_kwargs",
        {
            "generation_kwargs": {
                "do_sample": True,
                "top_k": 50,
                "num_beams": 2,
                "length_penalty": -0.1,
            }
        },
    ),
    Case(
        "test_train_normalize_then_sum_aggregation",
        {"multi_objective_aggregation": "normalize_then_sum"},
        rewards=(longer, letters),
    ),
    *(
        Case("test_train_scale_rewards", {"scale_rewards": how}, slow=isinstance(how, bool))
        for how in (False, "group", "batch", True, "none")
    ),
    Case(
        "test_train_with_mask_truncated_completions",
        {"mask_truncated_completions": True, "loss_type": "dapo"},
        generated="mixed",
    ),
    Case(
        "test_train_with_mask_truncated_completions_all_masked",
        {"mask_truncated_completions": True, "loss_type": "dapo"},
        generated="truncated",
        moves=False,
    ),
    Case("test_warning_raised_all_rewards_none", rewards=(nones,), moves=False),
    Case(
        "test_train_num_generations_larger_than_batch_size",
        {"num_generations": 6, "gradient_accumulation_steps": 2},
    ),
    Case("test_train_delta_clipping", {"delta": 2.0}),
    Case("test_train_multiple_dataloader_workers", {"dataloader_num_workers": 2}, slow=True),
    Case("test_train_with_reward_func_accessing_trainer_state", rewards=(reads_the_state,)),
    Case(
        "test_train_reward_func_with_log_extra", {"log_completions": True}, rewards=(logs_a_column,)
    ),
    Case(
        "test_train_reward_func_with_log_metric",
        rewards=(logs_a_metric,),
        logged=("custom_accuracy",),
    ),
    Case(
        "test_train_sequence_importance_sampling",
        {"num_iterations": 2, "importance_sampling_level": "sequence"},
    ),
    Case(
        "test_train_with_chat_template_kwargs",
        {"chat_template_kwargs": {"enable_thinking": False}},
        data="conversational",
        kind="qwen3",
    ),
    *(
        Case(
            "test_reward_metric_reflects_reward_weights",
            {**WEIGHTED, "multi_objective_aggregation": how},
            rewards=(ones, zeros),
            moves=False,
            slow=how == "sum_then_normalize",
        )
        for how in ("sum_then_normalize", "normalize_then_sum")
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
            slow=(loss_type, quantile) not in (("grpo", 1.0), ("luspo", 1.0), ("dapo", 0.2)),
        )
        for loss_type in ("grpo", "dr_grpo", "dapo", "luspo")
        for quantile in (1.0, 0.2)
    ),
]


# -- models and data -------------------------------------------------------------------------------

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "cohere2": {},
    "gemma2": {},
    "gpt_oss": EXPERTS,
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 16},
}


@pytest.fixture(scope="module")
def models_of(tmp_path_factory):
    """From a kind and a tokenizer to the folder of a random model of that kind."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    made = {}

    def folder(kind, tokenizer):
        key = kind, len(tokenizer)
        if key not in made:
            torch.manual_seed(1)
            shape = {**SHAPE, **KINDS[kind], "vocab_size": len(tokenizer)}
            if kind == "qwen2":
                del shape["head_dim"]
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape))
            with torch.no_grad():  # logits that differ, as those of a trained model do
                for p in model.parameters():
                    p.mul_(10 if p.dim() > 1 else 1)
            made[key] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[key])
            tokenizer.save_pretrained(made[key])
        return made[key]

    return folder


def words():
    return tiny_qwen.tokenizer(99, 1024)


def reward_model(tokenizer, hidden_size=16):
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(2)
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
    shape |= {"hidden_size": hidden_size, "vocab_size": len(tokenizer), "num_labels": 1}
    model = Qwen2ForSequenceClassification(Qwen2Config(**shape))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10 if p.dim() > 1 else 1)
    return model


def rows_of(data):
    """Twelve prompts, with a column besides."""
    questions = [f"reach {n} from 1 2 3 4" for n in range(12)]
    asked = [[{"role": "user", "content": q}] for q in questions]
    prompts = asked if data == "conversational" else questions
    rows = Dataset.from_list([{"prompt": p, "some_values": n} for n, p in enumerate(prompts)])
    return rows.to_iterable_dataset() if data == "iterable" else rows


def trainers():
    from sage_lib.algorithm.backend import GRPOTrainer
    from sage_lib.algorithm.trainer import SageTrainer

    return {"stock": GRPOTrainer, "plain": SageTrainer, "guided": SageTrainer}


@pytest.fixture(scope="module")
def build(models_of, tmp_path_factory):
    """From a case and an arm ("stock", "plain", "guided") to its trainer, ``more`` in place of what
    the case gives."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from sage_lib.algorithm.backend import GRPOConfig

    adapters = {
        "config": {"target_modules": ["q_proj", "v_proj"]},
        "model": {"target_modules": ["q_proj", "v_proj"]},
        "experts": {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]},
    }

    def trainer(case, arm, tokenizer=None, **more):
        tokenizer = words() if tokenizer is None else tokenizer
        settings = SHARED | case.settings
        if arm == "guided" and not settings.get("beta"):
            settings["beta"] = 0.1
        folder = models_of(case.kind, tokenizer)  # which draws, the first time
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder)
        arguments = {
            "model": model,
            "processing_class": tokenizer,
            "reward_funcs": list(case.rewards),
            "train_dataset": rows_of(case.data),
            "args": GRPOConfig(output_dir=str(tmp_path_factory.mktemp("run")), **settings),
        }
        if case.lora:
            adapter = LoraConfig(r=4, task_type="CAUSAL_LM", **adapters[case.lora])
            if case.lora == "config":
                arguments["peft_config"] = adapter
            else:
                arguments["model"] = get_peft_model(model, adapter)
        if case.evaluated:
            arguments["eval_dataset"] = rows_of(case.data).select(range(3))
        sizes = {"model": 16, "other model": 32}
        if sizes.keys() & set(case.rewards):
            arguments["reward_funcs"] = [
                reward_model(tokenizer, sizes[r]) if r in sizes else r for r in case.rewards
            ]
            arguments["reward_processing_classes"] = [
                words() if r in sizes else None for r in case.rewards
            ]
        if arm == "guided":
            arguments["guide"] = GUIDE
        return trainers()[arm](**arguments | more)

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


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=pytest.mark.slow if c.slow else []) for c in CASES],
)
def test_a_run_of_trls_is_bit_for_bit_the_same_and_takes_a_guide(build, case, monkeypatch, caplog):
    caplog.set_level("WARNING", logger="trl.trainer.grpo_trainer")

    def run(arm):
        trainer = build(case, arm)
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
            moves = case.moves or (arm == "guided" and case.generated != "truncated")
            assert same == (frozen or not moves), f"{arm}: {name} has {'not ' * same}changed"
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
    if case.rewards == (nones,):
        said = [r for r in caplog.records if "All reward functions returned None" in r.message]
        assert len(said) >= 3, "TRL says so in every run"


# -- what is not a run of its own ------------------------------------------------------------------

#: Names of TRL's tests to the test here that has their question.
ASKED = {}


def asks(*names):
    def noted(test):
        ASKED.update(dict.fromkeys(names, test.__name__))
        return test

    return noted


@asks("test_init_minimal")
@pytest.mark.parametrize("arm", ["stock", "plain"])
def test_a_model_a_reward_and_data_are_enough(models_of, tmp_path, monkeypatch, arm):
    monkeypatch.chdir(tmp_path)  # where TRL's default output folder goes
    tokenizer = words()
    made = trainers()[arm](
        model=str(models_of("qwen2", tokenizer)),
        reward_funcs=reward_model(tokenizer),
        train_dataset=rows_of("standard"),
        processing_class=tokenizer,
        reward_processing_classes=words(),
    )
    assert made.model.config.model_type == "qwen2" and made.ref_model is None


def split_of(kind):
    """Three rows as one of the six kinds of data that TRL evaluates on."""
    rows = rows_of("standard").select(range(3))
    if "iterable" in kind:
        rows = rows.to_iterable_dataset()
    if kind in ("dataset", "iterable_dataset"):
        return rows
    both = {"data1": rows, "data2": rows}
    if kind == "dataset_dict":
        return DatasetDict(both)
    return IterableDatasetDict(both) if kind == "iterable_dataset_dict" else both


EVALUATION_DATA = [
    "dataset",
    "iterable_dataset",
    "dataset_dict",
    "iterable_dataset_dict",
    "dict_of_dataset",
    "dict_of_iterable_dataset",
]
PLAIN = Case("", {"per_device_eval_batch_size": 3}, rewards=(longer,))
ITERABLE = Case("", rewards=(longer,), data="iterable")


@asks("test_init_with_eval_dataset", "test_evaluate_with_eval_dataset")
@pytest.mark.parametrize("kind", EVALUATION_DATA)
def test_an_evaluation_is_that_of_stock_trl(build, kind):
    data = split_of(kind)
    at_init = build(PLAIN, "plain", eval_dataset=data)
    if isinstance(data, dict):
        assert set(at_init.eval_dataset) == {"data1", "data2"}
    else:
        assert at_init.eval_dataset is data
    found = {
        arm: build(PLAIN, arm).evaluate(eval_dataset=data) for arm in ("stock", "plain", "guided")
    }
    names = ["eval_loss"] if not isinstance(data, dict) else ["eval_data1_loss", "eval_data2_loss"]
    for name in names:
        assert found["stock"][name] == found["plain"][name]
        assert found["guided"][name] == pytest.approx(found["plain"][name], abs=1e-5), "KL is 0"


@asks(
    "test_iterable_dataset_forces_num_workers_zero",
    "test_iterable_eval_keeps_map_style_train_workers",
)
def test_workers_are_where_trl_has_them(build):
    workers = {"args": build(PLAIN, "stock").args}
    workers["args"].dataloader_num_workers = 4
    assert build(ITERABLE, "plain", **workers).args.dataloader_num_workers == 0
    workers["args"].dataloader_num_workers = 4
    mixed = build(PLAIN, "plain", eval_dataset=split_of("iterable_dataset"), **workers)
    assert mixed.get_train_dataloader().num_workers == 4
    assert mixed.get_eval_dataloader().num_workers == 0


def adapter_on_the_head():
    from peft import LoraConfig

    return LoraConfig(target_modules=["q_proj", "lm_head"])


class Silent:
    """An environment without a word."""

    def reset(self, **kwargs):
        return None


#: TRL's test: what is given, what TRL raises, what it says.
REFUSED = [
    ("test_init_with_train_dataset", {}, {"train_dataset": None}, ValueError, "is required"),
    (
        "test_init_with_train_dataset",
        {},
        {"train_dataset": DatasetDict({"train": rows_of("standard")})},
        TypeError,
        "must be a `Dataset` or",
    ),
    (
        "test_iterable_dataset_requires_dispatch_batches_false",
        {"accelerator_config": {"dispatch_batches": True}},
        {"train_dataset": rows_of("iterable")},
        ValueError,
        "dispatch_batches=False",
    ),
    (
        "test_liger_kernel_with_peft_lm_head_raises",
        {"use_liger_kernel": True},
        {"peft_config": adapter_on_the_head},
        ValueError,
        "lm_head",
    ),
    ("test_no_reward_source_raises", {}, {"reward_funcs": None}, ValueError, "No reward source"),
    (
        "test_dataset_required_without_environment",
        {},
        {"train_dataset": None},
        ValueError,
        "required",
    ),
    (
        "test_environment_owned_data_requires_max_steps",
        {"max_steps": -1},
        {"train_dataset": None, "environment_factory": Silent},
        ValueError,
        "max_steps",
    ),
    (
        "test_multiple_environments_without_dataset_raises",
        {},
        {"train_dataset": None, "environment_factory": {"a": Silent, "b": Silent}},
        ValueError,
        "requires a `train_dataset`",
    ),
    (
        "test_mismatched_reward_processing_classes_length",
        {},
        {"reward_funcs": [longer, letters], "reward_processing_classes": [None]},
        ValueError,
        "must match",
    ),
]


@asks(*(test for test, *_ in REFUSED))
@pytest.mark.parametrize(("test", "settings", "given", "error", "said"), REFUSED)
@pytest.mark.parametrize("arm", ["plain", "guided"])
def test_what_trl_refuses_is_refused_in_its_words(build, test, settings, given, error, said, arm):
    lazily = {"peft_config"} & given.keys()
    given = given | {name: given[name]() for name in lazily}
    tokenizer = talker() if "environment" in test else None
    with pytest.raises(error, match=said):
        build(Case(test, settings, rewards=(longer,)), arm, tokenizer, **given)


@asks("test_reward_func_wrong_number_of_rewards")
def test_too_few_rewards_are_refused(build):
    with pytest.raises(ValueError, match="returned 1 rewards"):
        build(Case("", rewards=(lambda **_: [1.0],)), "guided").train()


@asks("test_warning_raised_sequence_level_with_token_summed_loss")
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_trl_still_warns_of_sequences_weighed_by_their_length(build, loss_type, caplog):
    caplog.set_level("WARNING", logger="trl.trainer.grpo_trainer")
    settings = {"importance_sampling_level": "sequence", "loss_type": loss_type}
    build(Case("", settings, rewards=(zeros,)), "plain")
    said = "weights each sequence by its completion length" in caplog.text
    assert said == (loss_type != "grpo")


@asks(
    "test_correct_reward_processing_classes_list",
    "test_single_reward_model_with_single_processing_class",
)
def test_reward_models_keep_their_tokenizers(build):
    two = build(Case("", rewards=("model", "other model")), "plain")
    assert len(two.reward_processing_classes) == 2
    single = words()
    one = build(Case("", rewards=("model",)), "plain", reward_processing_classes=single)
    assert one.reward_processing_classes == [single]


@asks("test_luspo_loss_ignores_padding")
@pytest.mark.parametrize(("level", "beta"), [("sequence", 0.1), ("token", 0.0)])
def test_the_loss_of_luspo_ignores_padding(build, level, beta):
    settings = {"loss_type": "luspo", "beta": beta, "importance_sampling_level": level}
    made = {arm: build(Case("", settings, rewards=(longer,)), arm) for arm in ("stock", "plain")}
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 90, (2, 3), generator=generator)
    drawn = torch.randint(3, 90, (2, 6), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        logps, *_ = made["stock"]._get_per_token_logps_and_entropies(
            made["stock"].model,
            torch.cat([prompt, drawn], 1),
            torch.cat([torch.ones_like(prompt), mask], 1),
            6,
        )
    batch = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": drawn,
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0]),
        "old_per_token_logps": logps + 0.05,
        "ref_per_token_logps": logps + 0.05,
    }
    padded = {k: v + (mask == 0) if k.endswith("logps") else v for k, v in batch.items()}
    for training in (False, True):
        found = []
        for trainer in made.values():
            trainer.model.train(training)
            trainer.current_gradient_accumulation_steps = 1
            trainer.state.global_step = 1  # the start is not looked at again
            found += [trainer._compute_loss(trainer.model, b).item() for b in (batch, padded)]
        assert found[0] != 0 and len(set(found)) == 1


@asks("test_entropy_bonus_flows_gradients")
def test_entropies_have_a_gradient_where_there_is_a_bonus(build):
    """And as stock where there is none: TRL 1.15's kernel then leaves it to the backward pass."""
    for coefficient in (0.1, 0.0):
        found = []
        for arm in ("stock", "plain"):
            trainer = build(Case("", {"entropy_coef": coefficient}, rewards=(longer,)), arm)
            ids = torch.arange(8)[None]
            _, entropies, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), logits_to_keep=4, compute_entropy=True
            )
            found.append(entropies.requires_grad)
        assert found[0] == found[1] and (found[0] or not coefficient)


@asks("test_prepare_input_called_with_correct_data")
def test_batches_are_repeated_as_trl_repeats_them(build, monkeypatch):
    settings = {
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 4,
        "num_generations": 4,
        "per_device_train_batch_size": 6,
        "num_iterations": 2,
        "shuffle_dataset": False,
        "max_completion_length": 2,
        "max_steps": -1,
        "num_train_epochs": 1,
    }
    trainer, seen = build(Case("", settings, rewards=(longer,)), "guided"), []
    step = trainer.training_step
    monkeypatch.setattr(
        trainer,
        "training_step",
        lambda model, inputs, *a: seen.append(inputs) or step(model, inputs, *a),
    )
    trainer.train()
    prompts = [f"reach {n} from 1 2 3 4" for n in range(12)]
    asked = [[row["prompt"] for row in inputs] for inputs in seen]
    halves = [[p for p in half for _ in range(4)] for half in (prompts[:6], prompts[6:])]
    assert asked == [halves[0]] * 8 + [halves[1]] * 8


# -- rollouts, tools and environments --------------------------------------------------------------


def rollout(prompts, trainer):
    """Completions that nobody generated, of which the last token is the environment's."""
    tokenizer = trainer.processing_class
    asked = [tokenizer(p)["input_ids"] for p in prompts]
    drawn = [[5 + i, 6, 7, 8 + i, 9, 1][: 4 + i] for i in range(len(prompts))]
    return {
        "prompt_ids": asked,
        "completion_ids": drawn,
        "logprobs": [[-1.0] * len(ids) for ids in drawn],
        "env_mask": [[1] * (len(ids) - 1) + [0] for ids in drawn],
    }


class Watching:
    """GUIDE, which notes how many tokens count."""

    def __init__(self):
        self.counted = []

    def __call__(self, inputs):
        self.counted.append(int(inputs.mask.sum()))
        return GUIDE(inputs)


def run_by_all(build, case, tokenizer=None, generate=None, **given):
    """Run a case by all three; the guided trainer, the number of tokens that its guide counted in
    each batch, and the log."""
    watching, trained, counted = Watching(), {}, {}
    for arm in ("stock", "plain", "guided"):
        guide = {"guide": watching} if arm == "guided" else {}
        trainer = build(case, arm, tokenizer, **given, **guide)
        if generate is not None:
            trainer.model.generate = generate
        before = parameters(trainer)
        watching.counted.clear()  # it was tried
        trainer.train()
        trained[arm], counted[arm] = trainer, parameters(trainer)
        assert all(not torch.equal(p, counted[arm][n]) for n, p in before.items())
    assert losses(trained["stock"]) == losses(trained["plain"])
    assert all(torch.equal(p, counted["plain"][n]) for n, p in counted["stock"].items())
    log = [row for row in trained["guided"].state.log_history if "loss" in row]
    of_model = [row["completions/mean_length"] * len(row_group(trained["guided"])) for row in log]
    assert watching.counted == pytest.approx(of_model), "the guide sees the model's tokens alone"
    return trained["guided"], log


def row_group(trainer):
    return range(trainer.args.per_device_train_batch_size)


@asks("test_generate_prefers_rollout_func")
def test_a_rollout_function_is_asked_in_place_of_the_model(build):
    run_by_all(build, PLAIN, rollout_func=rollout)


@asks("test_generate_rollout_func_raises_when_required_keys_are_missing")
def test_a_rollout_without_log_probabilities_is_refused(build):
    def forgets(prompts, trainer):
        return {k: v for k, v in rollout(prompts, trainer).items() if k != "logprobs"}

    with pytest.raises(ValueError, match="rollout_func must return keys"):
        build(PLAIN, "guided", rollout_func=forgets).train()


def talker():
    """A tokenizer of bytes, with the words and the chat template by which Qwen3 calls tools: TRL
    parses the calls of templates that it knows."""
    from pathlib import Path

    import trl
    from tokenizers import AddedToken

    marks = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    alphabet = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    pad, end, start = marks
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=pad, eos_token=end, padding_side="left"
    )
    fast.add_special_tokens({"additional_special_tokens": [start]})
    plain = (
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    )
    fast.add_tokens([AddedToken(word, special=False, normalized=False) for word in plain])
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()
    return fast


def call(name, **arguments):
    asked = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{asked}\n</tool_call><|im_end|>"


def says(tokenizer, *texts):
    """A stub of generate: the texts to a batch of as many, to fewer "Done!"."""

    def generate(input_ids, **kwargs):
        answers = texts if len(input_ids) == len(texts) else ["Done!<|im_end|>"] * len(input_ids)
        ids = tokenizer(list(answers), padding=True, padding_side="right", return_tensors="pt")
        return torch.cat([input_ids, ids["input_ids"]], 1)

    return generate


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product.
    """
    return a * b


async def multiply_later(a: int, b: int) -> int:
    return a * b


multiply_later.__doc__ = multiply.__doc__


TOLD = Case("", {"max_completion_length": 256}, rewards=(longer,), data="conversational")


@asks("test_train_with_tools", "test_tools_without_jmespath")
@pytest.mark.parametrize("tool", [multiply, pytest.param(multiply_later, marks=pytest.mark.slow)])
def test_tools_are_called_and_their_answers_are_not_guided(build, tool):
    tokenizer, name = talker(), tool.__name__
    texts = call(name, a=3, b=4), call(name, a=3, c=4), "I don't know any tool<|im_end|>"
    _, log = run_by_all(build, TOLD, tokenizer, says(tokenizer, *texts), tools=[tool])
    for row in log:
        assert row["tools/call_frequency"] == pytest.approx(2 / 3)
        assert row["tools/failure_frequency"] == pytest.approx(1 / 2)


@asks("test_train_with_malformed_tool_calls")
def test_calls_that_are_none_are_text(build):
    tokenizer = talker()
    texts = (
        '<tool_call>\n{"arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>',
        '<toolcall>\n{"arguments": {"a": 3, "b": 4}}\n</toolcall><|im_end|>',
        '<tool_call>\n{"arguments": {a: 3, b: 4}}\n</tool_call> <|im_end|>',
    )
    run_by_all(build, TOLD, tokenizer, says(tokenizer, *texts), tools=[multiply])


class Counter:
    """An environment whose reward is how far it has counted."""

    def reset(self, **kwargs):
        assert "environment" not in kwargs, "it says which environment, and is not its own"
        self.counter = 0
        return "Count."

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter


class Rewarding(Counter):
    def get_reward(self) -> float:
        return float(self.counter)


class Echo:
    """An environment that repeats."""

    shouted: ClassVar[list[str]] = []

    def reset(self, **kwargs):
        return "Echo."

    def shout(self, text: str) -> str:
        """
        Shout the text.

        Args:
            text: What to shout.

        Returns:
            The text in upper case.
        """
        self.shouted.append(text)
        return text.upper()


COUNTED = call("increment", step=1), call("decrement", step=2), "I won't increment<|im_end|>"


@asks("test_train_with_environment_factory", "test_train_with_environment_owned_data")
def test_an_environment_is_played_in(build):
    tokenizer = talker()
    given = {"environment_factory": Counter, "train_dataset": None}
    guided, log = run_by_all(build, TOLD, tokenizer, says(tokenizer, *COUNTED), **given)
    assert all(row["tools/failure_frequency"] == pytest.approx(1 / 2) for row in log)
    assert [e.counter for e in guided.environments] == [1, 0, 0]


@asks("test_train_with_environment_owned_reward")
def test_the_reward_may_be_the_environments(build):
    tokenizer = talker()
    given = {"environment_factory": Rewarding, "train_dataset": None, "reward_funcs": None}
    guided, log = run_by_all(build, TOLD, tokenizer, says(tokenizer, *COUNTED), **given)
    assert guided.reward_func_names == ["Rewarding"] and guided.reward_weights.tolist() == [1.0]
    assert log[0]["rewards/Rewarding/mean"] == pytest.approx(1 / 3)


@asks(
    "test_environment_owned_reward_coexists_with_reward_funcs",
    "test_environment_owned_reward_mixed_environments",
)
def test_the_environments_reward_stands_beside_others(build):
    made = build(
        Case("", {"reward_weights": [0.5]}, rewards=(zeros,)),
        "plain",
        talker(),
        train_dataset=Dataset.from_dict({"environment": ["one", "two", "other"]}),
        environment_factory={"one": Rewarding, "two": Rewarding, "other": Echo},
    )
    assert made.reward_func_names == ["zeros", "Rewarding"]
    assert made.reward_weights.tolist() == [0.5, 1.0]
    playing = Rewarding()
    playing.reset()
    assert made.reward_funcs[-1](environments=[playing, Echo()]) == [0.0, None]


@asks("test_train_with_multiple_environments")
def test_every_row_plays_in_its_own_environment(build):
    tokenizer = talker()
    texts = (
        call("increment", step=1),
        "I won't<|im_end|>",
        call("shout", text="hi"),
        "Done<|im_end|>",
    )
    settings = {"per_device_train_batch_size": 4, "num_generations": 2, "shuffle_dataset": False}
    case = Case("", TOLD.settings | settings, rewards=(longer,))
    Echo.shouted.clear()
    _, log = run_by_all(
        build,
        case,
        tokenizer,
        says(tokenizer, *texts),
        train_dataset=Dataset.from_dict({"environment": ["counter", "echo"] * 4}),
        environment_factory={"counter": Counter, "echo": Echo},
    )
    assert Echo.shouted == ["hi"] * 2 * 3, "once a step of every run"
    assert all(row["tools/call_frequency"] == pytest.approx(2 / 4) for row in log)
    assert all(row["tools/failure_frequency"] == 0 for row in log)


@asks("test_train_with_unknown_environment_raises")
def test_an_environment_that_is_unknown_is_refused(build):
    given = {
        "train_dataset": rows_of("conversational").map(lambda row: {"environment": "unknown"}),
        "environment_factory": {"counter": Counter},
    }
    with pytest.raises(ValueError, match="not among the environments"):
        build(TOLD, "guided", talker(), **given).train()


# -- what is left out ------------------------------------------------------------------------------

#: Functions of TRL's trainer that are asked by themselves, and the tests that ask them. SageTrainer
#: has them as they are.
INHERITED = {
    "get_high_entropy_mask": (
        "test_compute_entropy_mask_0",
        "test_compute_entropy_mask_1",
        "test_compute_entropy_mask_lower_threshold",
        "test_compute_entropy_threshold_0",
        "test_compute_entropy_threshold_1",
        "test_compute_entropy_all_masked",
    ),
    "get_off_policy_mask": ("test_get_off_policy_mask", "test_get_off_policy_mask_padding"),
}

LEFT_OUT = {
    "no trainer: it asks transformers alone": (
        "test_generation_output_has_logprobs_field",
        "test_generation_output_logprobs_accepts_floats",
        "test_continuous_batching_config_has_return_logprobs",
        "test_generate_batch_accepts_continuous_batching_config",
    ),
    "needs vLLM, which is not a requirement": (
        "test_generate_rollout_func_syncs_vllm_weights_when_needed",
        "test_sampling_logps_none_yields_neutral_importance_ratio",
        "test_train_vllm",
        "test_train_vllm_and_peft",
        "test_train_vllm_structured_outputs",
        "test_train_vllm_importance_sampling_correction",
        "test_train_vllm_with_additional_generation_kwargs",
        "test_vlm_processor_vllm_colocate_mode",
    ),
    "needs Liger's kernel, which is not a requirement and which an anchor refuses": (
        "test_liger_kernel_with_peft_non_lm_head_target_allowed",
        "test_liger_kernel_with_peft_modules_to_save_lm_head_allowed",
        "test_train_with_off_policy_mask_with_liger",
        "test_compute_liger_loss_passes_vllm_is_ratio",
        "test_compute_liger_loss_dapo_normalizer",
        "test_train_with_liger_grpo_kernel",
        "test_train_with_liger_grpo_kernel_and_peft",
        "test_liger_grpo_kernel_importance_sampling",
    ),
    "of a later TRL: 1.15 does not ask": ("test_liger_kernel_with_peft_prompt_learning_raises",),
    "needs a GPU; a slow test in test_trainer.py has continuous batching on the processor": (
        "test_train_with_transformers_continuous_batching",
    ),
    "needs a model's own code from the hub": ("test_trust_remote_code",),
    "models of images, which no profile has": (
        "test_train_vlm",
        "test_train_vlm_with_pad_to_multiple_of",
        "test_train_vlm_beta_non_zero",
        "test_train_vlm_peft",
        "test_train_vlm_and_importance_sampling",
        "test_train_vlm_and_liger",
        "test_train_vlm_and_vllm",
        "test_train_vlm_multi_image",
        "test_train_vlm_log_multimodal_false",
        "test_train_with_tools_multimodal_response",
        "test_train_with_tools_text_response_multimodal_prompt",
    ),
}
#: Tests in TRL's file, each name counted once.
TRLS = 122


def test_every_test_of_trls_is_run_asked_inherited_or_left_out_with_a_reason():
    run = {case.test for case in CASES}
    inherited = [name for names in INHERITED.values() for name in names]
    left_out = [name for names in LEFT_OUT.values() for name in names]
    listed = [*run, *ASKED, *inherited, *left_out]
    assert len(listed) == len(set(listed)), "each stands in one place"
    assert len(listed) == TRLS


@pytest.mark.parametrize("name", INHERITED)
def test_what_trl_asks_by_itself_is_trls(name):
    made = trainers()
    assert getattr(made["plain"], name) is getattr(made["stock"], name)
