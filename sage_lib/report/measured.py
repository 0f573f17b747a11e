"""The measured files of a profile: where they are read, and how methods are named and grouped.

Tables and figures carry the *key* of a method ("base", "grpo", ...); :func:`labelled` puts the
labels on at the end.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.evaluation import counts
from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import Profile, load_profile
from sage_lib.files import read_json, read_lines

#: Columns (or the index) that hold keys of methods.
KEYS = ("method", "against")
#: Columns of a step log that tables and figures read, and how the names of others begin.
LOGGED = frozenset(
    {
        *("reward", "entropy", "kl", "kl_ref", "grad_norm", "frac_reward_zero_std"),
        *("completions/mean_length", "completions/clipped_ratio", "sampling/rounds"),
        *("time/generation", "time/scoring", "time/reward", "time/loss", "step_time"),
    }
)
LOGGED_OF = ("guide/", "task/", "entropy/")
#: Steps of a block of a thinned log, and the longest log that is published whole.
BLOCK, WHOLE_LOG = 10, 100
#: Which notebook runs a stage.
NOTEBOOKS = {
    "sft": "08",
    "entropies": "21",
    "rl": "21",
    "effects": "21",
    "trace": "22",
    "evaluate": "23",
    "dynamics": "14",
    "replay": "14",
    "impact": "15",
}


# --- methods ------------------------------------------------------------------------------------


def labelled(profile: Profile, frame: pd.DataFrame) -> pd.DataFrame:
    """The same table with labels in place of keys in the columns :data:`KEYS`, for display.

    An index of one of these names is treated alike. A value that is no key of the profile (a
    label of the papers, say) stays as it is.
    """
    labels = {method: profile.label(method) for method in ("base", *profile.methods)}
    present = [name for name in KEYS if name in frame]
    if profile.published and any(not set(frame[name]) <= set(labels) for name in present):
        # A claim names methods that are not published yet as well.
        labels = {key: one.label for key, one in declared(profile).methods.items()} | labels
    shown = frame.assign(**{name: [labels.get(v, v) for v in frame[name]] for name in present})
    return shown.rename(index=labels) if shown.index.name in KEYS else shown


def declared(profile: Profile) -> Profile:
    """The profile with all of its methods, whatever of them was published."""
    return load_profile(profile.spec)


def named(profile: Profile, methods: Iterable[str]) -> str:
    """Labels of methods for a sentence, parted by semicolons, since many a label has a comma;
    "none" without any."""
    return "; ".join(map(profile.label, methods)) or "none"


def families(profile: Profile, chosen: Sequence[str] | None = None) -> dict[str, tuple[str, ...]]:
    """The methods to draw together: family -> keys, each group in the order of ``chosen``.

    ``chosen`` are keys, without them all methods of the profile. Beside the methods of a family
    stand those to compare them with, where they are chosen: the base, the profile's reference, and
    for each guide of the family the first method that has it, of the main family where there is one
    (so that a shuffled branch guide is drawn beside the branch guide). The base alone is a family,
    too.
    """
    if chosen is None:
        chosen = tuple(profile.methods)
    methods = [method for method in chosen if method != "base"]
    if chosen and not methods:
        return {"base": ("base",)}
    own = main_family(profile)
    first_with: dict[str, str] = {}
    for method in sorted(methods, key=lambda method: profile.methods[method].family != own):
        first_with.setdefault(_guide(profile, method), method)
    groups = {}
    for family in dict.fromkeys(profile.methods[method].family for method in methods):
        members = {method for method in methods if profile.methods[method].family == family}
        guides = {_guide(profile, method) for method in members} - {"None"}
        beside = {"base", profile.reference, *(first_with[guide] for guide in guides)}
        groups[family] = tuple(method for method in chosen if method in members | beside)
    return groups


def main_family(profile: Profile) -> str:
    """The family of the reference: Table 1's methods in the companion's own profiles."""
    return profile.methods[profile.reference].family if profile.methods else "base"


def main_methods(profile: Profile) -> tuple[str, ...]:
    """The methods of the main family."""
    own = main_family(profile)
    return tuple(key for key, method in profile.methods.items() if method.family == own)


def drawn(
    profile: Profile, chosen: Sequence[str], family: str | None = None
) -> tuple[tuple[str, ...], str]:
    """Which of many methods a figure shows, and in words which it leaves out ("" for none).

    One family of :func:`families`: :func:`main_family` unless another one is named. A grid has more
    methods than a figure can show; its tables have them all.
    """
    groups = families(profile, chosen)
    main = main_family(profile)
    own = family or (main if main in groups else next(iter(groups)))
    if own not in groups:
        known = ", ".join(groups)
        raise SageError(f"no method of the family {own!r} is drawn here: choose one of {known}")
    others = [method for method in chosen if method not in groups[own]]
    left = ", ".join(sorted({profile.methods[method].family for method in others} - {own}))
    words = f"not shown: {len(others)} methods of other families ({left})" if others else ""
    return groups[own], words


def _guide(profile: Profile, method: str) -> str:
    """A method's guide as text, a guide inside another one ("inner") in its place."""
    guide: Mapping[str, Any] | None = profile.methods[method].guide
    while guide is not None and guide.get("inner"):
        guide = guide["inner"]
    return str(guide)


