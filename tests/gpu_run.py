"""A few steps of SageTrainer by one backend, and what came of them as JSON.

``python gpu_run.py trl`` or ``unsloth``; ``vllm`` after it: completions are drawn by vLLM;
``model`` after it: with the model in the folder SAGE_GPU_MODEL. A process of its own: Unsloth must
be imported before TRL, or not at all.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from sage_lib.algorithm import unsloth_first

BACKEND, *MORE = sys.argv[1:]
if BACKEND == "unsloth":
    unsloth_first.load_unsloth()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from trainer_cases import SETTINGS, spread  # noqa: E402

from sage_lib import GRPOConfig, SageTrainer  # noqa: E402
from sage_lib.experiment.profile import Model, load_profile  # noqa: E402
from sage_lib.policy import tiny_qwen  # noqa: E402
from sage_lib.tasks import prompts  # noqa: E402
from sage_lib.training.models import add_lora, load_model  # noqa: E402

#: Heads of 64 values, which every attention kernel takes.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LORA = {
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
#: Questions of 3 to 7 numbers: prompts of a batch differ in length.
ROWS = [
    {"prompt": prompts.messages(f"reach {n} from {' '.join('123456789'[: 3 + n % 5])}")}
    for n in range(20)
]


def by_token(inputs):
    """q from 0.7 to 1.3 by the token's id: wrong columns would be seen."""
    return torch.where(inputs.mask.bool(), 0.7 + 0.1 * (inputs.ids % 7), 1.0)


def trainer(folder, guide, lora=True, **given):
    """``given``: settings of GRPOConfig, and arguments of SageTrainer."""
    profile = load_profile(f"smoke+model.dtype={'bfloat16' if half() else 'float32'}")
    if "model" in MORE:
        own = dataclasses.replace(profile.model, name=str(folder), max_seq_length=1024)
        profile = dataclasses.replace(profile, model=own)
    model, tokenizer = load_model(profile, folder, not lora, False, BACKEND == "unsloth")
    if lora:
        model = add_lora(model, LORA, 0, False, BACKEND == "unsloth")
    ours = {name: given.pop(name) for name in ("anchor", "merge_adapter") if name in given}
    settings = {**SETTINGS, "output_dir": tempfile.mkdtemp(), "max_completion_length": 16}
    settings |= {"beta": 0.5, "learning_rate": 1e-3, "bf16": half(), "use_cpu": False}
    if "vllm" in MORE:
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    return SageTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(ROWS),
        guide=guide,
        reward_funcs=spread,
        args=GRPOConfig(**settings | given),
        **ours,
    )


def half():
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def first_loss(made):
    """The loss of a first batch of unequal prompts, and what it is by the ids alone: the policy is
    its reference yet, so the KL to q·pi_ref is q - log q - 1."""
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    batch = made._prepare_inputs([made.train_dataset[i] for i in (0, 0, 0, 0, 4, 4, 4, 4)])
    found = made.compute_loss(made.model, batch).item()
    mask = batch["completion_mask"].float()
    q = 0.7 + 0.1 * (batch["completion_ids"] % 7).float()
    token = -batch["advantages"].float()[:, None] + 0.5 * (q - q.log() - 1)
    expected = ((token * mask).sum(1) / mask.sum(1)).mean().item()
    padding = (batch["prompt_mask"] == 0).sum(1)
    return {"found": found, "expected": expected, "padding": int(padding.max() - padding.min())}


def steps(made):
    started = time.perf_counter()
    made.train()
    log = [row for row in made.state.log_history if "loss" in row]
    kept = ("loss", "kl", "kl_ref", "grad_norm", "guide/mean")
    rows = [{key: float(row[key]) for key in kept if key in row} for row in log]
    return {"seconds": time.perf_counter() - started, "log": rows}


#: What is tried: a guide or none, and what differs.
TRIED = {
    "lora": (by_token, {}),
    "lora, no guide": (None, {}),
    "lora, dr_grpo, bias corrected": (
        by_token,
        {"loss_type": "dr_grpo", "kl_form": "k3_corrected"},
    ),
    "lora, gradient checkpointing": (by_token, {"gradient_checkpointing": True}),
    "lora, merged": (by_token, {"merge_adapter": True}),
    "all weights": (by_token, {"lora": False, "learning_rate": 1e-5}),
}


def main():
    with tempfile.TemporaryDirectory() as made:
        folder = Path(os.environ["SAGE_GPU_MODEL"] if "model" in MORE else made)
        if "model" not in MORE:
            model = Model(tiny_qwen.NAME, 64, seed=0, architecture=SHAPE, largest_number=99)
            tiny_qwen.create(folder, model)
        said = {"dtype": "bfloat16" if half() else "float32", "first": {}, "runs": {}}
        said["first"] = first_loss(trainer(folder, by_token))
        for name, (guide, given) in list(TRIED.items())[: 1 if MORE else None]:
            said["runs"][name] = steps(trainer(folder, guide, **given))
        theirs = [
            c.__module__ for c in SageTrainer.__mro__ if not c.__module__.startswith("sage_lib")
        ]
        said["class"] = " ".join(theirs)
        said["unsloth"] = "unsloth" in sys.modules
        if torch.cuda.is_available():
            said["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        print("SAID " + json.dumps(said))


if __name__ == "__main__":  # vLLM's processes are spawned
    main()
