"""What a profile is going to do, on paper: runs, memory, disk, GPU hours; and what is asked and
refused before anything starts.

Nothing here was measured. A token costs 2 floating-point operations a parameter forward, as many
for the gradient of its activations, and as many again for that of trained weights (Kaplan et al.
2020, arXiv 2001.08361, Section 2.1); recomputed activations are one more forward pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pandas as pd

from sage_lib import consent
from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run
from sage_lib.pipeline import arguments
from sage_lib.tasks import prompts
from sage_lib.text import count, table, visible

#: Bytes of a sampled token in samples.jsonl and its copy: its id, its text, and their punctuation.
OF_TOKEN = 15
#: What GPU hours rest on -> value, fast end, slow end, source. A profile's ``compute.assume`` and
#: ``--assume KEY=VALUE`` take their place.
ASSUMED = {
    "generation": (1500.0, 2700.0, 500.0, "tokens/s of a 7B model on a GPU of 80 GB: chosen"),
    "vllm": (4000.0, 10000.0, 2000.0, "the same where vLLM has the GPU for itself: chosen"),
    "teraflops": (312.0, 989.0, 312.0, "bfloat16, NVIDIA's data sheets: A100, or H100 SXM"),
    "utilisation": (0.35, 0.45, 0.2, "share of that in training: chosen"),
    "tokens": (800.0, 500.0, 1200.0, "of a completion, on average: chosen"),
    "prompt": (200.0, 100.0, 400.0, "tokens of a prompt, on average: chosen"),
    "rounds": (2.0, 1.0, 4.0, "of generation a step with dynamic sampling: chosen"),
}
#: Columns of :func:`needs`.
NEEDS = ["what", "part", "GB"]
_ENDS = ["value", "fast", "slow"]


def settings_table(profile: Profile) -> pd.DataFrame:
    """List every resolved setting, without methods that the profile does not train: columns
    setting, value, source (the nearest comment)."""
    hidden_keys = []
    for name, section in (profile.raw.get("methods") or {}).items():
        # ``vary`` makes methods whose keys begin so.
        prefix = f"{name}_" if section and section.get("vary") else None
        if not any(key == name or (prefix and key.startswith(prefix)) for key in profile.methods):
            hidden_keys.append(f"methods.{name}.")
    rows = []
    for key, value in profile.flat().items():
        if not f"{key}.".startswith(tuple(hidden_keys)):
            source_key = key
            while source_key and source_key not in profile.sources:
                source_key = source_key.rpartition(".")[0]
            rows.append((key, str(value), profile.sources.get(source_key, "")))
    return pd.DataFrame(rows, columns=["setting", "value", "source"])


def planned_runs(
    profile: Profile, planned: Sequence[Run] | None = None, assumptions: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Count runs by stage and method.

    Args:
        planned: the runs, or all of the profile.
        assumptions: what GPU hours rest on, as :func:`assumed` returns it.
    Returns columns stage, method, runs, size (of a single run) and, with ``assumptions``, the GPU
    hours of all these runs: value, fast, slow.
    """
    if planned is None:
        planned = runs.every_run(profile)
    rows = []
    for (stage, method), number in Counter((run.stage, run.method) for run in planned).items():
        row: dict[str, Any] = {"stage": stage, "method": profile.label(method), "runs": number}
        row["size"] = _size(profile, stage, method)
        if assumptions is not None:
            row |= {e: number * _hours(profile, stage, method, assumptions[e]) for e in _ENDS}
        rows.append(row)
    return pd.DataFrame(rows)


def _size(profile: Profile, stage: str, method: str) -> str:
    evaluation, sft = profile.evaluation, profile.sft
    if stage == "evaluation":
        return f"{evaluation.problems} problems x {evaluation.samples} samples"
    if stage == "sft" and not sft:
        return "the model as it comes"
    if stage == "sft":
        steps = sft.get("max_steps", 0)
        return f"{steps:,} steps" if steps > 0 else f"{_epochs(sft):g} epochs"
    if stage not in ("rl", "replay"):
        return ""
    steps, rounds = profile.steps_of(method), profile.methods[method].rft is not None
    drawn = profile.rft_of(method).drawn if rounds else _batch(profile.rl_of(method)) * steps
    return f"{steps:,} steps, {drawn:,} completions"


