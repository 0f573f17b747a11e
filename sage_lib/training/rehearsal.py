"""Every method's trainer made once, on a model of a few weights: what it would refuse after hours
of supervised fine-tuning it refuses now.

    python -m sage_lib.training.rehearsal PROFILE

Nothing is trained, nothing is fetched, and no folder of the profile is touched.
"""

import os
import sys
import tempfile
from pathlib import Path

from ruamel.yaml import YAML

# First: Unsloth, where RL uses it, patches what is imported after it.
from sage_lib.training import rl

# isort: split

import torch

from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile, split_spec
from sage_lib.experiment.profile_files import change, find, read
from sage_lib.experiment.runs import load_profile
from sage_lib.policy import tiny_qwen

#: What stands in the place of a model: of random weights, made here.
MODEL = {
    "name": tiny_qwen.NAME,
    "architecture": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "largest_number": 20,
    "max_seq_length": 64,
    "dtype": "float32",
    "seed": 1,
}
#: And in the place of its problems: countdown's, which are generated.
TASK = {"fewest": 3, "most": 3, "limit": 20}
DATA = {"name": "countdown", "rows": 64, "kinds": {"both": 1.0}}


def stand_in(profile: Profile, folder: Path, steps: int = 2) -> Profile:
    """The profile with :data:`MODEL` and countdown in the places of its model and data, a few steps
    and samples long: the same stages and methods, of the first seed, with the same settings of the
    trainer. It is written to ``folder`` as a file that extends the profile.
    """
    below, *changes = split_spec(profile.spec)
    settings, sources = read(find(below, Path.cwd()))
    for one in changes:
        change(settings, sources, one, below)
    on_gpu = torch.cuda.is_available()
    small = {"max_steps": steps, "optim": "adamw_torch", "save_steps": steps}
    if not on_gpu:
        small |= {"bf16": False, "fp16": False}
    name = f"{below}-stand-in" if below == Path(below).name else "stand-in"
    settings |= {"name": name, "model": MODEL, "seeds": [profile.seeds[0]]}
    settings["task_defaults"] = {"countdown": TASK}
    settings["rl_data"] = {**DATA, "seed": 2}
    settings["rl"] = {**settings["rl"], **small, "use_vllm": False, "max_completion_length": 24}
    if profile.sft:
        settings["sft_data"] = {**DATA, "seed": 1, "rare_share": 0.5}
        settings["sft"] = {**settings["sft"], **small, "max_length": 64}
    for method in settings["methods"].values():
        method.pop("seeds", None)
    evaluation = {**settings["evaluation"], "engine": "transformers", "vllm": None}
    evaluation |= {"data": [{**DATA, "rows": 2, "seed": 1001}], "samples": 4, "ks": [1, 2, 4]}
    evaluation |= {"max_new_tokens": 24, "resamples": 100, "scored": 2, "traced": 2}
    settings["evaluation"] = evaluation
    # What is kept of a run, an adapter or a model, is the profile's.
    kept = {"keep_adapter": profile.compute.keeps_adapter, "disk_gb": 0}
    settings["compute"] = {**settings["compute"], **kept, "requires_gpu": False, "threads": 1}
    file = folder / f"{name}.yaml"
    with file.open("w") as written:
        YAML(typ="safe").dump(settings, written)
    return load_profile(file)


def rehearse(profile: Profile, folder: Path) -> None:
    """Make the trainer of every method of a :func:`stand_in`; SageError for the first that cannot
    be made, with its method."""
    base = runs.sft_run(profile).model
    tiny_qwen.create(base, profile.model)
    for key, method in profile.methods.items():
        if method.rft is not None or method.reference is not None:
            continue
        try:
            rl.trainer_of(profile, runs.rl_run(profile, key, profile.seeds[0]), folder / key)
        except (SageError, ValueError, NotImplementedError, ImportError) as error:
            raise SageError(
                f"method {key} cannot be trained with these settings: {error}"
            ) from error


def main(spec: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"SAGE_BUILD": folder, "SAGE_RESULTS": folder}
        rehearse(stand_in(load_profile(spec), Path(folder)), Path(folder))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except SageError as error:
        sys.exit(f"error: {error}")
