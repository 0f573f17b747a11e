"""The results of a profile as data frames.

`load_results("study")` reads the published results, `load_results("smoke", own=True)` what
your own runs left. Reading computes no hash, generates no problem and imports no torch.

Each frame has the columns run, method and seed in front. The base has the method "base", the run
"sft" and no seed. Where a profile names others `beside` it, their rows follow; a run's name then
begins with its profile's. data/published/README.md says what the other columns are.
"""

import json
import shlex
import warnings
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import records
from sage_lib.experiment.profile import BASE, Profile, load_profile
from sage_lib.experiment.runs import STAGES
from sage_lib.files import AGAIN, read_json, read_lines, write_bytes

_FILES = [(stage.name, file) for stage in STAGES.values() for file in stage.measures.split()]
#: Document -> the stage and the file that hold it.
DOCUMENTS = {Path(file).stem: (stage, file) for stage, file in _FILES if file.endswith(".json")}
#: Frame -> the stages whose folders hold its file, and the file's name.
FRAMES: dict[str, tuple[list[str], str]] = {"runs": (list(STAGES), "record.json")}
for _stage, _file in _FILES:
    if not _file.endswith(".json"):
        FRAMES.setdefault(Path(_file).stem, ([], _file))[0].append(_stage)
#: The first columns of every frame.
RUN = ["run", "method", "seed"]
#: What a row of `runs` takes from a run's record as it is.
RECORDED = ("seconds", "peak_memory_gb", "revision", "finished", "weights", "data", "fingerprint")
#: Columns of a published step log that are kept, and how the names of others begin.
LOGGED = {
    *("step", "reward", "entropy", "kl", "kl_ref", "grad_norm", "frac_reward_zero_std"),
    *("completions/mean_length", "completions/clipped_ratio", "sampling/rounds"),
    *("time/generation", "time/scoring", "time/reward", "time/loss", "step_time"),
}
LOGGED_OF = ("guide/", "task/", "entropy/")
#: Steps of a block of a published step log, and the longest log that is published whole.
BLOCK, WHOLE_LOG = 10, 100


