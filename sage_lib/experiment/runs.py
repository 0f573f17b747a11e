"""Where each stage of a profile keeps its work and its results, and what each was made from."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from sage_lib import paths
from sage_lib.experiment import records
from sage_lib.experiment.profile import Profile
from sage_lib.files import write_bytes


@dataclass(frozen=True)
class Run:
    """One stage. ``build`` holds what can be made again, ``measured`` what is kept; ``name`` is "sft" or "grpo-s3407"."""

    name: str
    build: Path
    measured: Path
    fingerprint: str

    @property
    def record(self) -> Path:
        """Written last: it marks the stage as done."""
        return self.measured / "record.json"

    @property
    def live_steps(self) -> Path:
        """The step log while the stage runs."""
        return self.build / "steps.jsonl"

    @property
    def model(self) -> Path:
        return self.build / "model"

    @property
    def samples(self) -> Path:
        """An evaluation's completions, a row per sample."""
        return self.build / "samples.jsonl"

    @property
    def weights(self) -> str:
        """Hash of the finished model's weights, "" while there is none."""
        return (
            records.load(self.record)["weights"]
            if self.model.is_dir() and self.record.is_file()
            else ""
        )

    def done(self) -> bool:
        """Finished from the same settings and weights, with what it made (a model, or samples) still on disk.

        The record alone is not enough: a fresh clone brings the committed records of somebody else's runs.
        """
        made = self.model.is_dir() or self.samples.is_file()
        return made and records.done(self.record, self.fingerprint)

    def publish_steps(self) -> None:
        """Keep the finished step log beside the record."""
        write_bytes(self.measured / "steps.jsonl", self.live_steps.read_bytes())

    def prepared(self) -> bool:
        """True once the folder holds work of these very settings, or nothing yet."""
        stamp = self.build / "fingerprint"
        return stamp.is_file() and stamp.read_text() == self.fingerprint

    def prepare(self) -> None:
        """Make the folders; put aside what other settings left there, so that nothing is mixed and nothing lost."""
        stamp = self.build / "fingerprint"
        if self.build.is_dir() and not self.prepared():
            n = 1
            while (old := self.build.with_name(f"{self.build.name}.old{n}")).exists():
                n += 1
            shutil.move(self.build, old)
        self.build.mkdir(parents=True, exist_ok=True)
        self.measured.mkdir(parents=True, exist_ok=True)
        write_bytes(stamp, self.fingerprint.encode())


_SFT = (
    "model",
    "task",
    "sft_data",
    "sft",
    "sft_lora",
    "evaluation.data",
    "evaluation.traced",
)  # held-out problems are kept out of training
_SAMPLING = tuple(
    f"evaluation.{name}"
    for name in (
        "data",
        "samples",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_new_tokens",
        "seed",
        "scored",
        "engine",
        "vllm",
    )
)  # not the batch size: samples do not depend on it


def sft_run(profile: Profile) -> Run:
    return Run(
        "sft",
        paths.build(profile.name) / "sft",
        paths.measured(profile.name) / "sft",
        profile.fingerprint(*_SFT),
    )


def rl_run(profile: Profile, method: str, seed: int) -> Run:
    """The run of one method (a key of ``profile.methods``) and seed."""
    name = f"{method}-s{seed}"
    chosen = profile.methods[method]
    settings = profile.fingerprint(
        *_SFT, "rl_data", "rl", "rl_lora", *(("guide",) if chosen.guide else ())
    )
    changes = "-".join(f"{k}={v}" for k, v in sorted(vars(chosen).items()) if k != "label")
    return Run(
        name,
        paths.build(profile.name) / "rl" / name,
        paths.measured(profile.name) / "rl" / name,
        f"{settings}/{sft_run(profile).weights}/{changes}/{seed}",
    )


def evaluation_run(profile: Profile, of: Run) -> Run:
    """The evaluation of the model that ``of`` made."""
    name = f"eval-{of.name}"
    return Run(
        name,
        paths.build(profile.name) / "evaluation" / of.name,
        paths.measured(profile.name) / "evaluation" / of.name,
        f"{of.fingerprint}/{of.weights}/{profile.fingerprint(*_SAMPLING)}",
    )


def trace_run(profile: Profile) -> Run:
    """The token-by-token traces of the first method's policy."""
    of = rl_runs(profile)[0][2]
    return Run(
        "trace",
        paths.build(profile.name) / "trace",
        paths.measured(profile.name) / "trace",
        f"{of.fingerprint}/{of.weights}/{profile.fingerprint('evaluation.data', 'evaluation.traced', 'guide')}",
    )


def effects_run(profile: Profile) -> Run:
    """What the branch guide adds to the expected gradient of each anchor."""
    return Run(
        "effects",
        paths.build(profile.name) / "effects",
        paths.measured(profile.name) / "effects",
        f"{sft_run(profile).fingerprint}/{sft_run(profile).weights}/{profile.fingerprint('rl_data', 'rl', 'guide')}",
    )


def rl_runs(profile: Profile) -> list[tuple[str, int, Run]]:
    """(method, seed, run) of every RL run of the profile, seed by seed."""
    return [
        (method, seed, rl_run(profile, method, seed))
        for seed in profile.seeds
        for method in profile.methods
    ]


def evaluations(profile: Profile) -> list[tuple[str, int | None, Run, Run]]:
    """(method, seed, evaluation, model) for the SFT model ("base", no seed) and every RL run that is evaluated."""
    chosen = [
        ("base", None, sft_run(profile)),
        *(r for r in rl_runs(profile) if r[0] in evaluated(profile)),
    ]
    return [(m, s, evaluation_run(profile, r), r) for m, s, r in chosen]


def evaluated(profile: Profile) -> tuple[str, ...]:
    """Keys of the methods that the profile evaluates."""
    return profile.evaluation.methods or tuple(profile.methods)
