"""What a profile needs of a machine, estimated before anything runs: parameters, a GPU's memory,
disk."""

from __future__ import annotations

from typing import Any

import pandas as pd

from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile

#: Bytes of a sampled token in samples.jsonl and its copy: its id, its text, and their punctuation.
OF_TOKEN = 15


def parameters(architecture: dict[str, Any], rank: int | None) -> tuple[int, int]:
    """Parameters of a Qwen2 model, and of a LoRA adapter of ``rank`` on all its projections (0
    without one)."""
    hidden, inner = architecture["hidden_size"], architecture["intermediate_size"]
    layers = architecture["num_hidden_layers"]
    per_head = hidden // architecture["num_attention_heads"]
    keys = per_head * architecture["num_key_value_heads"]
    attention = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    projections = [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]
    matrices = 1 if architecture.get("tie_word_embeddings") else 2
    embeddings = architecture["vocab_size"] * hidden * matrices
    biases, norms = hidden + 2 * keys, 2 * hidden  # of q, k and v; two norms
    layer = sum(i * o for i, o in projections) + biases + norms
    adapter = layers * sum((i + o) * rank for i, o in projections) if rank else 0
    return embeddings + layers * layer + hidden, adapter


def memory(profile: Profile) -> pd.DataFrame:
    """Estimated peak memory of RL in GB, part by part: an order of magnitude, no measurement."""
    given = (profile.model.architecture or {}).items()
    shape = {"vocab_size": 120, **{key: value for key, value in given if value is not None}}
    rank = profile.rl_lora["r"] if profile.rl_lora else None
    total, adapter = parameters(shape, rank)
    trained = adapter or total
    width = 2 if profile.model.dtype in ("bfloat16", "float16") else 4
    weight_width = 0.55 if profile.model.load_in_4bit else width
    state = 2 if "8bit" in profile.rl["optim"] else 8
    batch = profile.rl["per_device_train_batch_size"]
    length = min(profile.model.max_seq_length, profile.rl["max_completion_length"] + 512)
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    per_head = hidden // shape["num_attention_heads"]
    cached = 2 * layers * per_head * shape["num_key_value_heads"] * width  # a token
    kept = 2 if profile.rl["gradient_checkpointing"] else 24  # hidden states a layer and token
    rollouts = batch * profile.rl["steps_per_generation"]
    anchored = any({**profile.rl, **m.rl}["beta"] > 0 for m in profile.methods.values())
    parts = {
        "weights": total * weight_width,
        "reference, where no adapter can be switched off": 0
        if adapter
        else anchored * total * width,
        "adapter": adapter * 4 * 2,
        "gradients and optimiser": trained * (4 + state),
        "key-value cache of one batch of rollouts": rollouts * length * cached,
        "activations of one backward pass": batch * length * hidden * kept * width * layers,
        "logits in chunks of 1,024 tokens": 1024 * shape["vocab_size"] * 4 * 3,
    }
    rows = [(part, size / 1e9) for part, size in parts.items()]
    rows.append(("in all", sum(size for _, size in rows)))
    return pd.DataFrame(rows, columns=["part", "GB"])


def disk(profile: Profile) -> pd.DataFrame:
    """Estimated disk in GB, part by part: an order of magnitude, no measurement."""
    shape = {"vocab_size": 120, **(profile.model.architecture or {})}
    total, adapter = parameters(shape, profile.rl_lora["r"] if profile.rl_lora else None)
    width = 2 if profile.model.dtype in ("bfloat16", "float16") else 4
    kept, largest = 0, 0
    for _, _, run in runs.rl_runs(profile):
        lora = adapter if profile.methods[run.method].lora else 0
        kept += lora * 4 if lora and profile.compute.keeps_adapter else total * width
        weights, trained = (lora * 4, lora) if lora else (total * width, total)
        state = 2 if "8bit" in profile.rl["optim"] else 8
        largest = max(largest, weights + trained * state)
    limit = profile.rl["save_total_limit"] + 1  # the last ones stay while the next is written
    evaluation, policies = profile.evaluation, len(runs.evaluations(profile))
    drawn = policies * evaluation.asked * evaluation.samples * evaluation.max_new_tokens / 2
    parts = {
        "the model as it comes, in the hub's cache": total * 2,
        "the base": total * width,
        "policies": kept,
        "checkpoints of what runs": profile.compute.parallel * limit * largest,
        "samples": drawn * OF_TOKEN,
    }
    rows = [(part, size / 1e9) for part, size in parts.items()]
    rows.append(("in all", sum(size for _, size in rows)))
    return pd.DataFrame(rows, columns=["part", "GB"])


def in_all(parts: pd.DataFrame) -> float:
    """GB of all parts together."""
    return float(parts["GB"].iloc[-1])


def disk_gb(profile: Profile) -> float:
    """What ``compute.disk_gb`` says, or where it is null what the plan comes to."""
    given = profile.compute.disk_gb
    return in_all(disk(profile)) if given is None else given
