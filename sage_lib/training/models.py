"""Models in training: loading, adapters and merging, by transformers and PEFT or by Unsloth."""

from pathlib import Path

from sage_lib.algorithm import unsloth_first

# isort: split

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sage_lib.experiment.profile import Profile
from sage_lib.policy import loading, tiny_qwen


def load_model(
    profile: Profile, folder: str | Path, full: bool, checkpointing: bool, by_unsloth: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model to train, from a folder or by its hub name, and its tokenizer.

    With ``full`` all weights are trained, and with ``checkpointing`` layers run again in the
    backward pass.
    """
    section = profile.model
    dtype = None if section.dtype is None else getattr(torch, section.dtype)
    revision = section.revision if str(folder) == section.name else None
    if not by_unsloth:
        model = AutoModelForCausalLM.from_pretrained(
            folder, revision=revision, dtype=dtype or "auto", **loading.SAFE
        )
        model.config.use_cache = False  # nothing that trains reads past keys and values
        return loading.quick(model), loading.load_tokenizer(section, folder, revision)
    model, tokenizer = unsloth_first.fast_language_model().from_pretrained(
        model_name=str(folder),
        revision=revision,
        max_seq_length=section.max_seq_length,
        dtype=dtype,
        load_in_4bit=section.load_in_4bit,
        use_exact_model_name=True,  # another repository would have no such revision
        full_finetuning=full,
        use_gradient_checkpointing=checkpointing,
        **loading.SAFE,
    )
    if section.name == tiny_qwen.NAME:
        tokenizer = tiny_qwen.load_tokenizer(folder)
    return model, loading.with_prompt(tokenizer, section.prompt)


def add_lora(
    model: PreTrainedModel, section: dict, seed: int, checkpointing: bool, by_unsloth: bool
) -> PeftModel:
    """Add a fresh adapter, whose B matrices are 0 and whose A matrices follow from the seed.
    ``section`` has keywords of LoraConfig."""
    if by_unsloth:
        return unsloth_first.fast_language_model().get_peft_model(
            model, **section, random_state=seed, use_gradient_checkpointing=checkpointing
        )
    torch.manual_seed(seed)  # as Unsloth does
    return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **section}))


def merged(model: torch.nn.Module) -> PreTrainedModel:
    """Return a trained model as a plain model, its adapter (if any) merged."""
    if not isinstance(model, PeftModel):
        return model
    model.set_adapter("default")
    return model.merge_and_unload()
