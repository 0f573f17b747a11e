"""What a profile is going to do, and what it did: settings with sources, data as they load, runs,
memory, times."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.experiment import problems, records
from sage_lib.experiment.profile import BASE, Data, Profile
from sage_lib.pipeline import gpu_hours, known_settings, needs, stages
from sage_lib.tasks import public_sets
from sage_lib.tasks.problem import Problem
from sage_lib.tasks.prompts import SYSTEM_PROMPT


def settings_table(profile: Profile) -> pd.DataFrame:
    """Every resolved setting: columns setting, value, source (the comment beside it in the file of
    the profile, or of the one that it extends)."""

    def source(key: str) -> str:
        parts = key.split(".")
        places = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        return next((profile.sources[place] for place in places if place in profile.sources), "")

    rows = [(key, str(value), source(key)) for key, value in profile.flat().items()]
    return pd.DataFrame(rows, columns=["setting", "value", "source"])


def planned_runs(profile: Profile) -> pd.DataFrame:
    """The runs of every stage by method: columns stage, method, runs, seeds, size (of one run)."""
    sizes = {"sft": _sft_size(profile)}
    evaluation = profile.evaluation
    sizes["evaluate"] = f"{evaluation.asked} problems x {evaluation.samples} samples"
    for name in ("entropies", "trace"):
        sizes[name] = f"{evaluation.traced} problems x 8 completions"
    explored = profile.exploration
    sizes["dynamics"] = f"{explored.prompts} prompts x {explored.completions} completions, twice"
    sizes["impact"] = (
        f"up to 2 x {explored.replaced} completions x 4 tokens x 2 x {explored.continuations}"
    )
    rows = []
    for stage in stages.STAGES.values():
        by_method: dict[str, list[int | None]] = {}
        for run in stage.runs(profile):
            by_method.setdefault(run.method, []).append(run.seed)
        for method, seeds in by_method.items():
            trained = stage.name in ("rl", "replay")
            size = _rl_size(profile, method) if trained else sizes.get(stage.name, "")
            label = "" if seeds == [None] and method != BASE else profile.label(method)
            rows.append((stage.name, label, len(seeds), _spans(seeds), size))
    return pd.DataFrame(rows, columns=["stage", "method", "runs", "seeds", "size"])


def _spans(seeds: Sequence[int | None]) -> str:
    """Seeds in a few words: 3407-3409, 3412."""
    numbers = sorted(seed for seed in seeds if seed is not None)
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)


def _sft_size(profile: Profile) -> str:
    if not profile.sft or profile.sft_data is None:
        return "the model as it comes"
    steps = profile.sft["max_steps"]
    if steps > 0:
        return f"{steps} steps"
    epochs = profile.sft.get("num_train_epochs", 3)
    return f"{epochs} epochs of at most {profile.sft_data.rows:,} rows"


def _rl_size(profile: Profile, method: str) -> str:
    chosen = profile.methods[method]
    if chosen.rft is not None:
        return "rounds of rejection sampling"
    settings = {**profile.rl, **chosen.rl}
    batch = settings["per_device_train_batch_size"]
    completions = batch * settings["gradient_accumulation_steps"] * settings["max_steps"]
    return f"{settings['max_steps']:,} steps, {completions:,} completions"


def data_sets(profile: Profile) -> pd.DataFrame:
    """What the profile trains and evaluates on: columns use, data set, problems.

    Sets that are generated or lie on this machine are loaded and counted, of RL's prompts those
    that are not too long; of those that are not here yet it is said where a run will fetch them
    from: nothing is fetched for a plan.
    """
    rows = []

    def load(use: str, data: Data, loader: Callable[[], Sequence | str]) -> None:
        name = data.name if data.label == data.name else f"{data.name} ({data.label})"
        away = public_sets.elsewhere(data.name, data.revision)
        if away:
            rows.append((use, name, f"up to {data.rows:,}, not here yet: a run fetches {away}"))
            return
        try:
            found = loader()
            rows.append((use, name, found if isinstance(found, str) else f"{len(found):,}"))
        except SageError as error:
            rows.append((use, name, f"not loaded: {error}"))

    if profile.sft and profile.sft_data is not None:
        load("SFT", profile.sft_data, lambda: problems.sft_rows(profile, lambda t: len(t) // 3))
    if profile.methods and profile.rl_data is not None:
        load("RL", profile.rl_data, lambda: _within_limit(profile))
    for data in profile.evaluation.data:
        load("evaluation", data, partial(problems.load, data))
    return pd.DataFrame(rows, columns=["use", "data set", "problems"])


def _within_limit(profile: Profile) -> str:
    """How many of RL's prompts fit, and how many are left out, at 3 characters a token; of
    tiny_qwen a word is a token."""
    words = profile.model.name == "tiny_qwen"
    shared = 4 if words else len(SYSTEM_PROMPT) // 3

    def fits(problem: Problem) -> bool:
        size = len(problem.question.split()) if words else len(problem.question) // 3
        return shared + size <= profile.prompt_limit()

    asked = [fits(problem) for problem in problems.rl_problems(profile)]
    left = asked.count(False)
    over = f", {left:,} over {profile.prompt_limit()} tokens left out" if left else ""
    return f"{sum(asked):,}{over}"


def describe(profile: Profile, assume: Sequence[str] = ()) -> str:
    """The dry run: settings, data, plan and memory as text, and GPU hours where it needs a GPU.

    ``assume``: what the hours are to rest on instead, as KEY=VALUE.
    """
    assumptions = gpu_hours.assumed(assume, profile.compute.assume)
    known_settings.check(profile)
    parts = [
        f"profile {profile.name}: {profile.description}",
        f"SETTINGS\n{text(settings_table(profile))}",
        f"DATA (rows and prompts that fit, at 3 characters a token)\n{text(data_sets(profile))}",
        f"RUNS\n{text(planned_runs(profile))}",
    ]
    if profile.methods and profile.model.architecture:
        parts.append(f"MEMORY OF RL, estimated\n{text(_rounded(needs.memory(profile)))}")
    if profile.compute.requires_gpu and profile.model.architecture:
        parts.append(f"DISK, estimated\n{text(_rounded(needs.disk(profile)))}")
        hours = text(gpu_hours.shown(gpu_hours.table(profile, assumptions)))
        rest = text(gpu_hours.listed(assumptions))
        parts.append(f"GPU HOURS, on paper: nothing was timed\n{hours}\n\nwhere\n{rest}")
    return "\n\n".join(parts)


def _rounded(parts: pd.DataFrame) -> pd.DataFrame:
    return parts.assign(GB=lambda table: table["GB"].map("{:.2g}".format))


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
    from sage_lib.pipeline import notebooks  # late: what they draw with takes seconds to import

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`do` reads from a command line."""
    stages.add_profile(parser)
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="what the GPU hours rest on, as in --assume generation=3000 (tokens a second)",
    )


def do(options: argparse.Namespace) -> None:
    """Print every resolved setting with its source, the data sets, the plan of runs, the memory and
    GPU hours they need; nothing is fetched."""
    print(describe(stages.given_profile(options), options.assume))