def reference(profile: Profile) -> str:
    """The method that others are compared with: the profile's, or the base where it has no counts.

    A profile may train its reference and evaluate other methods alone.
    """
    return profile.reference if profile.reference in profile.evaluated else "base"


def trio(profile: Profile) -> tuple[str, ...]:
    """The base, the reference, and the last evaluated method of the reference's family.

    For a picture with room for three sets; fewer where the profile evaluates fewer.
    """
    if not profile.evaluated:
        return ("base",)
    evaluated = profile.evaluated
    compared = profile.reference if profile.reference in evaluated else evaluated[0]
    family = profile.methods[compared].family
    last = [m for m in evaluated if profile.methods[m].family == family][-1]
    return tuple(dict.fromkeys(("base", compared, last)))


# --- data sets ------------------------------------------------------------------------------------


def chosen_sets(profile: Profile, ood: bool = False) -> list[str]:
    """Names of the evaluation data of Table 1, or with ``ood`` of those outside it."""
    return [d.label for d in profile.evaluation.data if d.ood == ood]


def of_sets(frame: pd.DataFrame, profile: Profile, ood: bool) -> pd.DataFrame:
    """The rows whose column dataset is among :func:`chosen_sets`."""
    return frame[frame["dataset"].isin(chosen_sets(profile, ood))].reset_index(drop=True)


# --- files ----------------------------------------------------------------------------------------


def evaluations(profile: Profile, ood: bool = False) -> pd.DataFrame:
    """Counts of every finished evaluation on the data of Table 1 (with ``ood``: outside it).

    One row per run and problem: columns method, seed (None for the base), run and those of
    counts.csv. Raises SageError where counts are missing, where two runs hold different problems,
    or where the profile has no such data.
    """
    frames = []
    for method, seed, run, policy in runs.evaluations(profile):
        table = counts.read(run.measured / "counts.csv")
        frames.append(table.assign(method=method, seed=seed, run=policy.name))
    for frame in frames[1:]:  # an optional data set may have loaded for one run and not for another
        _require_same_problems(frames[0], frame)
    found = of_sets(pd.concat(frames, ignore_index=True), profile, ood)
    if found.empty:
        kind = "marked" if ood else "without"
        raise SageError(
            f"profile {profile.name} has no evaluation data {kind} ood: true: "
            "add a data set to its evaluation.data"
        )
    return found


def _require_same_problems(one: pd.DataFrame, other: pd.DataFrame) -> None:
    problems = [set(frame["dataset"] + "/" + frame["problem"]) for frame in (one, other)]
    unequal = problems[0] ^ problems[1]
    if unequal:
        raise SageError(
            f"the evaluations of {one['run'][0]} and {other['run'][0]} hold different problems "
            f"({min(unequal)} and {len(unequal) - 1} more in one alone): "
            "delete the folder of the one that lacks them and run with --resume"
        )


def problems_of(frame: pd.DataFrame) -> pd.MultiIndex:
    """The problems of a frame with the columns dataset and problem, each once, in its order."""
    return pd.MultiIndex.from_frame(frame[["dataset", "problem"]].drop_duplicates())


