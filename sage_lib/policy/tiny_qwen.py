"""The embedded model: a Qwen2 of under a million parameters with random weights, and its word-level tokenizer.

Nothing is downloaded. The folder that :func:`create` writes loads like any other model, so every later stage is the
same code for this model and for Qwen2.5-Math-7B.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sage_lib.tasks.countdown import OPERATORS, WAYS
from sage_lib.tasks.prompts import CHAT_TEMPLATE, MARKERS, SYSTEM_PROMPT

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def tokenizer(limit: int, max_length: int) -> PreTrainedTokenizerFast:
    """One token a word: numbers 0..``limit``, operators, the paper's four markers, and the system prompt as a whole.

    The system prompt (Appendix E.4) is the same text in every prompt; as one token it costs one position instead of
    forty. The markers are ordinary tokens, not special ones, so that decoding keeps them for the verifier.
    """
    words = [
        PAD,
        EOS,
        UNKNOWN,
        "reach",
        "from",
        *WAYS,
        *OPERATORS,
        "=",
        ",",
        "(",
        ")",
        *map(str, range(limit + 1)),
    ]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
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
    fast.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in (SYSTEM_PROMPT, *MARKERS)]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that :func:`create` saved. AutoTokenizer must not load it: transformers 5 takes the byte-level
    tokenizer of the Qwen2 architecture for any Qwen2 model, whatever the saved files say, and loses every word."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def create(
    folder: Path, architecture: dict[str, Any], limit: int, max_length: int, seed: int
) -> None:
    """Write model and tokenizer to ``folder``: random weights from ``seed``, ``architecture`` as Qwen2Config takes it."""
    words = tokenizer(limit, max_length)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(words),
            bos_token_id=None,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
            **architecture,
        )
    )
    model.save_pretrained(folder)
    words.save_pretrained(folder)
