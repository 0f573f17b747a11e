"""What a profile is going to do, and what it did: settings with sources, data as they load, runs, memory, times."""

import dataclasses
from collections.abc import Sequence

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.experiment import problems, records, runs
from sage_lib.experiment.profile import Profile


def settings_table(profile: Profile) -> pd.DataFrame:
    """Every resolved setting: columns setting, value, source (the comment beside it in the profile's file)."""

    def source(key: str) -> str:
        parts = key.split(".")
        return next(
            (
                profile.sources[".".join(parts[:n])]
                for n in range(len(parts), 0, -1)
                if ".".join(parts[:n]) in profile.sources
            ),
            "",
        )

    return pd.DataFrame(
        [(k, str(v), source(k)) for k, v in profile.flat().items()],
        columns=["setting", "value", "source"],
    )


def parameters(architecture: dict, rank: int | None) -> tuple[int, int]:
    """Parameters of a Qwen2 model and of a LoRA adapter of ``rank`` on all its projections (0 without one)."""
    h, m, layers = (
        architecture["hidden_size"],
        architecture["intermediate_size"],
        architecture["num_hidden_layers"],
    )
    kv = h // architecture["num_attention_heads"] * architecture["num_key_value_heads"]
    shapes = [(h, h), (h, kv), (h, kv), (h, h), (h, m), (h, m), (m, h)]
    embeddings = (
        architecture["vocab_size"] * h * (1 if architecture.get("tie_word_embeddings") else 2)
    )
    layer = sum(i * o for i, o in shapes) + h + 2 * kv + 2 * h  # biases of q, k, v; two norms
    return embeddings + layers * layer + h, layers * sum(
        (i + o) * rank for i, o in shapes
    ) if rank else 0


def memory(profile: Profile) -> pd.DataFrame:
    """Estimated peak memory of RL in GB, part by part: an order of magnitude for planning, not a measurement."""
    shape = {"vocab_size": 120, **profile.model.architecture}
    rank = profile.rl_lora["r"] if profile.rl_lora else None
    total, adapter = parameters(shape, rank)
    trained = adapter or total
    width = 2 if profile.model.dtype in ("bfloat16", "float16") else 4
    weight_width = 0.55 if profile.model.load_in_4bit else width
    state = 2 if "8bit" in profile.rl["optim"] else 8
    rollouts = profile.rl["per_device_train_batch_size"] * profile.rl["steps_per_generation"]
    length = min(profile.model.max_seq_length, profile.rl["max_completion_length"] + 512)
    kv = (
        2
        * shape["num_hidden_layers"]
        * shape["hidden_size"]
        // shape["num_attention_heads"]
        * shape["num_key_value_heads"]
        * width
    )
    tokens = profile.rl["per_device_train_batch_size"] * length
    per_token = (
        shape["hidden_size"]
        * (2 if profile.rl["gradient_checkpointing"] else 24)
        * width
        * shape["num_hidden_layers"]
    )
    parts = {
        "weights": total * weight_width,
        "adapter": adapter * 4 * 2,
        "gradients and optimiser": trained * (4 + state),
        "key-value cache of one batch of rollouts": rollouts * length * kv,
        "activations of one backward pass": tokens * per_token,
        "logits in chunks of 1,024 tokens": 1024 * shape["vocab_size"] * 4 * 3,
    }
    frame = pd.DataFrame(
        [(part, size / 1e9) for part, size in parts.items()], columns=["part", "GB"]
    )
    return pd.concat(
        [frame, pd.DataFrame([("in all", frame["GB"].sum())], columns=["part", "GB"])],
        ignore_index=True,
    )