def _epochs(sft: Mapping[str, Any]) -> float:
    """Return the epochs of a section without ``max_steps``; TRL's default is 3."""
    return float(sft.get("num_train_epochs", 3))


def _batch(section: Mapping[str, Any]) -> int:
    return int(section["per_device_train_batch_size"] * section["gradient_accumulation_steps"])


def parameters(architecture: Mapping[str, Any], rank: int | None) -> tuple[int, int]:
    """Return the number of parameters of a Qwen2 model, and of a LoRA adapter of ``rank`` on all
    its projections (0 without a rank)."""
    hidden, inner = architecture["hidden_size"], architecture["intermediate_size"]
    keys = hidden // architecture["num_attention_heads"] * architecture["num_key_value_heads"]
    attention = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    projections = [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]
    biases, norms = hidden + 2 * keys, 2 * hidden  # of q, k and v; two norms
    layer = sum(i * o for i, o in projections) + biases + norms
    embeddings = _vocabulary(architecture) * hidden
    embeddings *= 1 if architecture.get("tie_word_embeddings") else 2
    adapter = sum((i + o) * (rank or 0) for i, o in projections)
    layers = architecture["num_hidden_layers"]
    return embeddings + layers * layer + hidden, layers * adapter


def _vocabulary(architecture: Mapping[str, Any]) -> int:
    return architecture.get("vocab_size") or 120  # about that of a tiny model


