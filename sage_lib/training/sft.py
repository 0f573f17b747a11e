"""Stage 1: supervised fine-tuning (Section 5.1, Table 7) through Unsloth; its merged model is the reference of RL."""

import shutil
from pathlib import Path

# first: Unsloth patches what is imported after it
from sage_lib.algorithm.backend import FastLanguageModel, SFTConfig, SFTTrainer

# isort: split

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.experiment import problems
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.records import Record
from sage_lib.experiment.runs import Run
from sage_lib.files import write_json
from sage_lib.policy import loading, smollm, tiny_qwen, token_signals
from sage_lib.policy.sampling import rollouts
from sage_lib.training.callbacks import StepLog, arguments, last_checkpoint, weights_hash

#: Completions a prompt over which the base model's token entropies are measured, on ``evaluation.traced`` prompts.
ENTROPY_COMPLETIONS = 8


def load_model(
    profile: Profile, folder: str | Path, full: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load through Unsloth: its GPU kernels where there is a GPU, its CPU backend where there is none."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(folder),
        revision=profile.model.revision if str(folder) == profile.model.name else None,
        max_seq_length=profile.model.max_seq_length,
        dtype=None if profile.model.dtype is None else getattr(torch, profile.model.dtype),
        load_in_4bit=profile.model.load_in_4bit,
        full_finetuning=full,
        use_gradient_checkpointing=profile.rl["gradient_checkpointing"],
    )
    if profile.task is not None:
        tokenizer = tiny_qwen.load_tokenizer(folder)
    return model, loading.prepared(tokenizer)


def add_lora(model: PreTrainedModel, section: dict, seed: int, checkpointing: bool) -> PeftModel:
    """A fresh adapter by Unsloth; its B matrices are zero, so the policy starts as the model below it."""
    return FastLanguageModel.get_peft_model(
        model, **section, random_state=seed, use_gradient_checkpointing=checkpointing
    )


def train(profile: Profile, run: Run) -> dict:
    """Train, merge, save, measure the saved model's token entropies; returns the run record."""
    record = Record("sft", profile.name, run.fingerprint, profile.sft["seed"], profile.flat())
    if profile.task is not None:
        start = run.build / "base"
        tiny_qwen.create(
            start,
            profile.model.architecture,
            profile.task.limit,
            profile.model.max_seq_length,
            profile.model.seed,
        )
    else:
        start = smollm.convert() if profile.model.name == smollm.NAME else profile.model.name
    model, tokenizer = load_model(profile, start, full=profile.sft_lora is None)
    if profile.sft_lora is not None:
        model = add_lora(
            model, profile.sft_lora, profile.sft["seed"], profile.sft["gradient_checkpointing"]
        )
    rows = problems.sft_rows(profile, lambda text: len(tokenizer(text)["input_ids"]))
    checkpoints = run.build / "checkpoints"
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=arguments(
            SFTConfig, profile.sft, output_dir=str(checkpoints), report_to="none", disable_tqdm=True
        ),
        callbacks=[StepLog(run.live_steps)],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(checkpoints))
    merged = (
        trainer.model.merge_and_unload() if isinstance(trainer.model, PeftModel) else trainer.model
    )
    # Saved and loaded again by RL: TRL takes a full-fine-tuning reference from the folder the model came from.
    merged.save_pretrained(run.model)
    tokenizer.save_pretrained(run.model)
    entropies = token_entropies(merged, tokenizer, profile)
    write_json(run.measured / "entropy.json", token_signals.summary(entropies))
    run.publish_steps()
    shutil.rmtree(checkpoints, ignore_errors=True)
    return record.finish(
        run.record,
        rows=len(rows),
        data=problems.digest(rows),
        parameters=sum(p.numel() for p in merged.parameters()),
        weights=weights_hash(run.model),
    )


@torch.no_grad()
def token_entropies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, profile: Profile
) -> np.ndarray:
    """Entropies (nats, eq. 12) of the model's own completion tokens, up to and with the end token: shape (tokens,).

    Drawn on RL prompts as RL samples, entropies at RL's temperature over the whole vocabulary.
    """
    found = []
    for number, item in enumerate(problems.rl_items(profile)[: profile.evaluation.traced]):
        out, start, mask = rollouts(
            model, tokenizer, item, ENTROPY_COMPLETIONS, profile.rl, profile.rl["seed"] + number
        )
        logits = model(out, attention_mask=torch.ones_like(out)).logits[:, start - 1 : -1].float()
        entropy = torch.distributions.Categorical(
            logits=logits / profile.rl["temperature"]
        ).entropy()
        found.append(entropy[mask.bool()].cpu().numpy())
    return np.concatenate(found)
