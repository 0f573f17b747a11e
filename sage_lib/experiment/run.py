"""One training or measurement: where it keeps its work and its results, and what it is made from.

The folders follow from the name. What a run is made from is worked out when it is first asked for:
to read a path, nothing is hashed and no problem is generated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.algorithm.guides import needs_entropies, reads_rewards
from sage_lib.experiment import problems, records
from sage_lib.experiment.checked import canonical, digest
from sage_lib.experiment.profile import Profile, load_profile
from sage_lib.experiment.settings import BASE, ROLLOUTS, Data, Rft
from sage_lib.files import model_hash, write_bytes, write_text

#: Settings of an evaluation that decide what is drawn. The batch size does not.
_SAMPLING = ["samples", "sampled", "temperature", "top_p", "top_k", "min_p", "max_new_tokens"]
_SAMPLING += ["seed", "engine", "vllm"]
#: Settings that change when something is written, never what is learned.
_BOOKKEEPING = {"save_steps", "save_total_limit", "report_to"}
#: What a run is made from that earlier runs made; the rest is settings.
_MADE_BEFORE = {"policy", "entropies", "base"}
#: What a stage that reads policies token by token takes from ``exploration``.
READ = {
    "dynamics": ("prompts", "completions"),
    "replay": (),
    "impact": ("prompts", "completions", "replaced", "continuations"),
}
#: The guides that are traced on completions: names of algorithm.guides.GUIDES.
TRACED = ("random", "token", "branch")


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

    @functools.cached_property
    def made_from(self) -> dict[str, Any]:
        """Settings, data and earlier weights that decide the results."""
        return _made_from(self)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of what the results are made from."""
        return digest(self.made_from)

    @functools.cached_property
    def stamp(self) -> str:
        """Hash of what the work in ``build`` is made from; how samples are read is no part."""
        return digest(self.made_from.get("sampled", self.made_from))

    @functools.cached_property
    def recipe(self) -> str:
        """Hash of the settings alone, whichever weights another machine made by them."""
        return digest([self.policy.recipe if self.policy else "", _settings(self.made_from)])

    @property
    def makes(self) -> tuple[str, ...]:
        """What must lie in ``build`` for the run to be done."""
        if self.stage in ("sft", "rl"):
            return ("model",)
        return ("samples.jsonl",) if self.stage == "evaluate" else ()

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
        made = self.model.is_dir() and self.record.is_file()
        return str(records.load(self.record)["weights"]) if made else ""

    def done(self) -> bool:
        """Finished from the same settings and weights, with what it made still on disk. The record
        alone is not enough: it may come from another machine."""
        mark = self.build / "done"
        if not mark.is_file() or mark.read_text() != self.fingerprint:
            return False
        made = all((self.build / name).exists() for name in self.makes)
        return made and records.done(self.record, self.fingerprint)

    def finish(self, record: records.Record, **extra: Any) -> dict[str, Any]:
        """Write the record, and last of all the mark that makes the stage done."""
        kept = [path for path in sorted(self.measured.iterdir()) if path != self.record]
        sizes = {path.name: path.stat().st_size for path in kept if path.is_file()}
        more = {"recipe": self.recipe, "made_from": canonical(self.made_from), **extra}
        written = record.finish(self.record, **more, sizes=sizes)
        write_text(self.build / "done", self.fingerprint)
        return written

    def publish_steps(self) -> None:
        """Keep the finished step log beside the record."""
        write_bytes(self.measured / "steps.jsonl", self.live_steps.read_bytes())

    def is_prepared(self) -> bool:
        """True once the folder holds work of these very settings."""
        stamp = self.build / "fingerprint"
        return stamp.is_file() and stamp.read_text() == self.stamp

    def prepare(self) -> None:
        """Make the folders; put aside what other settings left there, so that nothing is lost."""
        if self.build.is_dir() and not self.is_prepared():
            put_aside(self.build)
        self.build.mkdir(parents=True, exist_ok=True)
        self.measured.mkdir(parents=True, exist_ok=True)
        write_text(self.build / "fingerprint", self.stamp)

    def take(self, made: Run) -> None:
        """Be what another folder's run of the same fingerprint made: its files, linked where the
        disk can. Last of all the mark."""
        for name in self.makes:
            whole = self.build / name
            shutil.copytree(made.build / name, whole, copy_function=_link, dirs_exist_ok=True)
        shutil.copytree(made.measured, self.measured, dirs_exist_ok=True)
        write_text(self.build / "done", self.fingerprint)


def _link(source: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)  # of an attempt that was ended
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)


def put_aside(folder: Path) -> Path:
    """Rename a folder to the first free name.old1, name.old2, ...; returns the new place."""
    names = (folder.with_name(f"{folder.name}.old{number}") for number in itertools.count(1))
    return folder.rename(next(name for name in names if not name.exists()))


def _settings(made_from: dict[str, Any]) -> dict[str, Any]:
    chosen = {key: value for key, value in made_from.items() if key not in _MADE_BEFORE}
    return {k: _settings(v) if k == "sampled" else v for k, v in chosen.items()}


def _content(data: Data | None) -> dict[str, Any] | None:
    """What a data set is; not how its results are shown."""
    if data is None:
        return None
    own = {"rows": data.rows, "seed": data.seed, "revision": data.revision}
    return {**own, **data.settings.identity()}


def _learning(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in _BOOKKEEPING}