def by_seed(
    frame: pd.DataFrame,
    method: str,
    columns: Sequence[str],
    problems: pd.MultiIndex | None = None,
) -> tuple[np.ndarray, list[str], list[Any]]:
    """A method's values by seed and problem, the data set of each problem, and the seeds.

    ``frame`` has the columns method, seed, dataset, problem and ``columns``; several rows of a seed
    and problem are averaged. The values have the shape (seeds, problems, columns): seeds in rising
    order (the base's is None), problems in the order of the frame's first method, so that those of
    two methods can be paired; or in that of ``problems`` (:func:`problems_of` of a larger frame).
    """
    of_method = frame[frame["method"] == method]
    if of_method.empty:
        known = ", ".join(dict.fromkeys(frame["method"]))
        raise SageError(f"there are no counts of {method!r}: choose one of {known}")
    problems = problems_of(frame) if problems is None else problems
    values = []
    groups = of_method.groupby("seed", dropna=False)
    for _, of_seed in groups:
        means = of_seed.groupby(["dataset", "problem"], sort=False)[list(columns)].mean()
        values.append(means.reindex(problems).to_numpy(dtype=float))
    seeds = [None if pd.isna(seed) else int(seed) for seed, _ in groups]
    return np.stack(values), list(problems.get_level_values("dataset")), seeds


def is_complete(profile: Profile) -> bool:
    """True where the counts of every evaluation of the profile are there."""
    evaluated = [run for _, _, run, _ in runs.evaluations(profile)]
    return all((run.measured / "counts.csv").is_file() for run in evaluated)


def complete(spec: str, results: str) -> Profile | None:
    """A second profile, to be shown beside the first; None where it has not all of its counts, or
    published ones that are older than its settings."""
    try:
        profile = load_profile(spec, results)
        if profile.published:
            runs.require_current(profile)
    except SageError:
        return None
    return profile if is_complete(profile) else None


def table_of(profile: Profile, run: runs.Run, name: str) -> pd.DataFrame:
    """A CSV table that a stage kept under ``run``; SageError where it is not there."""
    return read_table(_present(profile, run, name))


def read_table(path: Path) -> pd.DataFrame:
    """A CSV table, packed or not; SageError where it is damaged."""
    if path.suffix != ".gz":  # which has a checksum
        records.require_whole(path)
    try:
        return pd.read_csv(path)
    except _DAMAGED as error:
        raise _damaged(path, error) from None


def read_packed(path: Path) -> list[dict[str, Any]]:
    """The rows of a packed JSONL file; SageError where it is damaged."""
    try:
        lines = gzip.decompress(path.read_bytes()).decode().split("\n")
        rows = [json.loads(line) for line in lines if line]
    except _DAMAGED as error:
        raise _damaged(path, error) from None
    if not all(isinstance(row, dict) for row in rows):
        raise _damaged(path, ValueError("a line is no row"))
    return rows


#: What reading half a file raises: pandas' errors and gzip's are among these.
_DAMAGED = (ValueError, EOFError, OSError, zlib.error, RecursionError)


def _damaged(path: Path, error: BaseException) -> SageError:
    place = "/".join(path.parts[-3:])
    sentence = " ".join(str(error).split())
    return SageError(
        f"{place} cannot be read ({sentence}): delete its folder and run with --resume"
    )


def is_there(run: runs.Run, name: str) -> bool:
    """Whether a run has a measured file, or its packed copy."""
    path = run.measured / name
    return path.is_file() or path.with_name(f"{name}.gz").is_file()


def _present(profile: Profile, run: runs.Run, name: str) -> Path:
    """The path of a measured file, or of its packed copy (.gz, as tables are published); where
    there is none, a SageError that says what makes it."""
    path = run.measured / name
    if not path.is_file() and (packed := path.with_name(f"{name}.gz")).is_file():
        return packed
    if not path.is_file():
        raise SageError(
            f"{run.place}/{name} is missing: run notebook {NOTEBOOKS[run.stage]} for this profile, "
            f"or sage-companion stage {run.stage} --profile {profile.spec}"
        )
    return path


def training(profile: Profile) -> pd.DataFrame:
    """Step logs of every RL run: columns method, seed, step and every logged metric.

    A row per step; of a thinned log, as they are published, each step has its block's means.
    Without rows for a profile without methods.
    """
    frames = []
    for method, seed, run in runs.rl_runs(profile):
        path = _present(profile, run, "steps.jsonl")
        records.require_whole(path)
        steps = _every_step(read_lines(path))
        frames.append(steps.assign(method=method, seed=seed))
    if not frames:
        return pd.DataFrame(columns=["method", "seed", "step"])
    return pd.concat(frames, ignore_index=True)


