"""Models and their tokenizers: where one starts from, and how a finished one is loaded."""

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import eager_mask

from sage_lib.errors import SageError
from sage_lib.experiment.profile import Model, Profile
from sage_lib.files import read_json, write_json
from sage_lib.files import weights_hash as weights_hash  # of a folder, as weights_mark of a model
from sage_lib.policy import smollm, tiny_qwen
from sage_lib.tasks import prompts

#: The name of :func:`grouped_attention` among those of transformers.
GROUPED = "grouped_plain"
#: How every model is read: no pickles, and none of the code that lies beside them.
SAFE: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}


def starting_point(model: Model, folder: Path, words: Sequence[str] = ()) -> str | Path:
    """What fine-tuning starts from: a model made in ``folder``, with more ``words`` of a task in
    its vocabulary, a hub name or a folder."""
    if model.name == tiny_qwen.NAME:
        tiny_qwen.create(folder, model, words)
        return folder
    if model.name == smollm.NAME:
        return smollm.convert()
    given = Path(model.name)
    if given.is_dir() and not any(given.glob("*.safetensors")):  # pickles can run code
        raise SageError(f"the folder {given} holds no .safetensors file: save the model again")
    return model.name


def load_tokenizer(
    model: Model, folder: str | Path, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder``, with the one prompt of SFT, RL and evaluation."""
    if model.name == tiny_qwen.NAME:
        return with_prompt(tiny_qwen.load_tokenizer(folder))
    found = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=False)
    return with_prompt(found)


def base_of(folder: str | Path) -> Path | None:
    """The model that an adapter in ``folder`` belongs to; None where a whole model lies there."""
    config = Path(folder) / "adapter_config.json"
    if not config.is_file():
        return None
    return (config.parent / read_json(config)["base_model_name_or_path"]).resolve()


def save_adapter(model: Any, folder: Path, base: Path) -> None:
    """A PEFT model's adapter, and where its base lies from ``folder``: both can be moved."""
    model.save_pretrained(folder, selected_adapters=["default"])
    config, place = folder / "adapter_config.json", os.path.relpath(base, folder)
    write_json(config, {**read_json(config), "base_model_name_or_path": place})


def load(profile: Profile, folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What a stage saved in ``folder``, an adapter merged, on this process's GPU if any."""
    dtype = "auto" if profile.model.dtype is None else getattr(torch, profile.model.dtype)
    base = base_of(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(base or folder, dtype=dtype, **SAFE)
    if base is not None:
        from peft import PeftModel  # late: Unsloth, where it is, comes before

        model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    return quick(model.to(device)).eval(), load_tokenizer(profile.model, folder)


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' plain attention, without a copy of keys and values for each query head.

    ``query`` has shape (rows, heads, columns, width), and ``key`` and ``value`` fewer heads; the
    result is (rows, columns, heads, width), and no weights. Where a model asks for more than a
    mask, such as a cap or dropout, its own plain attention is called.
    """
    if any(more.get(name) for name in ("dropout", "softcap", "output_attentions")) or (
        more.get("s_aux") is not None
    ):
        plain = sys.modules[type(module).__module__].eager_attention_forward
        return plain(module, query, key, value, attention_mask, scaling=scaling, **more)
    rows, heads, columns, _ = query.shape
    queries = query.unflatten(1, (key.shape[1], -1))  # by the head of keys that they share
    scores = queries.flatten(2, 3) @ key.transpose(2, 3) * scaling
    scores = scores.unflatten(2, queries.shape[2:4])
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, None]
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    found = weights.flatten(2, 3) @ value
    return found.reshape(rows, heads, columns, -1).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register(GROUPED, grouped_attention)
transformers.AttentionMaskInterface.register(GROUPED, eager_mask)


def quick(model: PreTrainedModel) -> PreTrainedModel:
    """The model, computing the same in less time on a CPU.

    Its large output layer is given whole inputs: without gradients, torch copies that layer's
    weights once for every row of a batch whose input is a slice. And where heads share keys, or in
    16 bits, it attends by :func:`grouped_attention` in place of torch's fused attention.
    """
    head = model.get_output_embeddings()
    if head is not None and head.weight.numel() > 1e6:  # a small one is copied in no time
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))
    heads = [
        getattr(model.config, f"num_{name}_heads", None) for name in ("attention", "key_value")
    ]
    longer = model.dtype.itemsize < 4 or (heads[1] and heads[0] != heads[1])
    if longer and model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED)
    return model


def with_prompt(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer with our chat template, and prompts padded left."""
    tokenizer.padding_side = "left"
    tokenizer.chat_template = prompts.CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Token ids of the prompt that asks ``question``, with the marker that opens the work."""
    encoded = tokenizer.apply_chat_template(
        prompts.messages(question), add_generation_prompt=True, return_dict=True
    )
    return list(encoded["input_ids"])


def weights_mark(model: torch.nn.Module, kept: int = 1024) -> str:
    """Hash (12 hex digits) of a loaded model: some ``kept`` values of each parameter and buffer."""
    found = hashlib.sha256()
    for name, values in model.state_dict().items():
        found.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        flat = values.detach().flatten()
        if flat.numel() and not flat.is_meta:
            some = flat[:: max(1, flat.numel() // kept)].contiguous()
            found.update(some.view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:12]