def needs(profile: Profile) -> pd.DataFrame:
    """Estimate GPU memory of RL at its peak, and disk, as orders of magnitude: columns what
    ("memory", "disk"), part, GB."""
    shape, rl, evaluation = profile.model.architecture or {}, profile.rl, profile.evaluation
    rank = None if profile.rl_lora is None else profile.rl_lora.get("r", 8)  # PEFT's default
    total, adapter = parameters(shape, rank)
    width = 2 if profile.model.dtype in ("bfloat16", "float16") else 4
    state = 2 if "8bit" in rl["optim"] else 8  # bytes of a weight's optimiser
    length = min(profile.model.max_seq_length, rl["max_completion_length"] + 512)
    hidden = shape["hidden_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    # Bytes of one number for each layer and token of a batch.
    batch = rl["per_device_train_batch_size"] * length * shape["num_hidden_layers"] * width
    anchored = not adapter and any(profile.rl_of(m)["beta"] > 0 for m in profile.methods)
    policies, largest = 0, 0
    for run in runs.rl_runs(profile):
        lora = adapter if profile.methods[run.method].lora else 0
        policies += lora * 4 if lora and profile.compute.keeps_adapter else total * width
        largest = max(largest, lora * (4 + state) if lora else total * (width + state))
    interval = rl.get("save_steps") or rl["max_steps"]  # of steps, or below 1 a share of them
    all_of_run = math.ceil(1 / interval if interval < 1 else rl["max_steps"] / interval)
    limit = (rl.get("save_total_limit") or all_of_run) + 1  # they stay while the next is written
    tokens = evaluation.problems * evaluation.samples * evaluation.max_new_tokens / 2
    parts = {
        ("memory", "weights"): total * (0.55 if profile.model.load_in_4bit else width),
        ("memory", "reference, where there is no adapter"): anchored * total * width,
        ("memory", "adapter"): adapter * 4 * 2,
        ("memory", "gradients and optimiser"): (adapter or total) * (4 + state),
        ("memory", "key-value cache of rollouts"): batch * rl["steps_per_generation"] * 2 * keys,
        ("memory", "activations"): batch * hidden * (2 if rl["gradient_checkpointing"] else 24),
        ("memory", "logits in chunks of 1,024 tokens"): 1024 * _vocabulary(shape) * 4 * 3,
        ("disk", "the model as it comes, in the hub's cache"): total * 2,
        ("disk", "the base"): total * width,
        ("disk", "policies"): policies,
        ("disk", "checkpoints of what runs"): profile.compute.parallel * limit * largest,
        ("disk", "samples"): len(runs.evaluations(profile)) * tokens * OF_TOKEN,
    }
    return pd.DataFrame([(*key, size / 1e9) for key, size in parts.items()], columns=NEEDS)


def disk_gb(profile: Profile) -> float:
    """Return ``compute.disk_gb``, or the estimate where that is null; 0 where ``model`` has no
    architecture, so that nobody can tell."""
    if profile.compute.disk_gb is not None or not profile.model.architecture:
        return profile.compute.disk_gb or 0.0
    return float(needs(profile).groupby("what")["GB"].sum()["disk"])


def assumed(profile: Profile, changes: Sequence[str] = ()) -> pd.DataFrame:
    """Replace values of :data:`ASSUMED` by the profile's, and then by ``changes`` (KEY=VALUE).
    Returns a row each, columns value, fast, slow, source."""
    assumptions, of_profile = dict(ASSUMED), profile.compute.assume
    for name, said in [*of_profile.items(), *(change.partition("=")[::2] for change in changes)]:
        try:
            value, fast, slow = map(float, said if isinstance(said, list) else [said] * 3)
            if not all(0 < end < 1e12 for end in (value, fast, slow)) or name not in ASSUMED:
                raise ValueError
        except (TypeError, ValueError):
            raise SageError(
                f"assumption {name}={said}: a number above 0, or in a profile [value, fast end, "
                f"slow end], of one of {', '.join(ASSUMED)}"
            ) from None
        assumptions[name] = (value, fast, slow, "set for this profile, or on the command line")
    return pd.DataFrame.from_dict(assumptions, "index", columns=[*_ENDS, "source"])


def _passes(tokens: float, operations: int, size: int, numbers: Mapping[str, float]) -> float:
    """Return the hours of passes over ``tokens`` tokens; ``operations`` count for each token and
    parameter."""
    rate = numbers["teraflops"] * 1e12 * numbers["utilisation"]
    return tokens * operations * size / rate / 3600


def operations(adapter: bool, again: bool) -> int:
    """Return the operations of training for each token and parameter; ``again``: activations are
    recomputed."""
    return 2 + 2 + (0 if adapter else 2) + (2 if again else 0)


def _hours(profile: Profile, stage: str, method: str, numbers: Mapping[str, float]) -> float:
    """Return the GPU hours of a run; a run that reads a few problems counts as nothing."""
    evaluation, tokens = profile.evaluation, numbers["tokens"]
    size, _ = parameters(profile.model.architecture or {}, None)
    length = tokens + numbers["prompt"]
    if stage == "evaluation":
        rate = numbers["vllm" if evaluation.engine == "vllm" else "generation"]
        drawn = evaluation.problems * evaluation.samples * tokens / rate / 3600
        # Scored by the policy and by the base.
        scored = 2 * evaluation.problems * evaluation.scored * length
        return drawn + _passes(scored, 2, size, numbers)
    if stage == "sft" and profile.sft and profile.sft_data is not None:
        seen = _batch(profile.sft) * profile.sft.get("max_steps", 0)
        seen = seen if seen > 0 else profile.sft_data.rows * _epochs(profile.sft)
        each = operations(
            profile.sft_lora is not None, profile.sft.get("gradient_checkpointing", False)
        )
        # Appendix E.2 lets in no row longer than half of the model's length.
        return _passes(seen * profile.model.max_seq_length / 2, each, size, numbers)
    if stage not in ("rl", "replay"):
        return 0.0
    resolved, rl = profile.methods[method], profile.rl_of(method)
    has_lora = profile.rl_lora is not None and resolved.lora
    if resolved.rft is not None:
        rft = profile.rft_of(method)
        each = operations(has_lora, rft.sft.get("gradient_checkpointing", False))
        trained = _passes(_batch(rft.sft) * rft.steps * length, each, size, numbers)
        return rft.drawn * tokens / numbers["generation"] / 3600 + trained
    completions = _batch(rl) * rl["max_steps"]
    rounds = min(numbers["rounds"], 1 + resolved.dynamic_sampling)
    drawn = completions * tokens * rounds / numbers["generation"] / 3600
    each = operations(has_lora, rl["gradient_checkpointing"])
    # Passes without a gradient: of the reference, and under Unsloth one for a guide's entropies.
    apart = profile.compute.backend == "unsloth" and resolved.guide is not None
    each += 2 * ((rl["beta"] > 0) + apart)
    return drawn + _passes(completions * length, each, size, numbers)


def asked_and_graded(profile: Profile) -> pd.DataFrame:
    """List what a model is asked, how its answer is read and how evaluation samples: columns what,
    and how."""
    evaluation = profile.evaluation
    prompts.chat_template(profile.model.prompt, of_model="its own")  # refuses what is no prompt
    own_template = f"the chat template of {profile.model.name} around"
    paper = f"{prompts.SYSTEM_PROMPT}<END>QUESTION{prompts.WORK_START}"
    prompt = {
        "paper": f"{paper} (<END>: the tokenizer's end of text)",
        "system": f"{own_template} system: {prompts.SYSTEM_PROMPT}; user: QUESTION",
        "model": f"{own_template} user: QUESTION",
    }.get(profile.model.prompt, profile.model.prompt)
    answer = f"in the last {prompts.SOLUTION_START}...{prompts.SOLUTION_END}"
    answer += r"; where there is none, in the last \boxed{...}" if profile.model.boxed else ""
    judges = {str(getattr(data.task, "judge", "math")) for data in evaluation.data} - {"math"}
    answer = f"as {', '.join(sorted(judges))} judges" if judges else answer
    names = ("temperature", "top_p", "min_p", "top_k", "max_new_tokens", "engine")
    sampler = ", ".join(f"{name} {getattr(evaluation, name)}" for name in names)
    lines = [("prompt", prompt), ("answer", answer), ("evaluation draws by", sampler)]
    return pd.DataFrame(lines, columns=["what", "how"])


def text(frame: pd.DataFrame) -> str:
    """Write a data frame as left-aligned text."""
    return table(list(map(str, frame)), frame.to_numpy(dtype=object).tolist())


def describe(profile: Profile, changes: Sequence[str] = ()) -> str:
    """Write the dry run. ``changes`` (KEY=VALUE) replace assumptions behind the GPU hours."""
    assumptions = assumed(profile, changes)
    check_settings(profile)
    parts = {"SETTINGS": settings_table(profile), "ASKED AND GRADED": asked_and_graded(profile)}
    parts["RUNS"] = planned_runs(profile)
    if profile.compute.requires_gpu and profile.model.architecture:
        planned = planned_runs(profile, assumptions=assumptions)
        planned.loc[len(planned)] = ["all", "", planned["runs"].sum(), "", *planned[_ENDS].sum()]
        parts["RUNS"] = planned.rename(columns={"value": "GPU hours (not timed)"})
        parts["WHERE"] = assumptions.reset_index(names="assumption")
    if profile.methods and profile.model.architecture:
        parts["MEMORY OF RL AND DISK, estimated"] = needs(profile)
    if wishes := dict(consent.requests(profile.raw)):
        named = pd.DataFrame(wishes.items(), columns=["name", "because it"])
        parts["CONSENT is asked for"] = named
    if missing := _missing(profile):
        parts["MISSING"] = pd.DataFrame({"there is no data file": missing})
    sections = [f"{title}\n{text(table)}" for title, table in parts.items()]
    return "\n\n".join([f"profile {profile.name}: {profile.description}", *sections])


def _missing(profile: Profile) -> list[str]:
    """Return the user's data files that do not exist."""
    used = [profile.sft_data, profile.rl_data, *profile.evaluation.data]
    files = [getattr(data.task, "file", None) for data in used if data is not None]
    return list(dict.fromkeys(str(file) for file in files if file and not file.is_file()))


def check_settings(profile: Profile) -> None:
    """Raise SageError for a setting that TRL's or PEFT's configuration does not have. A process of
    its own checks this, unless torch is here already."""
    if "torch" in sys.modules:
        return _check_settings(profile)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_be_silent) as pool:
        return pool.submit(_check_settings, profile).result()


