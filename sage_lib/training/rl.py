"""Stage 2: RL with verifiable rewards (Table 8), one run per method and seed, through SageTrainer."""

import dataclasses
import shutil
from collections.abc import Callable

# first: Unsloth patches what is imported after it
from sage_lib.algorithm.backend import GRPOConfig

# isort: split

import torch
from datasets import Dataset
from peft import PeftModel

from sage_lib.algorithm.guide_choice import resolve_guide
from sage_lib.algorithm.trainer import SageTrainer
from sage_lib.errors import SageError
from sage_lib.experiment import problems, runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import read_json
from sage_lib.tasks import countdown, prompts
from sage_lib.tasks.verifier import shared
from sage_lib.training.callbacks import StepLog, arguments, last_checkpoint, weights_hash
from sage_lib.training.sft import add_lora, load_model


def train(profile: Profile, run: Run, method: str, seed: int) -> dict:
    """Train one method from the SFT model; save the merged policy; returns the run record."""
    reference = runs.sft_run(profile)
    if not reference.done():
        raise SageError(
            f"RL starts from the SFT model of profile {profile.name}, which is not there: run the stage sft first"
        )
    chosen = profile.methods[method]
    settings = {**profile.rl, **chosen.rl, "seed": seed}
    guide = (
        resolve_guide(chosen.guide, profile.guide, read_json(reference.measured / "entropy.json"))
        if chosen.guide
        else None
    )
    lora = profile.rl_lora if chosen.lora else None
    record = Record(
        "rl",
        profile.name,
        run.fingerprint,
        seed,
        {
            "method": method,
            **dataclasses.asdict(chosen),
            "rl": settings,
            "lora": lora,
            "q": repr(guide),
        },
    )
    model, tokenizer = load_model(profile, reference.model, full=lora is None)
    if lora is not None:
        model = add_lora(model, lora, seed, profile.rl["gradient_checkpointing"])
    items = problems.rl_items(profile)
    problems.require_golds(items, shared())
    checkpoints = run.build / "checkpoints"
    trainer = SageTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward(items, chosen.reward),
        guide=guide,
        anchor=chosen.anchor if settings["beta"] else None,
        dynamic_sampling=chosen.dynamic_sampling,
        train_dataset=Dataset.from_list(
            [
                {"prompt": prompts.messages(i.question), "answer": i.gold, "item": n}
                for n, i in enumerate(items)
            ]
        ),
        args=arguments(
            GRPOConfig,
            {"report_to": "none", **settings},
            output_dir=str(checkpoints),
            disable_tqdm=True,
        ),
        callbacks=[StepLog(run.live_steps)],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(checkpoints))
    merged = trainer.model
    if isinstance(merged, PeftModel):
        merged.set_adapter("default")
        merged = merged.merge_and_unload()
    merged.save_pretrained(run.model)
    tokenizer.save_pretrained(run.model)
    run.publish_steps()
    shutil.rmtree(checkpoints, ignore_errors=True)
    return record.finish(
        run.record,
        data=problems.digest(items),
        reference=weights_hash(reference.model),
        weights=weights_hash(run.model),
    )


def reward(items: list[problems.Item], kind: str = "accuracy") -> Callable:
    """TRL's reward function: :func:`problems.judge` on the last answer, or with ``kind`` "random" a fair coin for every completion
    (drawn from torch's global stream, which checkpoints keep), with the accuracy as the metric ``task/accuracy``. On the
    embedded task it also logs, as metrics that earn nothing, the shares among all samples of valid work (``task/valid``), of
    rewarded work that is not valid (``task/unsound``), and of the rare way (``task/rare``)."""

    def accuracy(completions, item, log_metric=None, **kwargs):
        rewards = [
            float(ok)
            for ok in problems.judge(
                [items[n] for n in item], [c[-1]["content"] for c in completions], shared()
            )
        ]
        if log_metric is not None and items[0].problem is not None:
            checks = [
                countdown.check(items[n].problem, c[0]["content"])
                for n, c in zip(item, completions, strict=True)
            ]
            log_metric("task/valid", sum(c.valid for c in checks) / len(checks))
            log_metric("task/rare", sum(c.way == "R" for c in checks) / len(checks))
            log_metric(
                "task/unsound",
                sum(r > 0 and not c.valid for r, c in zip(rewards, checks, strict=True))
                / len(checks),
            )
        if log_metric is not None and kind == "random":
            log_metric("task/accuracy", sum(rewards) / len(rewards))
        return rewards if kind == "accuracy" else (torch.rand(len(rewards)) < 0.5).float().tolist()

    return accuracy