def thinned(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A step log as it is published: step 1, and means over blocks that end at steps 10, 20, ...

    A row says of how many ``steps`` it holds the means (of those that logged a value). Of the
    columns those are left that tables and figures read (:data:`LOGGED`), with 6 significant digits.
    A log of at most :data:`WHOLE_LOG` steps stays as it is.
    """
    if len(rows) <= WHOLE_LOG:
        return [dict(row) for row in rows]
    log = pd.DataFrame(rows)
    names = [name for name in log if name in LOGGED or str(name).startswith(LOGGED_OF)]
    ends = np.where(log["step"] == 1, 1, -(-log["step"] // BLOCK) * BLOCK)
    found = []
    for _, block in log.groupby(ends):
        means = block[names].mean().dropna()
        row = {"step": int(block["step"].iloc[-1]), "steps": len(block)}
        found.append(row | {name: float(f"{value:.6g}") for name, value in means.items()})
    return found


def _every_step(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A step log with a row per step: the blocks of a thinned one repeated."""
    log = pd.DataFrame(rows)
    if "steps" not in log:
        return log
    whole = log.loc[log.index.repeat(log["steps"])].reset_index(drop=True)
    return whole.drop(columns="steps").assign(step=whole.index + 1)


def effects(profile: Profile) -> dict[str, Any]:
    """The whole of effects.json: what the branch guide adds to the expected gradients.

    Beside "anchors" it holds prompts, batches a prompt, completions a batch, the KL to the
    reference and the share of tokens acted on.
    """
    return read_json(_present(profile, runs.effects_run(profile), "effects.json"))


def trace(profile: Profile) -> dict[str, Any]:
    """The traced completion that is shown: its problem, and signals and guides by token."""
    return read_json(_present(profile, runs.trace_run(profile), "traces.json"))


def signals(profile: Profile) -> dict[str, Any]:
    """Entropy and surprisal over all traced completions; the branch guide's threshold and ratio."""
    return read_json(_present(profile, runs.trace_run(profile), "signals.json"))


def traced(profile: Profile, name: str) -> pd.DataFrame:
    """A table of the stage trace.

    "updates": size of the update by entropy; "impact": tokens replaced by their runner-up.
    """
    return table_of(profile, runs.trace_run(profile), f"{name}.csv")


def explored(profile: Profile, stage: str, name: str) -> pd.DataFrame:
    """A table of the stages of notebooks 14 and 15 ("dynamics", "replay", "impact"), of all runs
    that are there, with the columns method and seed besides; empty where none is."""
    every = {
        "dynamics": runs.dynamics_runs,
        "replay": runs.replay_runs,
        "impact": runs.impact_runs,
    }[stage](profile)
    frames = [
        table_of(profile, run, f"{name}.csv").assign(method=run.method, seed=run.seed)
        for run in every
        if run.record.is_file()
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def scores(profile: Profile) -> pd.DataFrame:
    """Scored samples of every finished evaluation on the data of Table 1.

    Columns method, seed, dataset, problem, number, correct, tokens, perplexity, entropy, branching.
    """
    frames = []
    for method, seed, run, _ in runs.evaluations(profile):
        frames.append(table_of(profile, run, "scores.csv").assign(method=method, seed=seed))
    return of_sets(pd.concat(frames, ignore_index=True), profile, ood=False)


def samples(profile: Profile, method: str) -> list[dict[str, Any]]:
    """Every saved sample of a method on the data of Table 1, a row per problem (and seed).

    Keys: dataset, problem, and lists of equal length: completions, tokens, finished, correct.
    """
    chosen = [run for key, _, run, _ in runs.evaluations(profile) if key == method]
    if not chosen:
        known = ", ".join(("base", *profile.evaluated))
        raise SageError(
            f"profile {profile.name} does not evaluate {method!r}: choose one of {known}"
        )
    datasets = chosen_sets(profile)
    rows = []
    for run in chosen:
        rows += read_packed(_present(profile, run, "samples.jsonl.gz"))
    return [row for row in rows if row["dataset"] in datasets]


def benchmark(name: str) -> pd.DataFrame:
    """A result of sage-companion bench as it is kept in data/published/benchmarks."""
    path = paths.BENCHMARKS / f"{name}.csv"
    if not path.is_file():
        raise SageError(
            f"there is no benchmark {name!r} in data/published/benchmarks: "
            f"sage-companion bench {name} makes it"
        )
    return pd.read_csv(path)