class Results:
    """The results of one profile. A frame (a key of FRAMES) or a document (of DOCUMENTS) is an
    attribute, read when it is first asked for: `results.counts`, `results.entropy`."""

    def __init__(self, profile: Profile, own: bool) -> None:
        self.profile, self.own, self.name = profile, own, profile.name
        self.folder = paths.measured(self.name, published=not own)
        self.folders: Collection[Path] | None = None  # of the runs to read; None for all

    @property
    def settings(self) -> Profile:
        """Return the profile, by its former name: for one release."""
        warnings.warn("settings of results are now called profile", FutureWarning, stacklevel=2)
        return self.profile

    @cached_property
    def methods(self) -> list[str]:
        """The base and every method that has an evaluation, in the profile's order."""
        runs = self.runs
        return list(dict.fromkeys(runs.loc[runs["stage"] == "evaluation", "method"]))

    @cached_property
    def main(self) -> list[str]:
        """The base and the evaluated methods of the family of the profile's first method."""
        family_of = {key: method.family for key, method in self.profile.methods.items()}
        family = family_of.get(self.profile.baseline)
        return [key for key in self.methods if key == BASE or family_of[key] == family]

    @cached_property
    def guided(self) -> str | None:
        """The method that stands for SAGE where one is named: Branch, else the first of `main` with
        a guide; None where no method has one."""
        methods = self.profile.methods
        guided = [key for key in self.main if key in methods and methods[key].guide]
        return "grpo_branch" if "grpo_branch" in guided else next(iter(guided), None)

    def label(self, method: str) -> str:
        """Return a method's name in tables; a key that the profile does not have stays."""
        has_label = method == BASE or method in self.profile.methods
        return self.profile.label(method) if has_label else method

    def base_of(self, rows: pd.DataFrame) -> pd.Series:
        """Return the profile whose base each row's run began with."""
        return rows["run"].str.extract("^(.*)/", expand=False).fillna(self.name)

    def __getattr__(self, name: str) -> Any:
        if name in DOCUMENTS:
            stage, file = DOCUMENTS[name]
            path = self.folder / stage / file if self.own else self.folder / file
            value: Any = dict(read_json(path)) if path.is_file() else None
        elif name in FRAMES:
            stage, value = FRAMES[name][0][-1], self.frame(name)
            value = _every_step(value) if name == "steps" else value
        else:
            raise AttributeError(name)
        if value is None or not len(value):
            raise self._missing(name, stage)
        setattr(self, name, value)  # read once
        return value

    def require(self, *families: str) -> None:
        """Raise SageError where the profile has no methods of one of these families."""
        profile_families = {method.family for method in self.profile.methods.values()}
        if lacking := [family for family in families if family not in profile_families]:
            raise SageError(
                f"{self.name} has no methods of the family {lacking[0]}, which this notebook "
                'shows: set profile = "study"'
            )

    def frame(self, name: str) -> pd.DataFrame:
        """Return a frame with the rows of the profile's methods and seeds; it may be empty.

        They stand in the profile's order of methods, then by seed.
        """
        frames = [_ordered(self.stored(name), self.profile)]
        for name_beside in self.profile.beside:
            other = Results(load_profile(name_beside), self.own)
            rows = _ordered(other.stored(name), other.profile)
            if shared := _policies(frames[0]) & _policies(rows):
                method, seed = min(shared)
                raise SageError(
                    f"{self.name} and {name_beside}, which it is shown beside, both have {method} "
                    f"with seed {seed}, which would count as one: give one of them other seeds"
                )
            frames.append(rows.assign(run=f"{name_beside}/" + rows["run"]) if len(rows) else rows)
        with_rows = [frame for frame in frames if len(frame)]
        return pd.concat(with_rows, ignore_index=True) if with_rows else pd.DataFrame()

    def stored(self, name: str) -> pd.DataFrame:
        """Return a frame as it lies in the folder of this profile alone; it may be empty."""
        path = self.folder / f"{name}.parquet"
        if self.own:
            return _gathered(self.folder, name, self.profile, self.folders)
        try:
            return pd.read_parquet(path) if path.is_file() else pd.DataFrame()
        except (ValueError, OSError) as error:  # Arrow's own errors are these
            raise SageError(
                f"{self.name}/{path.name} is damaged ({' '.join(str(error).split())[:100]}): get "
                "it again from git, or publish again"
            ) from None

    def _missing(self, name: str, stage: str) -> SageError:
        kind, remedy = "published", "set own_results = True to read what you trained"
        if self.own:
            what = "reproduce" if name == "runs" else f"stage {stage}"
            command = f"sage-companion {what} --profile {shlex.quote(self.profile.spec)}"
            kind, remedy = "own", f"{command} makes them"
        return SageError(f"there are no {kind} {name} of {self.name}: {remedy}")


def load_results(profile: str | Path, own: bool = False) -> Results:
    """Load the results of a profile: the published ones, or with `own` those of your own runs.

    Raises SageError for a profile that does not exist, or of which nothing is published.
    """
    loaded = load_profile(profile)
    if not own and not (paths.measured(loaded.name, True) / "runs.parquet").is_file():
        raise SageError(
            f"nothing is published for {loaded.name}: set own_results = True to read what you "
            f"trained, or choose one of {', '.join(published())}"
        )
    return Results(loaded, own)


def load(profile: str | Path, own: bool = False) -> Results:
    """Call :func:`load_results`, by its former name: for one release."""
    warnings.warn("results.load is now called load_results", FutureWarning, stacklevel=2)
    return load_results(profile, own)


def published() -> list[str]:
    """Return the names of the profiles with published results."""
    return sorted(path.parent.name for path in paths.PUBLISHED.glob("*/runs.parquet"))


def _policies(rows: pd.DataFrame) -> set[tuple[str, int]]:
    """Return method and seed of the rows that are not the base's."""
    trained = rows.dropna(subset="seed") if len(rows) else pd.DataFrame(columns=RUN)
    return set(trained[["method", "seed"]].itertuples(index=False, name=None))


