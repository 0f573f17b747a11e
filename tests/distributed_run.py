"""A short SageTrainer run for test_distributed.py, alone or under ``accelerate launch``.

    python tests/distributed_run.py MODEL OUT BATCH METHOD...

The completions are a function of the prompt and of the position in its group, so that one process
with 16 rollouts a step and two with 8 each train on the same global batch.
"""

import json
import os
import sys
import zlib
from pathlib import Path

# first
from sage_lib.algorithm.backend import GRPOConfig

# isort: split

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trainer_cases import SETTINGS
from transformers import AutoModelForCausalLM

from sage_lib.algorithm.guides import BranchGuide, GuideInputs, RandomGuide
from sage_lib.algorithm.trainer import SageTrainer
from sage_lib.errors import SageError
from sage_lib.policy import tiny_qwen
from sage_lib.tasks import prompts

METHODS = {
    "branch": {"guide": BranchGuide(threshold=0.5)},
    "dapo": {"guide": BranchGuide(threshold=0.5), "loss_type": "dapo"},
    "sequence": {"guide": BranchGuide(threshold=0.5), "kl_form": "sequence"},
    "forward_kl": {"kl_form": "forward_kl"},
    "forward_kl_dapo": {"kl_form": "forward_kl", "loss_type": "dapo"},
    "random": {"guide": RandomGuide()},
    "full": {"guide": BranchGuide(threshold=0.5), "lora": False},
    # What a configuration for FSDP must not say; transformers reads it as it loads a model.
    "ram_efficient": {"lora": False, "environment": {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}},
}
#: Step of the checkpoint that a run is resumed from.
SAVED = 2


def shard_on_the_processor() -> None:
    """Let accelerate, which shards on GPUs alone, do it on the processor over gloo."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def set_device(self: PartialState) -> None:
        self.device = torch.device("cpu")

    torch.distributed.init_process_group("gloo")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = set_device


def rollouts(prompts, trainer) -> dict:
    """Six tokens and an end for each prompt: a function of the prompt, its place in the group and
    the step."""
    tokenizer = trainer.processing_class
    seen: dict[str, int] = {}
    prompt_ids, completion_ids = [], []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        key = json.dumps(ids)
        place = seen.get(key, 0) % trainer.num_generations
        seen[key] = seen.get(key, 0) + 1
        seed = zlib.crc32(key.encode()) + 7919 * place + 31 * trainer.state.global_step
        drawn = torch.randint(10, 60, (6,), generator=torch.Generator().manual_seed(seed))
        prompt_ids.append(ids)
        completion_ids.append([*drawn.tolist(), tokenizer.eos_token_id])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def make(model_folder: str, out: str, method: str, batch: str) -> tuple[SageTrainer, list]:
    torch.manual_seed(0)
    chosen = dict(METHODS[method])
    os.environ.update(chosen.pop("environment", {}))
    guide, kl_form = chosen.pop("guide", None), chosen.pop("kl_form", "k3")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    if chosen.pop("lora", True):
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
    rows = [{"prompt": prompts.messages(f"reach {n} from 1 2 3 4")} for n in range(16)]
    noise = []

    def watched(inputs: GuideInputs) -> torch.Tensor:
        q = guide(inputs)
        noise.append(q.tolist())
        return q

    settings = {"output_dir": f"{out}.{method}.run", "per_device_train_batch_size": int(batch)}
    settings |= {"max_completion_length": 7, "max_steps": 4, "save_steps": SAVED}
    settings["save_strategy"] = "steps" if method == "branch" else "no"
    trainer = SageTrainer(
        model=model,
        processing_class=tiny_qwen.load_tokenizer(Path(model_folder)),
        train_dataset=Dataset.from_list(rows),
        guide=None if guide is None else watched,
        kl_form=kl_form,
        reward_funcs=lambda completion_ids, **_: [sum(ids) % 11 / 11 for ids in completion_ids],
        rollout_func=rollouts,
        args=GRPOConfig(**SETTINGS | settings | chosen),
    )
    return trainer, noise


def weights(trainer: SageTrainer) -> list[float]:
    trained = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trained]
    return torch.cat([p.flatten() for p in whole]).tolist()


def run(model_folder: str, out: str, batch: str, method: str) -> None:
    trainer, noise = make(model_folder, out, method, batch)
    found: dict = {"processes": trainer.accelerator.num_processes, "error": None}
    try:
        trainer.train()
    except SageError as error:
        found["error"] = str(error)
    found["weights"], found["noise"] = weights(trainer), noise
    found["sharded"] = trainer.is_fsdp_enabled
    found["log"] = [r for r in trainer.state.log_history if "loss" in r]
    if trainer.args.save_strategy == "steps":
        again, _ = make(model_folder, out, method, batch)
        again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{SAVED}")
        found["resumed"] = weights(again)
    Path(f"{out}.{method}.{trainer.accelerator.process_index}").write_text(json.dumps(found))


if __name__ == "__main__":
    if "ACCELERATE_USE_FSDP" in os.environ:
        shard_on_the_processor()
    for name in sys.argv[4:]:
        run(*sys.argv[1:4], name)
