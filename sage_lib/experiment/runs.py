"""Where each stage of a profile keeps its work and its results, and what each was made from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import shlex
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sage_lib import paths
from sage_lib.algorithm.guides import Guide, build_guide, needs_entropies
from sage_lib.errors import SageError
from sage_lib.experiment import problems, profile_files, records
from sage_lib.experiment.profile import (
    BASE,
    BOOKKEEPING,
    Data,
    Method,
    Profile,
    canonical,
    digest,
    flatten,
    load_profile,
    split_spec,
)
from sage_lib.experiment.profile_checks import DEMONSTRATIONS, ROLLOUTS
from sage_lib.files import read_json, write_bytes, write_text

#: Settings of RL that decide what its rollouts are.
_ROLLOUTS = (*ROLLOUTS, "seed")
#: Settings of an evaluation that decide what is drawn. Not the batch size: samples do not depend on
#: it.
_SAMPLING = (
    "samples",
    "sampled",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_new_tokens",
    "seed",
    "engine",
    "vllm",
)


P = ParamSpec("P")
T = TypeVar("T")
#: What a function of :func:`once` remembers, of published profiles and further arguments.
KEPT = 16
#: The guides that are traced on completions: names of algorithm.guides.GUIDES.
TRACED = ("random", "token", "branch")
#: Why the stage replay refuses a backend.
NOT_WATCHED = (
    "the stage replay watches every update, and Unsloth computes its loss elsewhere: set "
    "compute.backend=trl, or exploration.seeds=0"
)


@dataclass(frozen=True)
class Run:
    """One stage's work for one policy.

    ``build`` holds what can be made again, ``measured`` what is kept. ``fingerprint`` says what the
    results are made from, ``stamp`` what the work in ``build`` is made from: an evaluation whose
    samples are read in another way keeps its samples.
    """

    stage: str
    name: str  # "sft" or "grpo-s3407"
    build: Path
    measured: Path
    fingerprint: str
    stamp: str
    recipe: str  # of the settings alone, whichever weights another machine made by them
    makes: tuple[str, ...] = ()  # what must lie in ``build`` for the stage to be done
    method: str = BASE
    seed: int | None = None
    policy: Run | None = None  # whose model is measured, where it is another run's
    published: bool = False  # ``measured`` came with the companion: it is read, never written
    #: The settings behind ``fingerprint``, for records: a later difference can then be named.
    made_from: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def record(self) -> Path:
        return self.measured / "record.json"

    @property
    def live_steps(self) -> Path:
        """The step log while the stage runs."""
        return self.build / "steps.jsonl"

    @property
    def lock(self) -> Path:
        """Locked by the process that does the work. Beside ``build``, which may be put aside."""
        return self.build.with_name(f"{self.build.name}.lock")

    @property
    def log(self) -> Path:
        """What the run's own process prints."""
        return self.build.with_name(f"{self.build.name}.log")

    @property
    def model(self) -> Path:
        return self.build / "model"

    @property
    def samples(self) -> Path:
        """Completions, a row per sample."""
        return self.build / "samples.jsonl"

    @property
    def place(self) -> str:
        """The folder below a profile's own, for messages."""
        return (
            "/".join(self.measured.parts[-2:]) if self.measured.name != self.stage else self.stage
        )

    @property
    def weights(self) -> str:
        """Hash of the finished model's weights, "" while there is none; published results come
        without the model, and their record tells."""
        made = (self.published or self.model.is_dir()) and self.record.is_file()
        return str(records.load(self.record)["weights"]) if made else ""

    def done(self) -> bool:
        """Finished from the same settings and weights, with what it made still on disk.

        The record alone is not enough: a fresh clone brings the committed records of other runs.
        """
        mark = self.build / "done"
        if not mark.is_file() or mark.read_text() != self.fingerprint:
            return False
        made = all((self.build / name).exists() for name in self.makes)
        return made and records.done(self.record, self.fingerprint)

    def finish(self, record: records.Record, **extra: Any) -> dict[str, Any]:
        """Write the record, and last of all the mark that makes the stage done; returns the
        record."""
        kept = [path for path in sorted(self.measured.iterdir()) if path != self.record]
        sizes = {path.name: path.stat().st_size for path in kept if path.is_file()}
        more = {"recipe": self.recipe, "made_from": canonical(self.made_from), **extra}
        more["sizes"] = sizes
        written = record.finish(self.record, **more)
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
        """Make the folders; put aside what other settings left there, so that nothing is lost.

        SageError for a published run: a stage never writes there.
        """
        if self.published:
            raise SageError(
                f"{self.place} is published with the companion, and nothing is trained over it: "
                'load the profile with results = "own"'
            )
        if self.build.is_dir() and not self.is_prepared():
            put_aside(self.build)
        self.build.mkdir(parents=True, exist_ok=True)
        self.measured.mkdir(parents=True, exist_ok=True)
        write_text(self.build / "fingerprint", self.stamp)

    def take(self, made: Run) -> None:
        """Be what another folder's run of the same fingerprint made: its files, linked where the
        disk can, since what is done is never written again. Last of all the mark."""
        for name in self.makes:
            whole = self.build / name
            shutil.copytree(made.build / name, whole, copy_function=_link, dirs_exist_ok=True)
        shutil.copytree(made.measured, self.measured, dirs_exist_ok=True)
        write_text(self.build / "done", self.fingerprint)