def planned_runs(profile: Profile) -> pd.DataFrame:
    """Every stage in order with its size: columns stage, run, size."""
    completions = (
        profile.rl["max_steps"]
        * profile.rl["per_device_train_batch_size"]
        * profile.rl["gradient_accumulation_steps"]
    )
    problems = sum(d.rows for d in profile.evaluation.data)
    steps = profile.sft["max_steps"]
    rows = [
        (
            "SFT",
            "sft",
            f"{steps} steps"
            if steps > 0
            else f"{profile.sft['num_train_epochs']} epochs of at most {profile.sft_data.rows:,} rows",
        )
    ]
    rows += [
        ("RL", run.name, f"{profile.rl['max_steps']:,} steps, {completions:,} completions")
        for _, _, run in runs.rl_runs(profile)
    ]
    rows += [
        ("evaluation", run.name, f"{problems} problems x {profile.evaluation.samples} samples")
        for _, _, run, _ in runs.evaluations(profile)
    ]
    return pd.DataFrame(rows, columns=["stage", "run", "size"])


def data_sets(profile: Profile) -> pd.DataFrame:
    """Load what the profile trains and evaluates on: columns use, data set, problems, or why it did not load."""

    def load(use: str, name: str, loader) -> tuple[str, str, str]:
        try:
            return use, name, f"{len(loader()):,}"
        except SageError as error:
            return use, name, f"not loaded: {error}"

    rows = [
        load(
            "SFT",
            profile.sft_data.name,
            lambda: problems.sft_rows(profile, lambda text: len(text) // 3),
        )
    ]
    rows.append(load("RL", profile.rl_data.name, lambda: problems.rl_items(profile)))
    for one in profile.evaluation.data:
        part = dataclasses.replace(
            profile, evaluation=dataclasses.replace(profile.evaluation, data=(one,))
        )
        name = one.name if one.kinds is None else f"{one.name} ({', '.join(one.kinds)})"
        rows.append(load("evaluation", name, lambda part=part: problems.evaluation_items(part)))
    return pd.DataFrame(rows, columns=["use", "data set", "problems"])


def describe(profile: Profile) -> str:
    """The dry run: settings, data, plan and memory as text."""
    from sage_lib.training.callbacks import check_sections

    check_sections(profile)
    return "\n\n".join(
        (
            f"profile {profile.name}: {profile.description}",
            f"SETTINGS\n{text(settings_table(profile))}",
            f"DATA (SFT rows counted at 3 characters a token)\n{text(data_sets(profile))}",
            f"RUNS\n{text(planned_runs(profile))}",
            f"MEMORY OF RL, estimated\n{text(memory(profile))}",
        )
    )


def text(frame: pd.DataFrame) -> str:
    """A table as left-aligned text, columns two spaces apart."""
    cells = [
        list(frame.columns),
        *(
            [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row]
            for row in frame.itertuples(index=False)
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def notebook_map(profile: Profile, notebooks: Sequence) -> pd.DataFrame:
    """What each notebook is about and makes: columns notebook, about, figures, measured."""
    return pd.DataFrame(
        [
            (
                n.name,
                n.about,
                ", ".join(n.figures + n.task_figures) or "-",
                ", ".join(n.measured + n.task_measured) or "-",
            )
            for n in notebooks
        ],
        columns=["notebook", "about", f"figures/{profile.name}", f"data/measured/{profile.name}"],
    )


def measured_times(profile: Profile) -> pd.DataFrame:
    """Seconds and peak memory (GB) of every stage that has run: columns stage, run, seconds, peak GB, processor, cores, finished."""
    rows = []
    for stage, run in [
        ("SFT", runs.sft_run(profile)),
        *(("RL", r) for _, _, r in runs.rl_runs(profile)),
        *(("evaluation", r) for _, _, r, _ in runs.evaluations(profile)),
    ]:
        if run.record.is_file():
            r = records.load(run.record)
            rows.append(
                (
                    stage,
                    run.name,
                    r["seconds"],
                    r["peak_memory_gb"],
                    r["machine"]["processor"],
                    r["machine"]["cores"],
                    r["finished"],
                )
            )
        else:
            rows.append((stage, run.name, float("nan"), float("nan"), "-", "-", "-"))
    return pd.DataFrame(
        rows, columns=["stage", "run", "seconds", "peak GB", "processor", "cores", "finished"]
    )
