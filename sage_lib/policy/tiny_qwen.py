"""A Qwen2 of under a million parameters with random weights, and its word-level tokenizer."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sage_lib.errors import SageError
from sage_lib.experiment.problems import rl_problems
from sage_lib.experiment.profile import Model, load_profile
from sage_lib.tasks.prompts import CHAT_TEMPLATE, MARKERS, SYSTEM_PROMPT, messages
from sage_lib.tasks.puzzles import OPERATORS, WAYS
from sage_lib.validation import unknown

NAME = "tiny_qwen"
#: Settings of an architecture from which its numbers of parameters follow.
SIZES = [
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
]
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def tokenizer(
    largest_number: int, max_length: int, task_words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token a word, a marker or the system prompt (Appendix E.4).

    Its words are those of countdown, the numbers from 0 to ``largest_number``, and
    ``task_words``. Markers are not special tokens: they stay in decoded texts.
    """
    numbers = map(str, range(largest_number + 1))
    words = [PAD, EOS, UNKNOWN, "reach", "from", *WAYS, *OPERATORS, "=", ",", "(", ")", *numbers]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*words, *task_words]))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    texts = (SYSTEM_PROMPT, *MARKERS)
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer that :func:`create` saved; AutoTokenizer would take Qwen2's."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def check_architecture(model: Model) -> None:
    """Raise SageError for a name that Qwen2Config lacks, or that the tokenizer decides, and for a
    size that is missing."""
    settings = {f.name for f in dataclasses.fields(Qwen2Config)}
    if model.name == NAME:
        settings -= {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}
    for key, value in (model.architecture or {}).items():
        if value is not None and key not in settings:
            raise unknown(f"{model.name}: model.architecture", key, settings, owner="Qwen2Config")
    sizes = {key: model.architecture.get(key) for key in SIZES} if model.architecture else {}
    for key, size in sizes.items():
        if type(size) is not int or size < 1:
            raise SageError(f"{model.name}: model.architecture.{key} must be 1 or more, not {size}")


def create(folder: Path, model: Model, task_words: Sequence[str] = ()) -> None:
    """Write a model of a profile's section, with random weights by its seed, and its tokenizer."""
    words = tokenizer(model.largest_number or 0, model.max_seq_length, task_words)
    check_architecture(model)
    architecture = (model.architecture or {}).items()
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    shape = {key: value for key, value in architecture if value is not None}
    config = Qwen2Config(vocab_size=len(words), bos_token_id=None, **ends, **shape)
    torch.manual_seed(model.seed)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


def example(folder: str | Path) -> tuple[Any, PreTrainedTokenizerFast]:
    """Write a model with random weights (0.4 million), on which a trainer can be tried.

    Returns:
        Problems of countdown as a ``datasets.Dataset`` with the columns prompt (a conversation) and
        answer, and the model's tokenizer. The profile smoke defines model and problems.
    """
    from datasets import Dataset  # late: a model needs none

    profile = load_profile("smoke")
    create(Path(folder), profile.model)
    rows = [{"prompt": messages(p.question), "answer": p.gold} for p in rl_problems(profile)]
    return Dataset.from_list(rows), load_tokenizer(folder)