def _link(source: str, target: str) -> str:
    Path(target).unlink(missing_ok=True)  # of an attempt that was ended
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)
    return target


def put_aside(folder: Path) -> Path:
    """Rename a folder to the first free name.old1, name.old2, ...; returns the new place."""
    number = 1
    while (old := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    shutil.move(folder, old)
    return old


#: What a run is made from that earlier runs made; the rest is settings.
_MADE_BEFORE = ("policy", "entropies", "base", "reference")


def _settings(made_from: dict[str, Any]) -> dict[str, Any]:
    chosen = {key: value for key, value in made_from.items() if key not in _MADE_BEFORE}
    return {k: _settings(v) if k == "sampled" else v for k, v in chosen.items()}


def _run(
    profile: Profile, stage: str, folder: str, name: str, made_from: dict[str, Any], **more: Any
) -> Run:
    fingerprint = digest(made_from)
    policy: Run | None = more.get("policy")
    recipe = digest([policy.recipe if policy else "", _settings(made_from)])
    return Run(
        stage=stage,
        name=name,
        build=paths.build(profile.name) / folder,
        measured=paths.measured(profile.name, profile.published) / folder,
        published=profile.published,
        made_from=made_from,
        **{"fingerprint": fingerprint, "stamp": fingerprint, "recipe": recipe, **more},
    )


def _content(data: Data | None) -> dict[str, Any] | None:
    """What a data set is; not how its results are shown."""
    if data is None:
        return None
    own = {"rows": data.rows, "seed": data.seed, "revision": data.revision}
    return {**own, **data.settings.identity()}


def _learning(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in BOOKKEEPING}


def once(make: Callable[Concatenate[Profile, P], T]) -> Callable[Concatenate[Profile, P], T]:
    """What ``make`` finds for a published profile, and for the same further arguments, is found
    once.

    A notebook asks for its runs, and for what they measured, dozens of times. Published results
    change no more; of a profile's own ones every run changes the next. Callers share what is found:
    they must not change it.
    """
    kept: dict[Hashable, tuple[Profile, T]] = {}  # by identity: a profile is not hashable

    @functools.wraps(make)
    def made(profile: Profile, *args: P.args, **kwargs: P.kwargs) -> T:
        if not profile.published:
            return make(profile, *args, **kwargs)
        key = (id(profile), args, *kwargs.items())
        known = kept.get(key)
        if known is None:
            if len(kept) >= KEPT:
                del kept[next(iter(kept))]
            found = make(profile, *args, **kwargs)
            known = kept[key] = profile, found  # which keeps its id its own
        return known[1]

    return made


@once
def sft_run(profile: Profile) -> Run:
    """The run that makes the base policy."""
    model = profile.model
    if model.name != "tiny_qwen":
        model = dataclasses.replace(model, architecture=None)  # only estimates memory
    made_from: dict[str, Any] = {"model": model, "sft": _learning(profile.sft)}
    if profile.sft:
        data = profile.sft_data
        held_out = sorted(problems.met(profile, data))
        made_from["data"] = _content(data)
        made_from["held out"] = digest(held_out)
        made_from["lora"] = profile.sft_lora
    return _run(profile, "sft", "sft", "sft", made_from, makes=("model",))


def entropy_run(profile: Profile) -> Run:
    """The base policy's token entropies on RL's prompts, from which a guide may take its
    threshold."""
    base = sft_run(profile)
    made_from = {
        "policy": (base.fingerprint, base.weights),
        "data": _content(profile.rl_data),
        "held out": _held_out(profile),
        "rollouts": {key: profile.rl.get(key) for key in _ROLLOUTS},
        "prompts": profile.evaluation.traced,
    }
    return _run(profile, "entropies", "entropies", "entropies", made_from, policy=base)


def entropies(profile: Profile) -> dict[str, Any]:
    """What the stage entropies measured: tokens, mean, quantiles (nats), histogram."""
    run = entropy_run(profile)
    path = run.measured / "entropy.json"
    if not path.is_file():
        raise SageError(
            f"{run.place}/entropy.json is missing: run notebook 21 for this profile, or "
            f"sage-companion stage entropies --profile {profile.spec}"
        )
    return dict(read_json(path))


def guide_of(profile: Profile, choice: Mapping[str, Any]) -> Guide:
    """The guide of a choice, made from the base's entropies where it asks for them."""
    measured = entropies(profile)["quantiles"] if needs_entropies(choice) else None
    return build_guide(choice, measured)


def rl_run(profile: Profile, method: str, seed: int) -> Run:
    """The run of one method (a key of ``profile.methods``) and seed."""
    chosen, base = profile.methods[method], sft_run(profile)
    if chosen.rft is not None:
        return _rft_run(profile, method, seed, base)
    settings = {**profile.rl, **chosen.rl, "seed": seed}
    made_from = {
        "policy": (base.fingerprint, base.weights),
        "data": _content(profile.rl_data),
        "held out": _held_out(profile),
        "rl": _learning(settings),
        "lora": profile.rl_lora if chosen.lora else None,
        "method": _learned(chosen, settings["beta"]),
        "entropies": _entropy_digest(profile, chosen.guide),
        "evaluated": _evaluated_in_training(profile),
    }
    if chosen.reference is not None:
        anchor = reference_run(profile, method)
        made_from["reference"] = (anchor.fingerprint, anchor.weights)
    if profile.compute.backend != "trl":  # whose loss is not TRL's to the last digit
        made_from["backend"] = profile.compute.backend
    return _policy_run(profile, method, seed, base, made_from)


def _rft_run(profile: Profile, method: str, seed: int, base: Run) -> Run:
    """:func:`rl_run` of a method that is trained by rounds of rejection sampling."""
    rft, lora = profile.rft_of(method), profile.methods[method].lora
    demonstrated = rft.select in DEMONSTRATIONS
    made_from = {
        "policy": (base.fingerprint, base.weights),
        "data": _content(profile.sft_data if demonstrated else profile.rl_data),
        "held out": _held_out(profile),
        "rft": {**canonical(rft), "sft": _learning(rft.sft)},
        "rollouts": {key: profile.rl[key] for key in ROLLOUTS},
        "lora": profile.rl_lora if lora else None,
        "seed": seed,
        "evaluated": _evaluated_in_training(profile),
    }
    return _policy_run(profile, method, seed, base, made_from)


def _policy_run(
    profile: Profile, method: str, seed: int, base: Run, made_from: dict[str, Any]
) -> Run:
    name = f"{method}-s{seed}"
    more: dict[str, Any] = {"makes": ("model",), "method": method, "seed": seed, "policy": base}
    return _run(profile, "rl", f"rl/{name}", name, made_from, **more)


def reference_profile(profile: Profile, method: str) -> Profile:
    """The profile whose base a method is anchored to: its own, unless the method changes it."""
    change = profile.methods[method].reference
    return profile if change is None else load_profile(f"{profile.spec}+{change}")


def reference_run(profile: Profile, method: str) -> Run:
    """The run that makes the policy a method is anchored to."""
    return sft_run(reference_profile(profile, method))


def _learned(method: Method, beta: float) -> Method:
    """What a method trains with, beside its ``rl`` settings: of how it is shown nothing, and
    without a KL term no anchor."""
    shown = dataclasses.replace(method, label="", family="main", rl={}, lora=True, seeds=None)
    return shown if beta else dataclasses.replace(shown, anchor="k3")


def _evaluated_in_training(profile: Profile) -> dict[str, Any]:
    """What a run's log of exact evaluations is made from."""
    settings = profile.evaluation
    if not settings.every:
        return {}
    data = [_content(one) for one in settings.data if not one.ood]
    return {"every": settings.every, "data": data}


def _held_out(profile: Profile) -> str:
    """Hash of the held-out questions that RL's prompts would otherwise meet."""
    return digest(sorted(problems.met(profile, profile.rl_data)))


def _entropy_digest(profile: Profile, guide: Mapping[str, Any] | None) -> str:
    """Hash of the entropies that a guide is made from; "" where it needs none."""
    if guide is None or not needs_entropies(guide):
        return ""
    path = entropy_run(profile).measured / "entropy.json"
    return digest(path.read_text()) if path.is_file() else "not measured"


def require_entropies(profile: Profile, guide: Mapping[str, Any] | None) -> None:
    """SageError where a guide is to be made from entropies that were not measured with the
    profile's settings, or not yet: an old threshold must not be taken without a word."""
    if guide is None or not needs_entropies(guide) or entropy_run(profile).done():
        return
    raise SageError(
        f"the base's entropies, from which the guide takes its threshold, were not measured with "
        f"the settings of profile {profile.name}: "
        f"sage-companion stage entropies --profile {profile.spec} does it, or notebook 21"
    )


def evaluation_run(profile: Profile, policy: Run) -> Run:
    """The evaluation of the model that ``policy`` made."""
    settings = profile.evaluation
    sampled = {
        "policy": (policy.fingerprint, policy.weights),
        # Each sample's random stream follows from its data set's label.
        "data": [(data.label, _content(data)) for data in settings.data],
        "sampling": {key: getattr(settings, key) for key in _SAMPLING},
    }
    read = {"sampled": sampled, "scored": settings.scored, "base": sft_run(profile).weights}
    more: dict[str, Any] = {"method": policy.method, "seed": policy.seed, "policy": policy}
    more |= {"stamp": digest(sampled), "makes": ("samples.jsonl",)}
    return _run(
        profile, "evaluate", f"evaluation/{policy.name}", f"eval-{policy.name}", read, **more
    )


def trace_run(profile: Profile) -> Run:
    """The token-by-token traces of the reference method's policy."""
    policy = policy_runs(profile)[min(1, len(profile.methods))]
    settings = profile.evaluation
    guides = [profile.guide_choice(name) for name in TRACED]
    made_from = {
        "policy": (policy.fingerprint, policy.weights),
        "data": [(data.label, _content(data)) for data in settings.data],
        "problems": (settings.traced, settings.sampled),
        "rollouts": {key: profile.rl.get(key) for key in _ROLLOUTS},
        "guides": guides,
        "entropies": [_entropy_digest(profile, guide) for guide in guides],
    }
    more: dict[str, Any] = {"method": policy.method, "seed": policy.seed, "policy": policy}
    return _run(profile, "trace", "trace", "trace", made_from, **more)


def effects_run(profile: Profile) -> Run:
    """What the branch guide adds to the expected gradient of each anchor."""
    base, guide = sft_run(profile), profile.guide_choice("branch")
    made_from = {
        "policy": (base.fingerprint, base.weights),
        "data": _content(profile.rl_data),
        "held out": _held_out(profile),
        "entropies": _entropy_digest(profile, guide),
        "rollouts": {key: profile.rl.get(key) for key in _ROLLOUTS},
        "guide": guide,
    }
    return _run(profile, "effects", "effects", "effects", made_from, policy=base)


def explored(profile: Profile, methods: Sequence[str] | None = None) -> list[Run]:
    """The RL runs whose policies are read token by token: of the methods that ``exploration`` names
    (or of ``methods``) that are trained, the first ``exploration.seeds`` seeds."""
    settings = profile.exploration
    named = methods or settings.methods or (profile.reference,)
    return [
        rl_run(profile, method, seed)
        for method in named
        if method in profile.methods
        for seed in profile.seeds_of(method)[: settings.seeds]
    ]


def _read(profile: Profile, policy: Run, stage: str, *settings: str) -> Run:
    """The run that measures how ``policy`` treats RL's prompts, from some settings of
    ``exploration``."""
    base = sft_run(profile)
    made_from = {
        "policy": (policy.fingerprint, policy.weights),
        "base": base.weights,
        "data": _content(profile.rl_data),
        "held out": _held_out(profile),
        "rollouts": {key: profile.rl.get(key) for key in _ROLLOUTS},
        **{name: getattr(profile.exploration, name) for name in settings},
    }
    more: dict[str, Any] = {"method": policy.method, "seed": policy.seed, "policy": policy}
    name = f"{stage}-{policy.name}"
    return _run(profile, stage, f"{stage}/{policy.name}", name, made_from, **more)


def dynamics_runs(profile: Profile) -> list[Run]:
    """Base against trained policy on the same completions, for every :func:`explored` policy."""
    found = explored(profile)
    return [_read(profile, run, "dynamics", "prompts", "completions") for run in found]


def replay_runs(profile: Profile) -> list[Run]:
    """The reference method's runs once more, each update watched token by token."""
    found = explored(profile, (profile.reference,))
    return [_read(profile, run, "replay") for run in found]


def impact_runs(profile: Profile) -> list[Run]:
    """Tokens replaced by their runner-up in completions of the reference method's policies."""
    settings = ("prompts", "completions", "replaced", "continuations")
    found = explored(profile, (profile.reference,))
    return [_read(profile, run, "impact", *settings) for run in found]


def exploration_runs(profile: Profile) -> list[Run]:
    """What notebooks 14 and 15 ask for beyond :func:`every_run`: published where it is there, and
    missed by nobody where it is not."""
    if not profile.rl:
        return []
    return [*dynamics_runs(profile), *replay_runs(profile), *impact_runs(profile)]


@once
def rl_runs(profile: Profile) -> list[tuple[str, int, Run]]:
    """(method, seed, run) of every RL run of the profile, seed by seed."""
    own = {method: profile.seeds_of(method) for method in profile.methods}
    seeds = dict.fromkeys([*profile.seeds, *itertools.chain(*own.values())])
    return [(m, s, rl_run(profile, m, s)) for s in seeds for m in own if s in own[m]]


def policy_runs(profile: Profile) -> list[Run]:
    """The run that makes the base, then every RL run."""
    return [sft_run(profile), *(run for _, _, run in rl_runs(profile))]


@once
def evaluations(profile: Profile) -> list[tuple[str, int | None, Run, Run]]:
    """(method, seed, evaluation, policy) of the base (no seed) and of every RL run that is
    evaluated."""
    chosen = [p for p in policy_runs(profile) if p.method in (BASE, *profile.evaluated)]
    return [(p.method, p.seed, evaluation_run(profile, p), p) for p in chosen]


def every_run(profile: Profile) -> list[Run]:
    """Every run that the notebooks ask for, in the order in which they build on each other."""
    found = [sft_run(profile)]
    if profile.rl:
        found += [entropy_run(profile), *(run for _, _, run in rl_runs(profile))]
        found.append(trace_run(profile))
        if "countdown" in profile.tasks:
            found.append(effects_run(profile))
    return [*found, *(run for _, _, run, _ in evaluations(profile))]


def made_below(
    profile: Profile, run: Run, settings_alone: bool = False
) -> tuple[Profile, Run] | None:
    """The profile that a variant changes (smoke, of "smoke+rl.beta=0.2"), or that a file extends
    (paper, of paper_losses), and its base or policy that is the same as ``run`` and done.

    ``settings_alone``: whichever weights it starts from, which may not be here yet.
    """
    mark = attrgetter("recipe" if settings_alone else "fingerprint")
    for whose in _below(profile):
        if not (paths.build(whose.name) / run.stage).is_dir():
            continue
        every = policy_runs(whose) if run.stage == "rl" else [sft_run(whose)]
        for one in every:
            if mark(one) == mark(run) and one.done():
                return whose, one
    return None


def _below(profile: Profile) -> Iterator[Profile]:
    """The profiles that one builds on, the nearest first, each with as many of its changes as it
    takes."""
    below, *changes = split_spec(profile.spec)
    path: Path | None = profile_files.find(below, Path.cwd())
    while path is not None:
        base = path.stem if path.parent == paths.PROFILES else str(path)
        for number in reversed(range(len(changes) + 1)):
            spec = "+".join([base, *changes[:number]])
            if spec != profile.spec:
                with contextlib.suppress(SageError):  # a change of what it does not have
                    yield load_profile(spec)
        path = profile_files.extended(path)


def starts_from(profile: Profile, run: Run) -> list[tuple[Profile, Run]]:
    """The runs whose models a run needs before it can start, each with its profile."""
    if run.stage == "rl":
        whose = (profile, reference_profile(profile, run.method))
        return [(one, sft_run(one)) for one in whose]
    return [] if run.policy is None else [(profile, run.policy)]


# --- published results ----------------------------------------------------------------------------


def command(profile: Profile, run: Run | None = None) -> str:
    """What to type to make a run of a profile, or without one everything, again."""
    spec = shlex.quote(profile.spec)
    if run is None:
        return f"sage-companion reproduce --profile {spec}"
    return f"sage-companion stage {run.stage} --profile {spec} --run {run.name}"


def published_command(profile: Profile) -> str:
    """What was typed to make the published results of a profile."""
    return str(read_json(paths.measured(profile.name, published=True) / "profile.json")["command"])


def known_stale(profile: Profile) -> str:
    """Why published results are known to be older than their settings; "" where they are not."""
    marks = read_json(paths.measured(profile.name, published=True) / "profile.json")
    return str(marks.get("stale", ""))


def published_record(profile: Profile, run: Run) -> dict[str, Any]:
    """The record of a published run; SageError where there is none, or where it was made from other
    settings than the profile has today."""
    if not run.record.is_file():
        raise SageError(
            f"{run.place} is not among the published results of {profile.name}: set results = "
            f'"own" to make it, as {command(profile, run)} does'
        )
    record = records.load(run.record)
    # The settings alone: runs of one grid may come from machines whose bases differ in rounding.
    same = record["recipe"] == run.recipe if "recipe" in record else False
    if not same and record["fingerprint"] != run.fingerprint:
        raise SageError(
            f"the published results of {profile.name} are not those of its settings "
            f"({run.place}: {_changed(record, run)}): {command(profile)} makes them again, and "
            'sage-companion publish puts them in place; or set results = "own"'
        )
    return record


def _changed(record: Mapping[str, Any], run: Run) -> str:
    """In words, what a run is made from today and was not when its record was written."""
    if "made_from" not in record:
        return "its record is too old to tell what has changed"
    then = dict(flatten(record["made_from"]))
    now = dict(flatten(canonical(run.made_from)))
    names = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    # Another base changes all that is made from it: it is named where nothing else is.
    own = [key for key in names if key != "policy"] or names
    words = [f"{key} was {then.get(key)} and is {now.get(key)}" for key in own]
    short = [word if len(word) < 80 else key for word, key in zip(words, own, strict=True)]
    return "; ".join(short[:3]) + (f"; and {len(short) - 3} more" if len(short) > 3 else "")


def require_current(profile: Profile) -> None:
    """SageError where published results were made from other settings than today's."""
    for run in [*every_run(profile), *exploration_runs(profile)]:
        if run.record.is_file():
            published_record(profile, run)
