"""Models and their tokenizers: the start of a training, and loading of a finished model."""

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import eager_mask

from sage_lib.errors import SageError
from sage_lib.experiment.profile import Model
from sage_lib.files import adapter_base, read_json, write_json
from sage_lib.files import weights_hash as weights_hash  # of a folder, as weights_mark of a model
from sage_lib.policy import smollm, tiny_qwen
from sage_lib.tasks import prompts

#: The name under which transformers knows :func:`grouped_attention`.
GROUPED = "grouped_plain"
#: How all models are read: no pickles, and no code from their folders.
SAFE: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}


def starting_point(model: Model, folder: Path, words: Sequence[str] = ()) -> str | Path:
    """Return the name or the folder of the model that fine-tuning starts from. A tiny model is made
    in ``folder``; its vocabulary also has the ``words`` of a task."""
    if model.name == tiny_qwen.NAME:
        tiny_qwen.create(folder, model, words)
        return folder
    if model.name == smollm.NAME:
        return smollm.convert()
    path = Path(model.name)
    if path.is_dir() and not any(path.glob("*.safetensors")):  # pickles can run code
        raise SageError(f"the folder {path} holds no .safetensors file: save the model again")
    return model.name


def load_tokenizer(
    model: Model, folder: str | Path, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder, or of a hub name and its revision, with the prompt of SFT,
    RL and evaluation."""
    if model.name == tiny_qwen.NAME:
        return with_prompt(tiny_qwen.load_tokenizer(folder), model.prompt)
    tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=False)
    return with_prompt(tokenizer, model.prompt)


def save_adapter(model: Any, folder: Path, base: Path) -> None:
    """Save a PEFT model's adapter, with the relative path to the folder of its base: both folders
    can be moved together."""
    model.save_pretrained(folder, selected_adapters=["default"])
    config, path = folder / "adapter_config.json", os.path.relpath(base, folder)
    write_json(config, {**read_json(config), "base_model_name_or_path": path})


def load(section: Model, folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model from a folder or by its hub name on this process's GPU, if any, and its
    tokenizer. An adapter is merged. The profile's section gives the dtype and the prompt."""
    dtype = "auto" if section.dtype is None else getattr(torch, section.dtype)
    base = adapter_base(Path(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(base or folder, dtype=dtype, **SAFE)
    if base is not None:
        from peft import PeftModel  # late: Unsloth, where it is, comes before

        model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    return quick(model.to(device())).eval(), load_tokenizer(section, folder)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that fills batches: of the padding token, or of the end where there is none."""
    pad: int | None = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None else pad


def device() -> str:
    """Return this process's GPU, or the CPU where there is none."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as transformers' plain attention, without a copy of keys for each query head.

    Where a model needs more than a mask, such as a cap or dropout, its plain attention is called.
    ``query`` has shape (rows, heads, columns, width); ``key`` and ``value`` have fewer heads. It
    returns the output, shape (rows, columns, heads, width), and no weights.
    """
    needed = [options.get(name) for name in ("dropout", "softcap", "output_attentions")]
    if any(needed) or options.get("s_aux") is not None:
        plain = sys.modules[type(module).__module__].eager_attention_forward
        return plain(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows, heads, columns, _ = query.shape
    queries = query.unflatten(1, (key.shape[1], -1))  # by the head of keys that they share
    scores = queries.flatten(2, 3) @ key.transpose(2, 3) * scaling
    scores = scores.unflatten(2, queries.shape[2:4])
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, None]
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    output = weights.flatten(2, 3) @ value
    return output.reshape(rows, heads, columns, -1).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register(GROUPED, grouped_attention)
transformers.AttentionMaskInterface.register(GROUPED, eager_mask)


def quick(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model compute the same in less time on a CPU, and return it.

    Its large output layer gets whole inputs: without gradients, torch copies the weights of the
    layer for each row of a batch whose input is a slice. And where heads share keys, or in 16 bits,
    it attends by :func:`grouped_attention` in place of torch's fused attention.
    """
    head = model.get_output_embeddings()
    if head is not None and head.weight.numel() > 1e6:  # a small one is copied in no time
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))
    key_heads = getattr(model.config, "num_key_value_heads", None)
    shares_keys = key_heads and key_heads != model.config.num_attention_heads
    slow = shares_keys or model.dtype.itemsize < 4
    if slow and model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED)
    return model


def with_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str = "paper"
) -> PreTrainedTokenizerBase:
    """Set the chat template by ``prompt`` of the section ``model``, and padding on the left. Return
    the tokenizer. For errors see :func:`prompts.chat_template`."""
    tokenizer.padding_side = "left"
    tokenizer.chat_template = prompts.chat_template(prompt, tokenizer.chat_template)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the token ids of a question's prompt, up to the marker that opens the work."""
    encoded = tokenizer.apply_chat_template(
        prompts.messages(question), add_generation_prompt=True, return_dict=True
    )
    return list(encoded["input_ids"])


def padded(rows: Sequence[list[int]], pad: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, both of shape (rows, the longest one's tokens). ``side``
    says where the padding is, "left" or "right"."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    return pad_sequence(ids, True, pad, side), pad_sequence(mask, True, 0, side)


def weights_mark(model: torch.nn.Module) -> str:
    """Return the hash (12 hex digits) of some 1,024 values of each parameter and buffer."""
    sha256 = hashlib.sha256()
    for name, values in model.state_dict().items():
        sha256.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        flat = values.detach().flatten()
        if flat.numel() and not flat.is_meta:
            spaced = flat[:: max(1, flat.numel() // 1024)].contiguous()
            sha256.update(spaced.view(torch.uint8).cpu().numpy().tobytes())
    return sha256.hexdigest()[:12]
