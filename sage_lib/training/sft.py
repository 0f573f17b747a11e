"""Stage 1: supervised fine-tuning (Section 5.1, Table 7), by Unsloth where it is installed. The
merged model is the reference of RL."""

import shutil

from sage_lib.algorithm import unsloth_first

if unsloth_first.is_installed() and not unsloth_first.comes_late():
    unsloth_first.load_unsloth()

# isort: split

from datasets import Dataset

from sage_lib.algorithm.backend import SFTConfig, SFTTrainer
from sage_lib.experiment import problems
from sage_lib.experiment.runs import Run
from sage_lib.experiment.settings import Profile
from sage_lib.policy import loading
from sage_lib.tasks.judging import digest
from sage_lib.training.callbacks import StepLog, arguments, check_sections, train_on
from sage_lib.training.models import add_lora, load_model, merged


def train(profile: Profile, run: Run) -> dict:
    """Make the base policy: train, merge and save. Return the run record. A profile without a
    section ``sft`` takes its model as it is."""
    check_sections(profile)  # of RL, too: before the hours, not after them
    seed = profile.sft.get("seed", profile.model.seed)
    record = run.begin(seed, profile.flat(methods=False))
    words = profile.sft_data.task.words if profile.sft_data else ()
    start = loading.starting_point(profile.model, run.build / "base", words)
    checkpointing = profile.sft.get("gradient_checkpointing", False)
    lora, fast, rows = profile.sft_lora, unsloth_first.is_loaded(), []
    full = lora is None or not profile.sft
    model, tokenizer = load_model(profile, start, full, checkpointing, fast)
    checkpoints = run.build / "checkpoints"
    if profile.sft:
        if lora is not None:
            model = add_lora(model, lora, seed, checkpointing, fast)
        rows = problems.sft_rows(profile, lambda text: len(tokenizer(text)["input_ids"]))
        where = f"{profile.name}: sft"
        trainer = SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            args=arguments(SFTConfig, profile.sft, where, output_dir=str(checkpoints)),
            callbacks=[StepLog(run.live_steps)],
        )
        train_on(trainer, checkpoints)
        run.publish_steps()
        model = merged(trainer.model)
    # RL loads it again: TRL takes a full-fine-tuning reference from the folder the model came from.
    model.save_pretrained(run.model)
    tokenizer.save_pretrained(run.model)
    written = run.finish(
        record,
        rows=len(rows),
        data=digest(rows),
        parameters=sum(p.numel() for p in model.parameters()),
        weights=loading.weights_hash(run.model),
    )
    shutil.rmtree(checkpoints, ignore_errors=True)
    return written
