"""A user's finished results become the published ones of their profile: what data/published holds.

    sage-companion publish --profile smoke

Records, counts, samples and tables go as they are, step logs thinned, long tables packed; weights
stay behind. Tables and figures are then drawn from what was published.
"""

import argparse
import gzip
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import Profile, load_profile
from sage_lib.experiment.runs import Run
from sage_lib.files import read_lines, write_bytes, write_json
from sage_lib.pipeline import draw, stages
from sage_lib.report.measured import thinned

#: Tables that are packed: long ones, of which every number is kept.
PACKED = ("support.csv", "scores.csv", "moves.csv", "tokens.csv")


def publish(
    profile: Profile, finished_only: bool = False, command: str | None = None
) -> dict[str, int]:
    """Put the results of a profile's finished runs into data/published/<name>; bytes by file name.

    The folder is replaced at once, and publishing again changes nothing. ``finished_only``: the
    runs that are not finished are left out, or stay as they were published before. ``command``: how
    the results were made, where it was not by ``sage-companion reproduce``.

    Raises SageError for unfinished runs, for a profile that is a user's own file, and where a run
    would join others of its seed that another base was the start of.
    """
    if profile.spec.split("+")[0].endswith((".yaml", ".yml")):
        raise SageError(
            f"profile {profile.name} is a file of your own, which nobody else could load: put it "
            "into sage_lib/experiment/profiles, and its results can be published"
        )
    every = runs.every_run(profile)
    finished = [run for run in every if run.done()]
    explored = [run for run in runs.exploration_runs(profile) if run.done()]
    rest = [run for run in every if run not in finished]
    if rest and not (finished_only and finished):
        others = ", and --finished-only publishes the others" if finished else ""
        raise SageError(
            f"{len(rest)} of {len(every)} runs of {profile.name} are not finished, {rest[0].name} "
            f"first: {runs.command(profile, rest[0])} does it{others}"
        )
    target = paths.measured(profile.name, published=True)
    if _aside(target).is_dir() and not target.is_dir():  # killed between two renames
        _aside(target).rename(target)
    if rest and _has_other_base(every[0], target):
        finished = [run for run in finished if run.seed is not None]
        _require_seeds_of_one_base(finished, target)
    new = target.with_name(f".{profile.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    if rest and target.is_dir():
        shutil.copytree(target, new)
    for run in [*finished, *explored]:
        folder = new / run.measured.relative_to(paths.measured(profile.name))
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in _files(run):
            write_bytes(folder / name, content)
    again = runs.command(profile) if command is None else command
    write_json(new / "profile.json", {"spec": profile.spec, "command": again})
    _replace(target, new)
    sizes: Counter[str] = Counter()
    for path in target.rglob("*.*"):
        if path.is_file():
            sizes[path.name] += path.stat().st_size
    return dict(sizes)


def _has_other_base(base: Run, target: Path) -> bool:
    there = target / "sft" / "record.json"
    return there.is_file() and records.load(there)["weights"] != base.weights


def _require_seeds_of_one_base(finished: list[Run], target: Path) -> None:
    """Machines round differently, and so do the bases that they make from the same settings. Runs
    of another base may join where all runs of their seed start from it: seeds are compared."""
    for run in finished:
        own = records.load(run.record).get("made_from", {}).get("policy")
        for path in sorted((target / run.stage).glob(f"*-s{run.seed}/record.json")):
            if records.load(path).get("made_from", {}).get("policy") != own and run.stage == "rl":
                raise SageError(
                    f"{run.name} starts from another base than {path.parent.name}, which is "
                    "published with the same seed and compared with it: publish other seeds, or "
                    "finish all runs and publish without --finished-only, which replaces everything"
                )


def _files(run: Run) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file of a run as it is published."""
    for path in sorted(run.measured.glob("[!.]*.*")):
        if run.stage == "rl" and path.name == "steps.jsonl":
            rows = thinned(read_lines(path))
            yield path.name, "".join(json.dumps(row) + "\n" for row in rows).encode()
        elif path.name in PACKED:
            yield f"{path.name}.gz", gzip.compress(path.read_bytes(), mtime=0)
        else:
            yield path.name, path.read_bytes()


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _replace(target: Path, new: Path) -> None:
    """``new`` in the place of ``target``, which is put aside until it is there."""
    old = _aside(target)
    if target.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`do` reads from a command line."""
    stages.add_profile(parser)
    parser.add_argument(
        "--finished-only",
        action="store_true",
        help="publish the runs that are finished; the others may follow",
    )


def do(options: argparse.Namespace) -> None:
    profile = stages.given_profile(options)
    sizes = publish(profile, options.finished_only)
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size:>12,}  {name}")
    print(f"{sum(sizes.values()):>12,}  bytes in data/published/{profile.name}", flush=True)
    if not draw.redraw([load_profile(profile.spec, "published")], theory=False):
        sys.exit(1)
