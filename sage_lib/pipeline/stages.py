"""The training and sampling processes: each stage as a command of its own, resumable, followed by
whoever started it.

    sage-companion stage sft --profile smoke
    sage-companion stage rl --profile smoke
    sage-companion stage rl --profile smoke --run grpo_branch-s3407

A notebook that needs many runs calls :func:`run`, which starts these commands, shows their progress
and raises when one fails. A run that is finished from the same settings is kept.
"""

import argparse
import contextlib
import importlib
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tqdm import tqdm

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import problems, records, runs
from sage_lib.experiment.profile import Profile, load_profile
from sage_lib.experiment.runs import Run
from sage_lib.files import (
    FULL,
    disk_errors,
    is_full,
    is_locked,
    locked,
    read_json,
    read_lines,
    require_space,
)
from sage_lib.pipeline import known_settings, needs, processes
from sage_lib.pipeline.loaded import Loader, is_useful

#: Seconds between two lines of progress of one run.
SHOW_EVERY = 8
#: Seconds between two looks at what runs.
EVERY = 0.1
#: Of more runs than this that are kept, one line speaks for all.
FEW = 3
#: What is said of a model that another profile made from the same settings.
TAKEN = "already there, taken and not trained"
#: Status with which a run's own process ends where another one makes the run, or made it just now.
BUSY = os.EX_TEMPFAIL
#: The module whose main a run's own process is.
PROGRAM = "sage_lib.pipeline.stages"


class Interrupted(SageError, KeyboardInterrupt):
    """The user's own interrupt, as a sentence where it would be a traceback, in a notebook."""


@dataclass(frozen=True)
class Stage:
    """A kind of work: its runs in a profile, and the function that does one."""

    name: str
    about: str
    runs: Callable[[Profile], list[Run]]
    work: str  # "module:function", called with (profile, run)
    steps: Callable[[Profile, Run], int]  # that one run will log
    #: The stage that must be made before: what comes after the same one may be made side by side.
    after: str | None = "rl"


def _evaluation_runs(profile: Profile) -> list[Run]:
    return [run for _, _, run, _ in runs.evaluations(profile)]


def _of_rl(make: Callable[[Profile], Run]) -> Callable[[Profile], list[Run]]:
    """One run, in profiles that have a section ``rl``."""
    return lambda profile: [make(profile)] if profile.rl else []


def _rl_runs(profile: Profile) -> list[Run]:
    return [run for _, _, run in runs.rl_runs(profile)]


def _samples(profile: Profile) -> int:
    """As the profile asks for; an optional data set that does not load is counted as well."""
    return profile.evaluation.asked * profile.evaluation.samples


#: Every stage, in the order in which they build on each other; of those that do not, the one with
#: the longest run comes first.
STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            "sft",
            "the base policy",
            lambda profile: [runs.sft_run(profile)],
            "sage_lib.training.sft:train",
            lambda profile, _: profile.sft.get("max_steps", 0),
            after=None,
        ),
        Stage(
            "entropies",
            "the base's token entropies",
            _of_rl(runs.entropy_run),
            "sage_lib.evaluation.entropies:measure",
            lambda *_: 1,
            after="sft",
        ),
        Stage(
            "rl",
            "every method and seed",
            _rl_runs,
            "sage_lib.training.rl:train",
            lambda profile, run: profile.steps_of(run.method),
            after="entropies",
        ),
        Stage(
            "replay",
            "the reference method's runs again, every update watched token by token",
            lambda profile: runs.replay_runs(profile) if profile.rl else [],
            "sage_lib.training.replay:measure",
            lambda profile, run: profile.steps_of(run.method),
        ),
        Stage(
            "trace",
            "the guides on completions of the reference method's policy",
            _of_rl(runs.trace_run),
            "sage_lib.evaluation.guide_traces:measure",
            lambda *_: 1,
        ),
        Stage(
            "effects",
            "what the branch guide adds to each anchor's expected gradient",
            lambda profile: [runs.effects_run(profile)] if "countdown" in profile.tasks else [],
            "sage_lib.evaluation.expected_gradients:measure",
            lambda *_: 12,
        ),
        Stage(
            "dynamics",
            "base against trained policies, token by token on the same completions",
            lambda profile: runs.dynamics_runs(profile) if profile.rl else [],
            "sage_lib.evaluation.dynamics:measure",
            lambda *_: 1,
        ),
        Stage(
            "impact",
            "tokens replaced by their runner-up and rolled out again",
            lambda profile: runs.impact_runs(profile) if profile.rl else [],
            "sage_lib.evaluation.token_impact:measure",
            lambda *_: 1,
        ),
        Stage(
            "evaluate",
            "samples of the base and of every policy that is evaluated",
            _evaluation_runs,
            "sage_lib.evaluation.evaluate:evaluate",
            lambda profile, _: _samples(profile),
        ),
    )
}


