"""A SageTrainer on the tiny model, and what tests of it share."""

import pytest
import torch
from datasets import Dataset, IterableDataset

from sage_lib.policy import tiny_qwen
from sage_lib.tasks import prompts

#: Arguments of SageTrainer beside its guide.
OWN = ("kl_form", "dynamic_sampling", "other_reference", "ref_model", "merge_adapter")
OWN += ("trim_padding", "share_prompts", "advantage", "reference_reset", "guide_model")
OWN += ("anchor", "reference")  # former names


#: Of GRPOConfig.
SETTINGS = {
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


def spread(completions, **kwargs):
    """A reward of which any spread will do."""
    return [len(turns[0]["content"]) % 7 / 7 for turns in completions]


@pytest.fixture(scope="module")
def make(tiny_model, tmp_path_factory):
    """A function that makes a trainer: stock GRPOTrainer, or a SageTrainer with a guide or None."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from sage_lib.algorithm.backend import GRPOConfig, GRPOTrainer
    from sage_lib.algorithm.trainer import SageTrainer

    rows = [
        {"prompt": prompts.messages(f"reach {n} from 1 2 3 4"), "answer": str(n)} for n in range(8)
    ]

    def trainer(
        guide="stock",
        lora=True,
        reward=spread,
        base=tiny_model,
        data=Dataset,
        change=None,
        args=None,
        **given,
    ):
        """``lora``: what differs in the adapter's settings, or whether there is one; ``new``: TRL
        makes it. ``change``: what happens to the model before the trainer sees it. ``given``:
        arguments of SageTrainer, and settings of GRPOConfig; ``args``: one in their place."""
        own = {name: given.pop(name) for name in OWN if name in given}
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
        config = {**SETTINGS, "output_dir": str(tmp_path_factory.mktemp("run"))}
        arguments = {
            "model": model,
            "processing_class": tiny_qwen.load_tokenizer(tiny_model),
            "reward_funcs": reward,
            "train_dataset": Dataset.from_list(rows),
            "args": args
            or GRPOConfig(**{k: v for k, v in (config | given).items() if v != "default"}),
        }
        if data is IterableDataset:
            arguments["train_dataset"] = arguments["train_dataset"].to_iterable_dataset()
        if new:
            arguments["peft_config"] = adapter
        if guide == "stock":
            return GRPOTrainer(**arguments)
        return SageTrainer(guide=guide, **own, **arguments)

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


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def completions(trainer, batch):
    decode = trainer.processing_class.batch_decode
    return decode(batch["completion_ids"], skip_special_tokens=True)


def row_alone(batch, i):
    """Token ids of one row without its padding, and the length of its completion."""
    prompt = batch["prompt_ids"][i][batch["prompt_mask"][i] == 1]
    completion = batch["completion_ids"][i][batch["completion_mask"][i] == 1]
    return torch.cat([prompt, completion]), len(completion)


def larger(model):
    """The model with logits that are large enough for noise and rounding to show."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(50 if p.dim() > 1 else 1)


def one_batch(trainer, draw=None):
    """The trainer in its second step, moved off its reference, and a batch for its loss."""
    batch = drawn(trainer, draw or trainer._prepare_inputs)
    trainer.state.global_step, trainer.state.max_steps = 1, 3
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return trainer, batch


def drawn(trainer, draw=None, seed=3):
    """A batch of two groups, as it is scored or as ``draw`` hands it on."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(seed)
    draw = draw or trainer._generate_and_score_completions
    return draw([trainer.train_dataset[i // 4] for i in range(8)])


def both(batch):
    """Token ids and attention of prompts and completions, and the longest completion."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    return ids, seen, batch["completion_ids"].shape[1]


def resumed(make, folder, step, *given, **settings):
    """A run, and the same one resumed at a step: whether losses and weights are the same."""
    whole, again = trained(make(*given, **settings)), make(*given, **settings)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    same = losses(whole)[step:] == losses(again)[step:]
    return whole, again, same and torch.equal(weights(whole), weights(again))


def saved(folder, **settings):
    """Settings of a run that keeps checkpoints in ``folder``."""
    return {"save_strategy": "steps", "output_dir": str(folder)} | settings


def binary(completions, **kwargs):
    """A reward of 0 or 1 that differs within groups of the tiny model."""
    return [float(len(c[0]["content"]) % 2) for c in completions]


def adapters(trainer):
    """Weights of the trained adapter and of the reference's, by TRL's names of them."""
    named = dict(trainer.model.named_parameters())
    kept = [name for name in named if ".ref." in name]
    trained_ones = [named[name.replace(".ref.", ".default.")] for name in kept]
    return [p.detach().clone() for p in trained_ones], [named[name].detach() for name in kept]


LORA = {"target_modules": ["q_proj", "v_proj", "down_proj"], "lora_alpha": 16}

DEFAULTS = {"use_bias_correction_kl": "default", "loss_type": "default"}


def named(model):
    return [name for name, _ in model.named_modules()]