def _be_silent() -> None:
    """Discard all output: what libraries print as they are loaded is no part of an answer."""
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)


def _check_settings(profile: Profile) -> None:
    from sage_lib.training.callbacks import check_sections  # it imports torch

    check_sections(profile)


def before(profile: Profile, planned: Sequence[Run], yes: bool, afresh: bool = False) -> None:
    """Ask before a profile starts that needs a GPU or consent; refuse what could not be done.

    Args:
        planned: the runs, of which those that are done do not count.
        yes: start without asking.
        afresh: count the runs that are done, too.
    """
    consent.require_all(profile.raw)
    if not profile.compute.requires_gpu:
        return
    runs_left = [run for run in planned if afresh or not run.done()]
    check(profile, {run.stage for run in runs_left})
    runs_left = [run for run in runs_left if run.stage not in ("sft", "rl") or not run.made_below()]
    if not runs_left:
        return
    words = _request(profile, runs_left)
    if yes:
        print(words, flush=True)
    elif not sys.stdin or not sys.stdin.isatty():
        raise SageError(f"{words}: nobody is here to agree; the same command with --yes starts it")
    elif not consent.answered(f"{words}.\nStart? [y/N] "):
        raise SageError("nothing was started")


def _request(profile: Profile, runs_left: Sequence[Run]) -> str:
    """Return what these runs ask of a GPU, in words."""
    size = count(len(runs_left), "run")
    if not profile.model.architecture:
        excuse = "nobody can tell for how long, since model.architecture says no size"
        return f"profile {profile.name} asks for a GPU in {size}: {excuse}"
    value, fast, slow = planned_runs(profile, runs_left, assumed(profile))[_ENDS].sum()
    memory = needs(profile).groupby("what")["GB"].sum()["memory"]
    return (
        f"profile {profile.name} asks for about {value:,.1f} GPU hours ({fast:,.1f} to "
        f"{slow:,.1f}) in {size}, {memory:.0f} GB of GPU memory and {disk_gb(profile):.0f} GB of "
        "disk, by estimates that nobody has timed (see dry-run)"
    )


def check(profile: Profile, names: Collection[str]) -> None:
    """Raise SageError for what stages of these names would refuse once they run."""
    by_vllm = profile.evaluation.engine == "vllm" or profile.rl.get("use_vllm")
    in_8bit = any("8bit" in str(section.get("optim")) for section in (profile.sft, profile.rl))
    packages = [("vllm", by_vllm, "make vllm"), ("bitsandbytes", in_8bit, "make gpu")]
    for package, is_needed, remedy in packages:
        if is_needed and importlib.util.find_spec(package) is None:
            raise SageError(f"the package {package} is missing: {remedy} installs it")
    if "replay" in names and profile.compute.backend == "unsloth":
        raise SageError(runs.NOT_WATCHED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_profile(parser)
    about = "what the GPU hours rest on, as in --assume generation=3000 (tokens a second)"
    parser.add_argument("--assume", action="append", default=[], metavar="KEY=VALUE", help=about)


def run_dry_run(options: argparse.Namespace) -> None:
    print(visible(describe(arguments.named_profile(options), options.assume)))