def in_turn(names: Iterable[str]) -> list[list[str]]:
    """Stages in the order in which they are made, those together that may be made side by side."""

    def depth(name: str) -> int:
        before = _stage(name).after
        return 0 if before is None else 1 + depth(before)

    order = list(STAGES)
    chosen = sorted(set(names), key=lambda name: (depth(name), order.index(name)))
    return [list(group) for _, group in itertools.groupby(chosen, depth)]


@dataclass(frozen=True)
class Job:
    """One process: its stage, its run, and how it is called in lines of progress."""

    stage: Stage
    run: Run
    label: str
    steps: int


#: What else may run beside the runs: told how many processes it may have and which stages are not
#: made yet, it says how many it has.
Beside = Callable[[int, Collection[str]], int]


def run(
    profile: Profile,
    *names: str,
    beside: Beside | None = None,
    loader: Loader | None = None,
) -> dict[str, dict[str, Any]]:
    """Do what is not done of some stages, ``compute.parallel`` runs at a time: of stages that build
    on each other one after the other, the others side by side.

    Returns run name -> run record. Raises SageError for an unknown stage, and for the runs of the
    first stages in which some failed. Of a profile whose published results are read nothing is
    done: they must be there. ``beside``, ``loader``: as :func:`start` has them.
    """
    turns = in_turn(names)
    if profile.published:
        return _published(profile, [_stage(name) for name in names])
    found: dict[str, dict[str, Any]] = {}
    for number, turn in enumerate(turns):
        jobs: list[Job] = []
        for stage in map(_stage, turn):
            these = [
                Job(stage, one, _label(profile, stage, one), stage.steps(profile, one))
                for one in stage.runs(profile)
            ]
            _require_policies(profile, these)
            jobs += these
        later = {name for turn in turns[number + 1 :] for name in turn}
        start(profile, jobs, beside and _until(beside, later), loader)
        found |= {job.run.name: records.load(job.run.record) for job in jobs}
    return found


def train_rl(profile: Profile, one: Run) -> dict[str, Any]:
    """Train one RL run in this process, as notebook 06 does in its cells; returns its record. A run
    that is finished, or published, is kept as it is."""
    if profile.published:
        return runs.published_record(profile, one)
    with locked(one.lock, wait=True):
        _make(profile, STAGES["rl"], one)
    return records.load(one.record)


def _until(beside: Beside, later: Collection[str]) -> Beside:
    return lambda places, left: beside(places, {*left, *later})


def unmade(profile: Profile, names: Iterable[str]) -> set[str]:
    """Of some stages those that have a run that is not done."""
    return {name for name in names if not all(one.done() for one in _stage(name).runs(profile))}


def _require_policies(profile: Profile, jobs: list[Job]) -> None:
    """SageError, once and before anything is started, where no run of a stage could start because
    what it starts from is not there."""
    left = [job.run for job in jobs if not job.run.done()]
    lacking = [
        next((pair for pair in runs.starts_from(profile, run) if not pair[1].done()), None)
        for run in left
    ]
    if lacking and lacking[0] is not None and None not in lacking:
        whose, first = lacking[0]
        others = len({pair[1].name for pair in lacking if pair is not None}) - 1
        which, made = ", which is", "it"
        if others:
            which, made = f" and {others} more, which are", "the first"
        raise SageError(  # without --run the command would train every method of the profile
            f"the stage {jobs[0].stage.name} of profile {profile.name} starts from "
            f"{first.name}{which} not there: {runs.command(whose, first)} makes {made}"
        )


