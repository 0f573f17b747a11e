"""Every stage of a profile from its first run to its last, with a tiny model in the real one's
place: ``python whole_run.py PROFILE``, in a folder that it may fill."""

import sys
from pathlib import Path

# First: Unsloth patches what is imported after it.
from sage_lib.training import rl  # noqa: F401

# isort: split

import torch
from ruamel.yaml import YAML

from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import stages

#: What stands in the place of a model: of random weights, made here.
MODEL = {
    "name": "tiny_qwen",
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
DATA = {"name": "countdown", "rows": 64, "kinds": {"both": 1.0}}


def stand_in(name, folder):
    """The profile with :data:`MODEL` and countdown in the places of its model and data, two steps
    and a few samples long, of the first seed; written to ``folder`` as a file."""
    profile = load_profile(name)
    settings = dict(profile.raw)
    small = {"max_steps": 2, "optim": "adamw_torch", "save_steps": 2}
    if not torch.cuda.is_available():
        small |= {"bf16": False, "fp16": False}
    settings |= {"name": f"{name}-stand-in", "model": MODEL, "seeds": [profile.seeds[0]]}
    settings["task_defaults"] = {"countdown": {"fewest": 3, "most": 3, "limit": 20}}
    settings["rl_data"] = {**DATA, "seed": 2}
    settings["rl"] = {**settings["rl"], **small, "use_vllm": False, "max_completion_length": 24}
    if profile.sft:
        settings["sft_data"] = {**DATA, "seed": 1, "rare_share": 0.5}
        settings["sft"] = {**settings["sft"], **small, "max_length": 64}
    for method in settings["methods"].values():
        method.pop("seeds", None)
    evaluation = {**settings["evaluation"], "engine": "transformers", "vllm": None}
    evaluation |= {"data": [{**DATA, "rows": 2, "seed": 1001}], "samples": 4, "ks": [1, 2, 4]}
    evaluation |= {"max_new_tokens": 24, "scored": 2, "traced": 2}
    # What is kept of a run, an adapter or a model, is the profile's.
    kept = {"keep_adapter": profile.compute.keeps_adapter, "disk_gb": 0}
    compute = {**settings["compute"], **kept, "requires_gpu": False, "threads": 1}
    file = folder / f"{name}-stand-in.yaml"
    with file.open("w") as written:
        YAML(typ="safe").dump({**settings, "evaluation": evaluation, "compute": compute}, written)
    return load_profile(file)


profile = stand_in(sys.argv[1], Path.cwd())
for stage in stages.STAGES.values():
    for run in stage.runs(profile):
        stages.make(profile, run)
