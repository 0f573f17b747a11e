"""One training or measurement: where it keeps its work and its results, and what it is made from.

The folders follow from the name. What a run is made from is worked out when it is first asked for:
to read a path, nothing is hashed and no problem is generated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.experiment import records
from sage_lib.experiment.checked import canonical, digest
from sage_lib.experiment.profile import BASE, Profile, names_below
from sage_lib.files import write_bytes, write_text


@dataclass(frozen=True)
class Run:
    """One training or measurement: ``build`` holds what can be made again, ``measured`` what is
    kept."""

    profile: Profile = field(compare=False, repr=False)
    stage: str
    name: str  # "sft" or "grpo-s3407"
    build: Path
    measured: Path
    method: str = BASE
    seed: int | None = None
    policy: Run | None = None  # whose model it starts from, or measures
    earlier: tuple[Run, ...] = ()  # of other methods, whose policies it starts from or reads
    #: Parts of ``made_from``, each a function of the run: see :mod:`experiment.made_from`.
    reads: tuple[Callable[[Run], dict[str, Any]], ...] = field(
        default=(), compare=False, repr=False
    )
    makes: str = ""  # what must lie in ``build`` for the run to be done

    @functools.cached_property
    def made_from(self) -> dict[str, Any]:
        """Settings, data and earlier weights that decide the results."""
        parts = [part(self) for part in self.reads]
        return {key: value for part in parts for key, value in part.items()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of what the results are made from."""
        return digest(self.made_from)

    @functools.cached_property
    def build_fingerprint(self) -> str:
        """Hash of what the work in ``build`` is made from; how samples are read is no part."""
        return digest(self.made_from.get("sampled", self.made_from))

    def anew(self) -> Run:
        """Return the run without its fingerprint, which earlier runs may have changed."""
        earlier = tuple(run.anew() for run in self.earlier)
        return dataclasses.replace(self, policy=self.policy and self.policy.anew(), earlier=earlier)

    @property
    def base(self) -> Run:
        """The run that made the base policy."""
        return self if self.policy is None else self.policy.base

    @property
    def record(self) -> Path:
        return self.measured / "record.json"

    @property
    def live_steps(self) -> Path:  # the step log while the stage runs
        return self.build / "steps.jsonl"

    @property
    def lock(self) -> Path:  # held by the process that works; beside build, which may be put aside
        return self.build.with_name(f"{self.build.name}.lock")

    @property
    def log(self) -> Path:  # what the run's own process prints
        return self.build.with_name(f"{self.build.name}.log")

    @property
    def model(self) -> Path:
        return self.build / "model"

    @property
    def samples(self) -> Path:  # completions, a row per sample
        return self.build / "samples.jsonl"

    @property
    def place(self) -> str:
        """The folder below a profile's own: "sft", "rl/grpo-s3407"."""
        name = self.measured.name
        return name if name == self.stage else f"{self.measured.parent.name}/{name}"

    @property
    def weights(self) -> str:
        """Hash of the finished model's weights, "" while there is none."""
        finished = self.model.is_dir() and self.record.is_file()
        return str(records.load(self.record)["weights"]) if finished else ""

    def done(self) -> bool:
        """Return whether the run is finished from the same settings and weights, and what it made
        is still on disk. The record alone is not enough: it may come from another machine."""
        mark = self.build / "done"
        if not mark.is_file() or mark.read_text() != self.fingerprint:
            return False
        return (self.build / self.makes).exists() and records.done(self.record, self.fingerprint)

    def begin(self, seed: int, settings: dict[str, Any]) -> records.Record:
        """Return the record of this run, whose clock starts."""
        return records.Record(self.stage, self.profile.name, self.fingerprint, seed, settings)

    def finish(self, record: records.Record, **extra: Any) -> dict[str, Any]:
        """Write the record, and last of all the mark that makes the stage done."""
        files = [path for path in sorted(self.measured.iterdir()) if path != self.record]
        sizes = {path.name: path.stat().st_size for path in files if path.is_file()}
        extra = {"made_from": canonical(self.made_from), **extra, "sizes": sizes}
        written = record.finish(self.record, **extra)
        write_text(self.build / "done", self.fingerprint)
        return written

    def publish_steps(self) -> None:
        """Keep the finished step log beside the record."""
        write_bytes(self.measured / "steps.jsonl", self.live_steps.read_bytes())

    def is_prepared(self) -> bool:
        """True once the folder holds work of these very settings."""
        file = self.build / "fingerprint"
        return file.is_file() and file.read_text() == self.build_fingerprint

    def prepare(self) -> None:
        """Make the folders; put aside what other settings left there, so that nothing is lost."""
        if self.build.is_dir() and not self.is_prepared():
            put_aside(self.build)
        self.build.mkdir(parents=True, exist_ok=True)
        self.measured.mkdir(parents=True, exist_ok=True)
        write_text(self.build / "fingerprint", self.build_fingerprint)

    def made_below(self) -> Run | None:
        """Return a finished run of the same fingerprint that a profile below has made.

        A profile below is one that a variant changes (smoke, of "smoke+rl.beta=0.2"), or that a
        file extends (paper, of paper_losses)."""
        for name in names_below(self.profile):
            build, measured = paths.build(name), paths.measured(name)
            for mark in sorted(build.glob("rl/*/done" if self.policy else "sft/done")):
                if mark.read_text() == self.fingerprint:
                    place = mark.parent.relative_to(build)
                    run = dataclasses.replace(self, build=mark.parent, measured=measured / place)
                    if run.done():
                        return run
        return None

    def take(self, made: Run) -> None:
        """Copy the result of a finished run with the same fingerprint from another folder, by links
        where the disk can. Last of all the mark."""
        shutil.rmtree(self.model, ignore_errors=True)  # of an attempt that was ended
        try:
            shutil.copytree(made.model, self.model, copy_function=os.link)
        except OSError:
            shutil.copytree(made.model, self.model, dirs_exist_ok=True)
        shutil.copytree(made.measured, self.measured, dirs_exist_ok=True)
        write_text(self.build / "done", self.fingerprint)


def put_aside(folder: Path) -> Path:
    """Rename a folder to the first free name.old1, name.old2, ...; returns the new place."""
    names = (folder.with_name(f"{folder.name}.old{number}") for number in itertools.count(1))
    return folder.rename(next(name for name in names if not name.exists()))