def _published(profile: Profile, chosen: list[Stage]) -> dict[str, dict[str, Any]]:
    found = {
        one.name: runs.published_record(profile, one)
        for stage in chosen
        for one in stage.runs(profile)
    }
    last = max(found.values(), key=lambda record: record["finished"], default=None)
    if last is not None:
        made = f"at revision {last['revision']}, by {last['finished'][:10]}"
        names = ", ".join(stage.name for stage in chosen)
        again = runs.published_command(profile)
        print(f"{names}: published results, made {made}; to make them again: {again}", flush=True)
    return found


def _stage(name: str) -> Stage:
    if name not in STAGES:
        raise SageError(f"there is no stage {name!r}: choose one of {', '.join(STAGES)}")
    return STAGES[name]


def _label(profile: Profile, stage: Stage, one: Run) -> str:
    if one.name == stage.name:
        return stage.name
    method = profile.label(one.method)
    label = method if one.seed is None else f"{method}, seed {one.seed}"
    return label if stage.name == "rl" else f"{label} ({stage.name})"


#: glibc gives the memory of a large tensor back to the system, and takes it anew, page by page, for
#: the next one: a tenth of an RL step of countdown. Tensors of up to 32 MB, the largest limit that
#: it has everywhere, are kept instead, up to 512 MB of them. Other libraries do not read these.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**29)}


def environment() -> dict[str, str]:
    """What a child process starts with: this very sage_lib comes first on its path, so that a
    second checkout never runs the code of the first; and it keeps memory for the next tensor,
    unless these two variables are set already."""
    path = [str(paths.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(path)}
    return {**KEPT_MEMORY, **os.environ, **own}


def start(
    profile: Profile, jobs: list[Job], beside: Beside | None = None, loader: Loader | None = None
) -> None:
    """Run the jobs that are not done, some at a time, with lines of progress for each.

    What another process makes at that time is waited for, and kept. After a failure that was no
    kill its like are not started: other seeds of its method, and once two methods failed for one
    reason the rest of the stage (:class:`Failures`). All others go on; at the end a SageError names
    what failed, why, and what was not started. A run that collapses does not fail.

    Args:
        beside: what else runs on this machine. While runs wait it is offered one place, before the
            last of ``compute.parallel`` is given to a run; then all that are free.
        loader: what runs are forked from; without one, what these jobs need is loaded for them.
    """
    waiting = list(jobs)
    failed, failures = {}, Failures()
    kept = [job for job in jobs if job.run.done()]
    for job in kept:
        waiting.remove(job)
        collapse = records.collapse(job.run.record)
        if collapse or len(kept) <= FEW:
            _say(job, "already made from the same settings, kept", collapse)
    if len(kept) > FEW:
        for name in dict.fromkeys(job.stage.name for job in kept):
            count, of = (sum(job.stage.name == name for job in those) for those in (kept, jobs))
            words = f"{count} of {of} runs already made from the same settings, kept"
            print(f"{name}: {words}", flush=True)
    running: dict[str, tuple[Job, processes.Process, Progress]] = {}
    seen_elsewhere: set[str] = set()
    own = None
    if loader is None and waiting:
        loader = own = load_for(profile, {job.stage.name for job in waiting}, len(waiting))

    def launch_up_to(places: int) -> None:
        for job in list(waiting):
            if len(running) >= places or (loader is not None and not loader.is_ready()):
                return
            if is_locked(job.run.lock):
                if job.run.name not in seen_elsewhere:
                    _say(job, "another process makes it, waiting")
                seen_elsewhere.add(job.run.name)
                continue
            waiting.remove(job)
            if lost := failures.like(job.stage.name, job.run.method):
                failed[job.run.name] = f"{job.label} was not started: {lost}"
                print(failed[job.run.name], flush=True)
            elif job.run.done():
                _say(job, "made by another process, kept", records.collapse(job.run.record))
            else:
                progress = Progress(job)
                running[job.run.name] = job, launch(profile, job, loader), progress

    places = profile.compute.parallel
    try:
        while waiting or running:
            if beside is None:
                launch_up_to(places)
            else:
                ended = [job for job in jobs if job.run.name in failed]  # and not made
                going = [*waiting, *(job for job, _, _ in running.values()), *ended]
                left = {job.stage.name for job in going}
                launch_up_to(places - max(1, beside(0, left)))
                free = places - len(running)
                launch_up_to(places - beside(min(1, free) if waiting else free, left))
            time.sleep(EVERY)
            for name, (job, process, progress) in list(running.items()):
                status = process.poll()
                progress.show(last=status is not None)
                if status is None:
                    continue
                del running[name]
                if status == BUSY:
                    waiting.insert(0, job)
                elif status or not job.run.done():
                    failed[name] = f"{job.label} failed: {reason(job, status)}"
                    print(failed[name], flush=True)
                    if status > 0:  # and was not killed
                        failures.note(job, last_words(job))
                elif collapse := records.collapse(job.run.record):
                    _say(job, collapse)
                elif TAKEN in job.run.log.read_text(errors="replace"):
                    _say(job, TAKEN)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted: what was made is kept; the same once more goes on"
        ) from None
    finally:  # an interrupted notebook leaves no process behind
        try:
            processes.end([process for _, process, _ in running.values()])
        finally:
            if own is not None:
                own.end()
    if failed:
        raise SageError(_told(failed, [job for job in jobs if job.run.name in failed]))