def _ordered(rows: pd.DataFrame, profile: Profile) -> pd.DataFrame:
    """Order the rows of a profile's methods and seeds by its methods, then by seed."""
    if rows.empty:
        return rows
    rows = rows[[*RUN, *rows.columns.drop(RUN)]].astype({"seed": "Int64"})
    methods = {m: sorted(profile.seeds_of(m)) for m in profile.methods}
    pairs = [(BASE, -1), *((m, seed) for m, seeds in methods.items() for seed in seeds)]
    rank_of = {pair: rank for rank, pair in enumerate(pairs)}
    row_pairs = zip(rows["method"], rows["seed"].fillna(-1), strict=True)
    ranks = pd.Series([rank_of.get(pair) for pair in row_pairs], index=rows.index, dtype=float)
    ordered = ranks.dropna().sort_values(kind="stable").index
    return rows.loc[ordered].reset_index(drop=True)


# --- from the folders of runs ---------------------------------------------------------------------


def collect(profile: Profile, folders: Collection[Path] | None = None) -> dict[str, pd.DataFrame]:
    """Return every frame of a user's results as it is published, for :func:`write`.

    folders: of the runs to take; None for all.
    """
    local_results = Results(profile, own=True)
    local_results.folders = folders
    frames = {name: _ordered(local_results.stored(name), profile) for name in FRAMES}
    filled = {name: frame for name, frame in frames.items() if len(frame)}
    return {name: thinned(rows) if name == "steps" else rows for name, rows in filled.items()}


def joined(frames: dict[str, pd.DataFrame], published: Results) -> dict[str, pd.DataFrame]:
    """Add the published rows of runs that `frames` do not have, in the profile's order.

    A run is known by its stage in `runs`, and by its name in the frames of one stage.
    """
    joined_frames = {}
    for name in FRAMES:
        own_rows, published_rows = frames.get(name, pd.DataFrame()), published.stored(name)
        if len(own_rows) and len(published_rows):
            keys = ["run", "stage"] if name == "runs" else ["run"]
            own_runs = pd.MultiIndex.from_frame(own_rows[keys])
            published_runs = pd.MultiIndex.from_frame(published_rows[keys])
            published_rows = published_rows[~published_runs.isin(own_runs)]
        if with_rows := [frame for frame in (own_rows, published_rows) if len(frame)]:
            rows = pd.concat(with_rows, ignore_index=True)
            joined_frames[name] = _ordered(rows, published.profile)
    return joined_frames


def write(
    frames: dict[str, pd.DataFrame],
    profile: Profile,
    folder: Path,
    done: Collection[Path] | None = None,
) -> None:
    """Write frames and documents as they are published, one file each.

    done: folders of the runs whose documents are taken; None for all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        frame.to_parquet(folder / f"{name}.parquet", index=False, compression="zstd")
    for stage, file in DOCUMENTS.values():
        path = paths.measured(profile.name) / stage / file
        if path.is_file() and (done is None or path.parent in done):
            write_bytes(folder / file, path.read_bytes())


def _gathered(
    root: Path, name: str, profile: Profile, only: Collection[Path] | None
) -> pd.DataFrame:
    """Read a frame from the folders of finished runs: those that hold a record."""
    stages, file = FRAMES[name]
    frames = []
    for stage in stages:
        for folder in [root / stage, *sorted((root / stage).glob("*/"))]:
            if not (folder / "record.json").is_file() or (only is not None and folder not in only):
                continue
            path = folder / file if (folder / file).is_file() else folder / f"{file}.gz"
            if not path.is_file():
                continue
            records.require_whole(path)
            try:
                rows = _read(path, name, profile)
            except (ValueError, EOFError, OSError) as error:
                raise SageError(
                    f"{'/'.join(path.parts[-3:])} cannot be read ({error}): delete its folder, and "
                    f"{AGAIN}"
                ) from None
            named = pd.DataFrame([_names(folder)] * len(rows), columns=RUN, index=rows.index)
            frames.append(pd.concat([named.astype({"seed": "Int64"}), rows], axis=1))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _names(folder: Path) -> tuple[str, str, int | None]:
    """Return run, method and seed of a run's folder: ("grpo-s3407", "grpo", 3407)."""
    method, dash, seed = folder.name.rpartition("-s")
    return (folder.name, method, int(seed)) if dash else ("sft", BASE, None)


