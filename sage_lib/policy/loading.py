"""A finished model and its tokenizer, to sample from and to score: plain transformers, without the trainers' libraries."""

import os
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sage_lib.experiment.profile import Profile
from sage_lib.policy import tiny_qwen
from sage_lib.tasks import prompts


def load(profile: Profile, folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What a stage saved in ``folder``, in the profile's dtype, on this process's GPU where there is one."""
    dtype = "auto" if profile.model.dtype is None else getattr(torch, profile.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokenizer = (
        tiny_qwen.load_tokenizer(folder)
        if profile.task is not None
        else AutoTokenizer.from_pretrained(folder)
    )
    device = (
        f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    )  # accelerate launch numbers the processes of a machine
    return model.to(device).eval(), prepared(tokenizer)


def prepared(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer with the one prompt of SFT, RL and evaluation, whatever the model brings, and prompts padded left."""
    tokenizer.padding_side = "left"
    tokenizer.chat_template = prompts.CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Token ids of the prompt that asks ``question``, up to and with the marker that opens the work."""
    return tokenizer.apply_chat_template(
        prompts.messages(question), add_generation_prompt=True, return_dict=True
    )["input_ids"]