@dataclass
class Failures:
    """What failed so far, and so what would fail alike: hours are not spent on it."""

    #: (stage, reason) -> the label of what failed so, by method.
    seen: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    def note(self, job: Job, why: str) -> None:
        self.seen.setdefault((job.stage.name, why), {})[job.run.method] = job.label

    def like(self, stage: str, method: str) -> str:
        """Why a run of a stage is not started; "" where nothing speaks against it."""
        for (where, why), labels in self.seen.items():
            if where == stage and method in labels:
                return f"{labels[method]} failed, of the same method ({why})"
            if where == stage and len(labels) > 1:
                return f"{' and '.join([*labels.values()][:2])} failed for one reason ({why})"
        return ""


def _told(failed: dict[str, str], jobs: list[Job]) -> str:
    """What failed, and why: of many runs the first, since each had its line when it ended."""
    if len(jobs) <= FEW:
        return "; ".join(failed[job.run.name] for job in jobs)
    return f"{len(jobs)} runs failed, as the lines above say: {failed[jobs[0].run.name]}"


def _say(job: Job, *words: str) -> None:
    print(f"{job.label}: {'; '.join(filter(None, words))}", flush=True)


def load_for(profile: Profile, names: Collection[str], count: int) -> Loader | None:
    """What ``count`` runs of some stages are forked from, where that is sooner."""
    if not is_useful(count, profile.compute.requires_gpu):
        return None
    log = paths.build(profile.name) / "loaded.log"
    return Loader(PROGRAM, [profile.spec, *sorted(names)], log, environment())


def load(words: Sequence[str]) -> None:
    """Import what the work of some stages of a profile needs, and draw its problems: drawn again
    in a fork, they take a twentieth of the time.

    Args:
        words: the profile's ``spec``, and the stages' names.
    """
    import torch

    if torch.accelerator.is_available():
        sys.exit("what libraries start on a GPU does not outlive a fork: each run loads them anew")
    spec, *names = words
    profile = load_profile(spec)
    for stage in map(_stage, names):
        _module(stage)
        stage.runs(profile)
    if "rl" in names:
        problems.rl_problems(profile)


def _module(stage: Stage) -> ModuleType:
    return importlib.import_module(stage.work.partition(":")[0])


def launch(profile: Profile, job: Job, loader: Loader | None = None) -> processes.Process:
    """Start a job's own process, which ends with this one.

    It ends with status 0, with :data:`BUSY` where another process does the work, or with the reason
    of its failure as the last line of the log.
    """
    if loader is not None:
        with contextlib.suppress(ChildProcessError):  # a process that loads for itself says why
            return loader.start(_words(profile, job), job.run.log, environment())
    return processes.start(command(profile, job), job.run.log, environment())


def command(profile: Profile, job: Job) -> list[str]:
    """What starts a job's own process."""
    return [sys.executable, "-m", PROGRAM, *_words(profile, job)]


def _words(profile: Profile, job: Job) -> list[str]:
    return [job.stage.name, "--run", job.run.name, "--profile", profile.spec, "--child"]


