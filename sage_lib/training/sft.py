"""Stage 1: supervised fine-tuning (Section 5.1, Table 7) through Unsloth; its merged model is the
reference of RL."""

import shutil
from collections.abc import Iterable
from pathlib import Path

# First: Unsloth patches what is imported after it.
from sage_lib.algorithm.backend import FastLanguageModel, SFTConfig, SFTTrainer

# isort: split

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.experiment import problems
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.policy import loading, tiny_qwen
from sage_lib.tasks.judging import digest
from sage_lib.training.callbacks import StepLog, arguments, check_sections, train_on


def load_model(
    profile: Profile, folder: str | Path, full: bool, checkpointing: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load through Unsloth: its GPU kernels where there is a GPU, its CPU backend where there is
    none.

    ``full``: all weights are to be trained; ``checkpointing``: activations are computed again in
    the backward pass, to save memory."""
    settings = profile.model
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(folder),
        revision=settings.revision if str(folder) == settings.name else None,
        max_seq_length=settings.max_seq_length,
        dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
        load_in_4bit=settings.load_in_4bit,
        use_exact_model_name=True,  # another repository would have no such revision
        full_finetuning=full,
        use_gradient_checkpointing=checkpointing,
        **loading.SAFE,
    )
    if settings.name == tiny_qwen.NAME:
        tokenizer = tiny_qwen.load_tokenizer(folder)
    return model, loading.with_prompt(tokenizer)


def add_lora(model: PreTrainedModel, section: dict, seed: int, checkpointing: bool) -> PeftModel:
    """A fresh adapter by Unsloth; its B matrices are zero: the policy starts as the model below
    it."""
    return FastLanguageModel.get_peft_model(
        model, **section, random_state=seed, use_gradient_checkpointing=checkpointing
    )


def merged(model: torch.nn.Module) -> PreTrainedModel:
    """The trained model as one plain model, its adapter (if it has one) merged in."""
    if not isinstance(model, PeftModel):
        return model
    model.set_adapter("default")
    return model.merge_and_unload()


def train(profile: Profile, run: Run) -> dict:
    """Make the base policy: train, merge, save; returns the run record.

    A profile without a section ``sft`` takes its model as it comes; it is saved alike.
    """
    check_sections(profile)  # RL's settings, too: before the hours, not after them
    seed = profile.sft.get("seed", profile.model.seed)
    record = Record("sft", profile.name, run.fingerprint, seed, profile.flat(methods=False))
    start = loading.starting_point(profile.model, run.build / "base")
    if not profile.sft:
        model, tokenizer = load_model(profile, start, full=True, checkpointing=False)
        return _save(model, tokenizer, run, record, ())
    checkpointing = profile.sft["gradient_checkpointing"]
    full = profile.sft_lora is None
    model, tokenizer = load_model(profile, start, full, checkpointing)
    if profile.sft_lora is not None:
        model = add_lora(model, profile.sft_lora, seed, checkpointing)
    rows = problems.sft_rows(profile, lambda text: len(tokenizer(text)["input_ids"]))
    checkpoints = run.build / "checkpoints"
    fixed = {"output_dir": str(checkpoints), "report_to": "none", "disable_tqdm": True}
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=arguments(SFTConfig, profile.sft, **fixed),
        callbacks=[StepLog(run.live_steps)],
    )
    train_on(trainer, checkpoints)
    run.publish_steps()
    written = _save(merged(trainer.model), tokenizer, run, record, rows)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return written


def _save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    record: Record,
    rows: Iterable[dict],
) -> dict:
    # RL loads it again: TRL takes a full-fine-tuning reference from the folder the model came from.
    model.save_pretrained(run.model)
    tokenizer.save_pretrained(run.model)
    rows = list(rows)
    return run.finish(
        record,
        rows=len(rows),
        data=digest(rows),
        parameters=sum(p.numel() for p in model.parameters()),
        weights=loading.weights_hash(run.model),
    )