def _read(path: Path, name: str, profile: Profile) -> pd.DataFrame:
    if name == "runs":
        return pd.DataFrame([_run_row(path, profile)])
    if name == "samples":
        rows = pd.read_json(path, lines=True, dtype=False).drop(columns="ids", errors="ignore")
        long = rows.rename(columns={"completions": "completion"})
        long = long.explode(["completion", "tokens", "finished", "correct"], ignore_index=True)
        long.insert(2, "number", long.groupby(["dataset", "problem"]).cumcount())
        return long.astype({"tokens": "int32", "finished": bool, "correct": bool})
    if path.suffix == ".jsonl":
        return pd.DataFrame(read_lines(path))
    return pd.read_csv(path)


def _run_row(path: Path, profile: Profile) -> dict[str, Any]:
    """Make a row of `runs`: what was trained or measured, from what, where and in which time."""
    record = records.load(path)
    _, key, _ = _names(path.parent)
    row = {"stage": record["stage"]}
    method = profile.methods.get(key)
    if method is not None:
        rl = profile.rl_of(key)
        row |= {
            "label": method.label,
            "family": method.family,
            "guide": json.dumps(method.guide) if method.guide else "",
            "anchor": method.kl_form,
            "beta": rl["beta"] if method.rft is None else None,
            "loss_type": rl.get("loss_type") if method.rft is None else None,
            "learning_rate": rl.get("learning_rate"),
            "max_steps": profile.steps_of(key),
        }
    for name in RECORDED:
        value = record.get(name)
        row[name] = json.dumps(value) if isinstance(value, dict) else value
    collapsed = record.get("collapsed")
    return row | {
        "base": record.get("reference", ""),
        "processor": record["machine"]["processor"],
        "collapsed": f"step {collapsed['step']}: {collapsed['reason']}" if collapsed else "",
        "versions": json.dumps(record["versions"]),
        "made_from": json.dumps(record.get("made_from", {})),
        "command": f"sage-companion stage {record['stage']} --profile {profile.spec}",
    }


# --- step logs ------------------------------------------------------------------------------------


def thinned(steps: pd.DataFrame) -> pd.DataFrame:
    """Thin step logs as they are published: step 1, and means over blocks that end at 10, 20, ...

    `steps` says of how many steps a row holds the means. Values have 6 significant digits. A log of
    at most WHOLE_LOG rows stays as it is, and so does a log of SFT, which is not of every step.
    """
    frames = []
    for _, log in steps.groupby(RUN, sort=False, dropna=False):
        log = log.loc[:, log.notna().any() | log.columns.isin(RUN)]
        is_dense = (log["step"].diff().dropna() == 1).all()  # SFT logs some steps alone
        if len(log) > WHOLE_LOG and is_dense and "steps" not in log:
            columns = [c for c in log if c in LOGGED or str(c).startswith(LOGGED_OF)]
            ends = log["step"].where(log["step"] == 1, -(-log["step"] // BLOCK) * BLOCK)
            blocks = log.groupby(ends.to_numpy())
            rounded = blocks[columns].mean().map(lambda value: float(f"{value:.6g}"))
            rounded = rounded.assign(step=blocks["step"].last(), steps=blocks.size())
            log = pd.concat([blocks[RUN].first(), rounded], axis=1)
        frames.append(log)
    return pd.concat(frames, ignore_index=True)


def _every_step(log: pd.DataFrame) -> pd.DataFrame:
    """Repeat the blocks of thinned step logs, so that each step has a row."""
    if "steps" not in log:
        return log
    rows = log.loc[log.index.repeat(log["steps"].fillna(1).astype(int))].reset_index(drop=True)
    is_of_block = rows["steps"].notna()
    number = rows.groupby("run").cumcount() + 1
    return rows.assign(step=number.where(is_of_block, rows["step"])).drop(columns="steps")