#: Names in a line of progress, and the columns of the step log that they show.
SHOWN = {
    "loss": "loss",
    "reward": "reward",
    "entropy": "entropy",
    "tokens/s": "tokens_per_second",
}


class Progress:
    """Prints where a job is, a line at a time: readable in a terminal, in a notebook and in a log,
    several jobs at once."""

    def __init__(self, job: Job):
        self.job, self.started = job, time.monotonic()
        #: The step at which this process was first seen: its speed counts from there.
        self.first: int | None = None
        self.shown_at, self.shown_step = self.started, -1
        print(f"{job.label}: starting", flush=True)

    def show(self, last: bool = False) -> None:
        """Print a line when SHOW_EVERY seconds have passed and something moved, and at the end."""
        now = time.monotonic()
        if not last and now - self.shown_at < SHOW_EVERY:
            return
        rows = read_lines(self.job.run.live_steps)
        if not rows or rows[-1]["step"] == self.shown_step:
            return
        row = rows[-1]
        step = row["step"]
        if self.first is not None and step < self.first:  # a resumed run took steps back
            self.first, self.started = step, now
        if self.first is None:
            self.first, self.started = (step, now) if not last else (0, self.started)
        values = [f"{n}={row[key]:.3g}" for n, key in SHOWN.items() if key in row]
        line = tqdm.format_meter(
            step,
            max(self.job.steps, step),
            now - self.started,
            prefix=self.job.label,
            ncols=112,
            ascii=True,
            initial=self.first,
            postfix=", ".join(values),
        )
        print(line, flush=True)
        self.shown_at, self.shown_step = now, step


def reason(job: Job, status: int) -> str:
    """The signal that ended a failed process, or its last line, which holds its error; and the
    log's name."""
    log, last = job.run.log, last_words(job)
    if is_full(log.parent):  # and the log may lack its end for that
        last = FULL
    elif status < 0:
        last = f"ended by {signal.Signals(-status).name}"
    place = f"{log.parent.name}/{log.name} in the build folder"
    return f"{last} (whole log: {place}; what was made is kept)"


def last_words(job: Job) -> str:
    """The last line of a run's log."""
    text = job.run.log.read_text(errors="replace") if job.run.log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "no output"


def check_machine(profile: Profile) -> None:
    """SageError where the profile cannot run: no GPU, or no room for its checkpoints."""
    if profile.published:
        return  # its results are there: nothing runs
    if profile.compute.requires_gpu:
        import torch

        if not torch.cuda.is_available():
            raise SageError(
                f"profile {profile.name} needs a CUDA GPU and none was found: choose the profile "
                f"smoke or laptop, or see what {profile.name} would do with: "
                f"sage-companion dry-run --profile {profile.spec}"
            )
    require_space(paths.build(profile.name), needs.disk_gb(profile), f"profile {profile.name}")


def add_profile(parser: argparse.ArgumentParser) -> None:
    """The words of a command line that :func:`given_profile` reads."""
    parser.add_argument(
        "--profile", default="smoke", help="a profile's name, or the path of a .yaml file"
    )
    add_changes(parser)


def add_yes(parser: argparse.ArgumentParser) -> None:
    """The word that answers :mod:`sage_lib.pipeline.consent`."""
    about = "start without asking what needs hours of a GPU, as in a script"
    parser.add_argument("--yes", action="store_true", help=about)


