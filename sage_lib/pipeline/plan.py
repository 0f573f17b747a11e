"""What a profile is going to do, and what it did: settings with sources, data as they load, runs,
memory, times."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.experiment import problems, records
from sage_lib.experiment.profile import Profile
from sage_lib.pipeline import notebooks, stages


def settings_table(profile: Profile) -> pd.DataFrame:
    """Every resolved setting: columns setting, value, source (the comment beside it in the file of
    the profile, or of the one that it extends)."""

    def source(key: str) -> str:
        parts = key.split(".")
        places = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        return next((profile.sources[place] for place in places if place in profile.sources), "")

    rows = [(key, str(value), source(key)) for key, value in profile.flat().items()]
    return pd.DataFrame(rows, columns=["setting", "value", "source"])


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
    parts = {
        "weights": total * weight_width,
        "adapter": adapter * 4 * 2,
        "gradients and optimiser": trained * (4 + state),
        "key-value cache of one batch of rollouts": rollouts * length * cached,
        "activations of one backward pass": batch * length * hidden * kept * width * layers,
        "logits in chunks of 1,024 tokens": 1024 * shape["vocab_size"] * 4 * 3,
    }
    rows = [(part, size / 1e9) for part, size in parts.items()]
    rows.append(("in all", sum(size for _, size in rows)))
    return pd.DataFrame(rows, columns=["part", "GB"])


def planned_runs(profile: Profile) -> pd.DataFrame:
    """Every run of every stage with its size: columns stage, run, size."""
    sizes = {"sft": _sft_size(profile), "rl": _rl_size(profile)}
    evaluation = profile.evaluation
    sizes["evaluate"] = f"{evaluation.asked} problems x {evaluation.samples} samples"
    for name in ("entropies", "trace"):
        sizes[name] = f"{evaluation.traced} problems x 8 completions"
    explored = profile.exploration
    sizes["dynamics"] = f"{explored.prompts} prompts x {explored.completions} completions, twice"
    sizes["replay"] = sizes["rl"]
    sizes["impact"] = (
        f"up to 2 x {explored.replaced} completions x 4 tokens x 2 x {explored.continuations}"
    )
    rows = [
        (stage.name, run.name, sizes.get(stage.name, ""))
        for stage in stages.STAGES.values()
        for run in stage.runs(profile)
    ]
    return pd.DataFrame(rows, columns=["stage", "run", "size"])


def _sft_size(profile: Profile) -> str:
    if not profile.sft or profile.sft_data is None:
        return "the model as it comes"
    steps = profile.sft["max_steps"]
    if steps > 0:
        return f"{steps} steps"
    epochs = profile.sft.get("num_train_epochs", 3)
    return f"{epochs} epochs of at most {profile.sft_data.rows:,} rows"


def _rl_size(profile: Profile) -> str:
    if not profile.rl:
        return ""
    batch = profile.rl["per_device_train_batch_size"]
    completions = batch * profile.rl["gradient_accumulation_steps"] * profile.rl["max_steps"]
    return f"{profile.rl['max_steps']:,} steps, {completions:,} completions"


def data_sets(profile: Profile) -> pd.DataFrame:
    """Load what the profile trains and evaluates on: columns use, data set, problems, or why it did
    not load."""
    rows = []

    def load(use: str, name: str, loader: Callable[[], Sequence]) -> None:
        try:
            rows.append((use, name, f"{len(loader()):,}"))
        except SageError as error:
            rows.append((use, name, f"not loaded: {error}"))

    if profile.sft and profile.sft_data is not None:
        name = profile.sft_data.name
        load("SFT", name, lambda: problems.sft_rows(profile, lambda text: len(text) // 3))
    if profile.methods and profile.rl_data is not None:
        load("RL", profile.rl_data.name, lambda: problems.rl_problems(profile))
    for data in profile.evaluation.data:
        name = data.name if data.label == data.name else f"{data.name} ({data.label})"
        load("evaluation", name, partial(problems.load, data))
    return pd.DataFrame(rows, columns=["use", "data set", "problems"])


def describe(profile: Profile) -> str:
    """The dry run: settings, data, plan and memory as text."""
    from sage_lib.training.callbacks import check_sections

    check_sections(profile)
    parts = [
        f"profile {profile.name}: {profile.description}",
        f"SETTINGS\n{text(settings_table(profile))}",
        f"DATA (SFT rows counted at 3 characters a token)\n{text(data_sets(profile))}",
        f"RUNS\n{text(planned_runs(profile))}",
    ]
    if profile.methods and profile.model.architecture:
        parts.append(f"MEMORY OF RL, estimated\n{text(memory(profile))}")
    return "\n\n".join(parts)


def text(frame: pd.DataFrame) -> str:
    """A table as left-aligned text, columns two spaces apart."""
    cells = [list(frame.columns)]
    for row in frame.itertuples(index=False):
        cells.append([f"{v:.2f}" if isinstance(v, float) else str(v) for v in row])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def notebook_map(profile: Profile) -> pd.DataFrame:
    """What each notebook is about and makes: columns notebook, about, figures, measured."""
    rows = []
    for notebook in notebooks.found():
        made = notebook.made(profile)
        figures, measured = ", ".join(made.figures) or "-", ", ".join(made.measured) or "-"
        rows.append((notebook.name, notebook.about, figures, measured))
    return pd.DataFrame(rows, columns=["notebook", "about", "figures", "measured"])


def measured_times(profile: Profile) -> pd.DataFrame:
    """Seconds and peak memory (GB) of every run that was done, and whether it collapsed: columns
    stage, run, seconds, exact problems, exact seconds, peak GB, processor, cores, finished,
    collapsed.

    The exact columns are of evaluations: how many problems have exact probabilities, and which part
    of the seconds these took.
    """
    rows: list[tuple] = []
    for stage in stages.STAGES.values():
        for run in stage.runs(profile):
            if not run.record.is_file():
                rows.append((stage.name, run.name, *[float("nan")] * 4, *["-"] * 4))
                continue
            record = records.load(run.record)
            machine, exact = record["machine"], record.get("exact") or {}
            parts = (exact.get(name, float("nan")) for name in ("problems", "seconds"))
            spent = (record["seconds"], *parts, record["peak_memory_gb"])
            where = (machine["processor"], machine["cores"], record["finished"])
            collapsed = records.collapse(run.record) or "-"
            rows.append((stage.name, run.name, *spent, *where, collapsed))
    costs = ["seconds", "exact problems", "exact seconds", "peak GB"]
    columns = ["stage", "run", *costs, "processor", "cores", "finished", "collapsed"]
    return pd.DataFrame(rows, columns=columns)