def _trained_on(profile: Profile, data: Data | None) -> dict[str, Any]:
    """A training set, and the held-out questions that are left out of it."""
    return {"data": _content(data), "held out": digest(sorted(problems.met(profile, data)))}


def _entropy_digest(profile: Profile, guide: Mapping[str, Any] | None) -> str:
    """Hash of the entropies that a guide is made from; "" where it needs none."""
    if guide is None or not needs_entropies(guide):
        return ""
    path = paths.measured(profile.name) / "entropies" / "entropy.json"
    return digest(path.read_text()) if path.is_file() else "not measured"


def _made_from(run: Run) -> dict[str, Any]:
    profile, policy, evaluation = run.profile, run.policy, run.profile.evaluation
    if policy is None:
        return _of_sft(profile)
    found: dict[str, Any] = {"policy": (policy.fingerprint, policy.weights)}
    if run.stage == "rl":
        return found | _of_rl(profile, run)
    if run.stage in ("evaluate", "trace"):  # a sample's random stream follows from the label
        found["data"] = [(data.label, _content(data)) for data in evaluation.data]
    elif run.stage != "optimum":
        found |= _trained_on(profile, profile.rl_data)
    if run.stage == "evaluate":
        found["sampling"] = {key: getattr(evaluation, key) for key in _SAMPLING}
        base = sft_run(profile).weights
        return {"sampled": found, "scored": evaluation.scored, "base": base}
    if run.stage == "optimum":
        shown = [_content(data) for data in evaluation.data if not data.ood]
        every = [method.guide for method in profile.methods.values() if method.guide]
        guides = [guide for guide in every if not reads_rewards(guide)]
        digests = [_entropy_digest(profile, guide) for guide in guides]
        found |= {"problems": shown, "listed": evaluation.listed}
        return found | {"guides": guides, "entropies": digests}
    found["rollouts"] = {key: profile.rl.get(key) for key in (*ROLLOUTS, "seed")}
    if run.stage == "entropies":
        return found | {"prompts": evaluation.traced}
    if run.stage == "trace":
        guides = [profile.guide_choice(name) for name in TRACED]
        found["problems"] = evaluation.traced, evaluation.sampled
        found["entropies"] = [_entropy_digest(profile, guide) for guide in guides]
        return found | {"guides": guides}
    if run.stage == "effects":
        guide = profile.guide_choice("branch")
        return found | {"guide": guide, "entropies": _entropy_digest(profile, guide)}
    found["base"] = sft_run(profile).weights
    return found | {name: getattr(profile.exploration, name) for name in READ[run.stage]}


def _of_sft(profile: Profile) -> dict[str, Any]:
    model = profile.model
    if model.name != "tiny_qwen":
        model = dataclasses.replace(model, architecture=None)  # only estimates memory
    found = {"model": model, "sft": _learning(profile.sft)}
    if any(Path(model.name).glob("*.safetensors")):  # a folder, whose weights may be others now
        found["start"] = model_hash(Path(model.name))
    if not profile.sft:
        return found
    return {**found, **_trained_on(profile, profile.sft_data), "lora": profile.sft_lora}


def _of_rl(profile: Profile, run: Run) -> dict[str, Any]:
    chosen, evaluation = profile.methods[run.method], profile.evaluation
    found = _trained_on(profile, profile.rl_data)
    found["lora"] = profile.rl_lora if chosen.lora else None
    shown = [_content(data) for data in evaluation.data if not data.ood]
    found["evaluated"] = {"every": evaluation.every, "data": shown} if evaluation.every else {}
    if chosen.rft is not None:
        rounds = profile.rft_of(run.method)
        if rounds.demonstrations is not None:
            found["data"] = _content(demonstrated(profile, rounds).sft_data)
        found["rft"] = {**canonical(rounds), "sft": _learning(rounds.sft)}
        found["rollouts"] = {key: profile.rl[key] for key in ROLLOUTS}
        return {**found, "reward": chosen.reward, "seed": run.seed}
    found["rl"] = _learning({**profile.rl_of(run.method), "seed": run.seed})
    # How a method is shown teaches it nothing; nor does an anchor without a KL term.
    anchor = chosen.anchor if found["rl"]["beta"] else "k3"
    learned = dataclasses.replace(chosen, label="", family="main", rl={}, lora=True, seeds=None)
    found["method"] = dataclasses.replace(learned, anchor=anchor)
    found["entropies"] = _entropy_digest(profile, chosen.guide)
    if profile.compute.backend != "trl":  # whose loss is not TRL's to the last digit
        found["backend"] = profile.compute.backend
    return found


def new_run(profile: Profile, stage: str, place: str, name: str, **more: Any) -> Run:
    """A run of a stage; ``place``: its folder below the profile's."""
    build, measured = paths.build(profile.name) / place, paths.measured(profile.name) / place
    return Run(profile, stage, name, build, measured, **more)


def sft_run(profile: Profile) -> Run:
    """The run that makes the base policy."""
    return new_run(profile, "sft", "sft", "sft")


def demonstrated(profile: Profile, rft: Rft) -> Profile:
    """The profile whose SFT data a method learns from by ``rft.demonstrations``."""
    changes = [f"sft_data.{k}={json.dumps(v)}" for k, v in (rft.demonstrations or {}).items()]
    return load_profile("+".join([profile.spec, *changes]))