def add_changes(parser: argparse.ArgumentParser) -> None:
    """The words of a command line that :func:`changed` reads."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting, as in --set rl.beta=0.2: a variant with a folder of its own",
    )


def given_profile(options: argparse.Namespace) -> Profile:
    """The profile that a command line names, with its changed settings."""
    return changed(options.profile, options.set)


def changed(spec: str, changes: Sequence[str]) -> Profile:
    """The variant of a profile with the settings of ``--set``."""
    for change in changes:
        if not re.match(r"[A-Za-z_][\w.-]*=", change):
            raise SageError(f"--set {change}: a change is KEY=VALUE, as in --set rl.beta=0.2")
    return load_profile("+".join([spec, *changes]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`do` reads from a command line."""
    about = "; ".join(f"{stage.name}: {stage.about}" for stage in STAGES.values())
    parser.add_argument("stage", choices=STAGES, help=about)
    add_profile(parser)
    parser.add_argument("--run", help="do this run alone, in this process, such as grpo-s3407")
    add_yes(parser)
    # Set by start: this process ends with the one that started it.
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def do(options: argparse.Namespace) -> None:
    """A whole stage in processes of its own, or with ``--run`` one run in this one."""
    if options.child:
        processes.end_with_parent()
    profile = given_profile(options)
    known_settings.check(profile)
    check_machine(profile)
    stage = _stage(options.stage)
    one = None if options.run is None else _named(profile, stage, options.run)
    if not options.child and int(os.environ.get("RANK", 0)) == 0:
        from sage_lib.pipeline import consent  # which knows the stages

        consent.before(profile, stage.runs(profile) if one is None else [one], options.yes)
    if one is None:
        run(profile, options.stage)
        return
    if int(os.environ.get("RANK", 0)) > 0:  # the first of several processes locks and prepares
        if one.done():
            return
        while not one.is_prepared():
            time.sleep(0.1)
        _work(profile, stage, one)
        return
    with locked(one.lock) as mine:
        if options.child and (not mine or one.done()):
            sys.exit(BUSY)
        if mine:
            _make(profile, stage, one)
            return
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SageError(f"another process makes {one.name}: wait for its end, or end it")
    print(f"{_label(profile, stage, one)}: another process makes it, waiting", flush=True)
    with locked(one.lock, wait=True):
        _make(profile, stage, _named(profile, stage, options.run))


def _named(profile: Profile, stage: Stage, name: str) -> Run:
    every = stage.runs(profile)
    chosen = next((one for one in every if name in (one.name, one.place)), None)
    if chosen is None:
        raise SageError(
            f"the stage {stage.name} of profile {profile.name} has no run {name!r}: "
            f"choose one of {', '.join(one.name for one in every) or '(it has none)'}"
        )
    return chosen


def _make(profile: Profile, stage: Stage, one: Run) -> None:
    if one.done():
        print(f"{_label(profile, stage, one)}: already made from the same settings, kept")
        return
    one.prepare()
    made = stage.name in ("sft", "rl") and runs.made_below(profile, one)
    if made:
        whose, other = made
        one.take(other)
        print(f"{one.name}: made from the same settings by {whose.name}, {TAKEN}")
        return
    _work(profile, stage, one)


def _work(profile: Profile, stage: Stage, one: Run) -> None:
    # One run's compiled code never meets another's.
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(one.build / "unsloth_cache")
    import torch

    _import_unsloth(profile, stage, one)
    torch.set_num_threads(profile.compute.threads)
    work = getattr(_module(stage), stage.work.partition(":")[2])
    try:
        with disk_errors():
            work(profile, one)
    except SageError:
        raise
    except Exception as error:  # libraries say in many ways that they could not write or read
        if any(is_full(folder) for folder in (one.build, one.measured)):
            raise SageError(FULL) from error
        if (damaged := _damaged(one.policy)) is not None:
            raise SageError(
                f"the model of {damaged.name} is damaged: delete the folder {damaged.build.name} "
                f"that holds it in the build folder, and run with --resume"
            ) from error
        raise


def _import_unsloth(profile: Profile, stage: Stage, one: Run) -> None:
    """Import Unsloth before TRL where a run trains with it: RL by ``compute.backend``; rounds of
    rejection sampling, as SFT, where it is installed."""
    if stage.name not in ("rl", "replay"):
        return
    from sage_lib.algorithm import unsloth_first

    tuned = profile.methods[one.method].rft is not None
    if unsloth_first.is_installed() if tuned else profile.compute.backend == "unsloth":
        unsloth_first.load()


def _damaged(policy: Run | None) -> Run | None:
    """The run whose model is not the one that it saved, of a policy and what that is made from."""
    if policy is None:
        return None
    from sage_lib.policy import loading

    same = loading.weights_hash(policy.model) == policy.weights
    try:
        for path in policy.model.glob("*.json"):
            read_json(path)
    except SageError:
        same = False
    return _damaged(policy.policy) if same else policy


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sage_lib.pipeline.stages", description=(__doc__ or "").split("\n\n")[0]
    )
    add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        with disk_errors():
            do(options)
    except SageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
