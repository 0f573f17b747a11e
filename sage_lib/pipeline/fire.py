"""Under fire: kills, faults of machines and people, broken input; what each of them does to a run.

    python -m sage_lib.pipeline.fire kills faults profiles files answers       (make fire)
    python -m sage_lib.pipeline.fire --long kills                              (make fire LONG=1)

Each part is a table, data/published/benchmarks/fire_NAME.csv, with its record beside it. What takes
long writes its rows as they come. The command fails where something went wrong, after it is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from sage_lib.errors import SageError
from sage_lib.pipeline import bench, fire_faults, fire_fuzz, fire_kills
from sage_lib.pipeline.fire_kills import Arena

#: Kills, values that every key of a profile is retyped as (all of them where it is None), and
#: broken copies of each file: of the short form, and of the long one.
KILLS, VALUES, COPIES = (8, 50), (3, None), (150, 1500)
ANSWERS = 1000
#: The profiles whose keys are broken.
PROFILES = ("smoke", "countdown", "paper_all")


@dataclass
class Fire:
    """Where a call of the command works, and how much of everything it does."""

    folder: Path
    long: bool
    seed: int
    made: tuple[Arena, dict[str, float]] | None = field(default=None)

    def reference(self) -> tuple[Arena, dict[str, float]]:
        """What is fired on, made once."""
        if self.made is None:
            self.made = fire_kills.reference(self.folder / "undisturbed")
            took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.made[1].items())
            print(f"undisturbed: {took}", flush=True)
        return self.made

    def keep(self, name: str, rows: Any) -> None:
        bench.keep(f"fire_{name}", pd.DataFrame(rows), seed=self.seed)


def _kills(fire: Fire) -> pd.DataFrame:
    made, seconds = fire.reference()
    keep = functools.partial(fire.keep, "kills")
    table = fire_kills.kills(KILLS[fire.long], fire.seed, made, seconds, keep, fire.folder)
    print(fire_kills.summary(table).to_string(index=False))
    early = int((table["progress"] < 1).sum())
    if 2 * early < len(table):
        raise SageError(
            f"only {early} of {len(table)} kills came before the run had logged all: the runs are "
            "over too soon to be killed; make those of fire_kills.PROFILE longer"
        )
    twice = table["rows"] != table["rows undisturbed"]
    return table[~table["identical"] | twice | (table["orphans"] > 0)]


def _faults(fire: Fire) -> pd.DataFrame:
    made, _ = fire.reference()
    table = fire_faults.faults(made, fire.folder, functools.partial(fire.keep, "faults"))
    done = table.dropna(subset=["identical"])  # what this machine cannot do is left out
    return done[done["traceback"] | ~done[["resumed", "identical"]].astype(bool).all(axis=1)]


def _profiles(fire: Fire) -> pd.DataFrame:
    import sage_lib.algorithm.backend  # noqa: F401  (Unsloth before all that callbacks import)

    # isort: split
    from sage_lib.training.callbacks import check_sections

    # Unsloth says of each profile what it changes on a CPU, thousands of times.
    with contextlib.redirect_stdout(io.StringIO()):
        table = fire_fuzz.profiles(PROFILES, VALUES[fire.long], fire.seed, check_sections)
    return _wrong(fire, "profiles", table)


def _files(fire: Fire) -> pd.DataFrame:
    folder = fire.folder / "files"
    folder.mkdir()
    return _wrong(fire, "files", fire_fuzz.files(folder, COPIES[fire.long], fire.seed))


def _wrong(fire: Fire, name: str, table: pd.DataFrame) -> pd.DataFrame:
    fire.keep(name, table)
    print(table.drop(columns="example").to_string(index=False), flush=True)
    return table[table["traceback"] + table["silent"] > 0]


def _answers(fire: Fire) -> pd.DataFrame:
    table = fire_fuzz.hostile(ANSWERS, fire.seed)
    fire.keep("answers", table)
    print(table.drop(columns="example").to_string(index=False), flush=True)
    return table[table["credited"] > 0]


#: By name: does one part, and returns the rows that should not be.
PARTS: dict[str, Callable[[Fire], pd.DataFrame]] = {
    "kills": _kills,
    "faults": _faults,
    "profiles": _profiles,
    "files": _files,
    "answers": _answers,
}


def main(argv: Sequence[str] | None = None) -> None:
    first, *_ = (__doc__ or "").split("\n")
    parser = argparse.ArgumentParser(prog="python -m sage_lib.pipeline.fire", description=first)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--long", action="store_true", help="half an hour of it, not minutes")
    parser.add_argument("--seed", type=int, default=0, help="of moments, values and answers")
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="sage_fire_"))
    fire, failed = Fire(folder, options.long, options.seed), []
    try:
        for name in options.parts:
            wrong = PARTS[name](fire)
            if len(wrong):
                failed.append(name)
                print(wrong.to_string(index=False), flush=True)
    except SageError as error:
        sys.exit(f"error: {error}")
    if failed:
        sys.exit(f"error: {', '.join(failed)}: see the rows above, and {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
