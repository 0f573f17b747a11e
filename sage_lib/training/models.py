"""The model that a stage trains: loaded, given an adapter, merged; plainly or by Unsloth."""

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
    """A model to train, in the profile's dtype, and its tokenizer; ``full``: all weights train."""
    settings = profile.model
    dtype = None if settings.dtype is None else getattr(torch, settings.dtype)
    revision = settings.revision if str(folder) == settings.name else None
    if not by_unsloth:
        model = AutoModelForCausalLM.from_pretrained(
            folder, revision=revision, dtype=dtype or "auto", **loading.SAFE
        )
        model.config.use_cache = False  # nothing that trains reads past keys and values
        return loading.quick(model), loading.load_tokenizer(settings, folder, revision)
    model, tokenizer = unsloth_first.fast_language_model().from_pretrained(
        model_name=str(folder),
        revision=revision,
        max_seq_length=settings.max_seq_length,
        dtype=dtype,
        load_in_4bit=settings.load_in_4bit,
        use_exact_model_name=True,  # another repository would have no such revision
        full_finetuning=full,
        use_gradient_checkpointing=checkpointing,
        **loading.SAFE,
    )
    if settings.name == tiny_qwen.NAME:
        tokenizer = tiny_qwen.load_tokenizer(folder)
    return model, loading.with_prompt(tokenizer)


def add_lora(
    model: PreTrainedModel, section: dict, seed: int, checkpointing: bool, by_unsloth: bool
) -> PeftModel:
    """A fresh adapter from a profile's section: B is zero, ``seed`` that of the A matrices."""
    if by_unsloth:
        return unsloth_first.fast_language_model().get_peft_model(
            model, **section, random_state=seed, use_gradient_checkpointing=checkpointing
        )
    torch.manual_seed(seed)  # as Unsloth does
    return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **section}))


def merged(model: torch.nn.Module) -> PreTrainedModel:
    """The trained model as one plain model, its adapter (if it has one) merged in."""
    if not isinstance(model, PeftModel):
        return model
    model.set_adapter("default")
    return model.merge_and_unload()
