"""The training and sampling processes: each stage as a command of its own, resumable, followed by whoever started it.

    python -m sage_lib.pipeline.stages sft --profile smoke
    python -m sage_lib.pipeline.stages rl --profile smoke --method grpo_branch --seed 3407
    python -m sage_lib.pipeline.stages trace --profile smoke
    python -m sage_lib.pipeline.stages effects --profile smoke
    python -m sage_lib.pipeline.stages evaluate --profile smoke [--method grpo_branch --seed 3407]

A notebook never trains inside its kernel: it calls :func:`run_sft`, :func:`run_rl`, :func:`run_trace`, :func:`run_effects` or :func:`run_evaluation`, which
start these commands, show their progress and raise when one fails. A stage that is finished from the same settings is
not run again.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from sage_lib.errors import SageError
from sage_lib.experiment import records, runs
from sage_lib.experiment.profile import Profile, load_profile
from sage_lib.experiment.runs import Run
from sage_lib.files import append_line, read_lines, require_space

#: Disk that a stage of the embedded model needs at most, GB; for a larger model twice its weights come on top.
EMBEDDED_DISK_GB = 0.2


#: Seconds between two lines of progress of one job.
SHOW_EVERY = 8


@dataclass(frozen=True)
class Job:
    """One process: its run, the words after ``python -m sage_lib.pipeline.stages``, and how many steps it will log."""

    run: Run
    arguments: tuple[str, ...]
    label: str
    steps: int


def run_sft(profile: Profile) -> dict:
    """Make the base policy; returns its run record."""
    run = runs.sft_run(profile)
    _start(profile, [Job(run, ("sft",), "SFT", profile.sft["max_steps"])])
    return records.load(run.record)


def run_rl(profile: Profile) -> dict[str, dict]:
    """Train every method and seed of the profile, ``compute.parallel`` at a time; returns run name -> run record."""
    jobs = [
        Job(
            run,
            ("rl", "--method", method, "--seed", str(seed)),
            f"{profile.methods[method].label}, seed {seed}",
            profile.rl["max_steps"],
        )
        for method, seed, run in runs.rl_runs(profile)
    ]
    _start(profile, jobs)
    return {job.run.name: records.load(job.run.record) for job in jobs}


def run_trace(profile: Profile) -> dict:
    """Trace the guides on completions of the first method's policy; returns the run record."""
    run = runs.trace_run(profile)
    _start(profile, [Job(run, ("trace",), "traces", 1)])
    return records.load(run.record)


def run_effects(profile: Profile) -> dict:
    """Measure what the branch guide adds to each anchor's expected gradient; returns the run record."""
    run = runs.effects_run(profile)
    _start(profile, [Job(run, ("effects",), "expected gradients", 12)])
    return records.load(run.record)


def run_evaluation(profile: Profile) -> dict[str, dict]:
    """Sample and verify the base and every trained policy; returns run name -> run record."""
    samples = sum(d.rows for d in profile.evaluation.data) * profile.evaluation.samples
    jobs = [
        Job(
            run,
            ("evaluate",)
            if seed is None
            else ("evaluate", "--method", method, "--seed", str(seed)),
            "base" if seed is None else f"{profile.methods[method].label}, seed {seed}",
            samples,
        )
        for method, seed, run, _ in runs.evaluations(profile)
    ]
    _start(profile, jobs)
    return {job.run.name: records.load(job.run.record) for job in jobs}


def _start(profile: Profile, jobs: list[Job]) -> None:
    """Run the jobs that are not done, some at a time, a line of progress for each; SageError names the first that failed."""
    waiting = [job for job in jobs if not job.run.done()]
    for job in jobs:
        if job not in waiting:
            print(f"{job.label}: already made from the same settings, kept", flush=True)
    running: dict[Job, tuple[subprocess.Popen, Progress]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < profile.compute.parallel:
                job = waiting.pop(0)
                job.run.prepare()
                log = (job.run.build / "log.txt").open("a")
                environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "sage_lib.pipeline.stages",
                        *job.arguments,
                        "--profile",
                        profile.path,
                    ],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
                log.close()
                running[job] = process, Progress(job)
            time.sleep(0.5)
            for job, (process, progress) in list(running.items()):
                ended = process.poll() is not None
                progress.show(last=ended)
                if ended:
                    del running[job]
                    if process.returncode or not job.run.done():
                        raise SageError(f"{job.label} failed: {_reason(job.run.build / 'log.txt')}")
    finally:
        for (
            process,
            _,
        ) in running.values():  # an interrupted notebook leaves no process behind; each resumes
            process.terminate()
            process.wait()


class Progress:
    """Prints where a job is, a line at a time: readable in a terminal, in a notebook and in a log, several jobs at once."""

    def __init__(self, job: Job):
        self.job, self.started = job, time.monotonic()
        self.first: int | None = (
            None  # the step at which this process was first seen: its speed counts from there
        )
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
        if self.first is None:
            self.first, self.started = (row["step"], now) if not last else (0, self.started)
        shown = {
            name: f"{row[key]:.3g}"
            for name, key in (
                ("loss", "loss"),
                ("reward", "reward"),
                ("entropy", "entropy"),
                ("tokens/s", "tokens_per_second"),
            )
            if key in row
        }
        print(
            tqdm.format_meter(
                row["step"],
                max(self.job.steps, row["step"]),
                now - self.started,
                prefix=self.job.label,
                ncols=112,
                ascii=True,
                initial=self.first,
                postfix=", ".join(f"{k}={v}" for k, v in shown.items()),
            ),
            flush=True,
        )
        self.shown_at, self.shown_step = now, row["step"]


def _reason(log: Path) -> str:
    """The last line of a failed process, which holds its error, and the log's name."""
    lines = (
        [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if log.is_file()
        else []
    )
    return f"{lines[-1] if lines else 'no output'} (whole log: {log.parent.name}/{log.name} in the build folder; what was made is kept, run again with --resume)"


def check_machine(profile: Profile) -> None:
    """SageError where the profile cannot run: no GPU, or no room for its checkpoints."""
    if profile.compute.requires_gpu:
        import torch

        if not torch.cuda.is_available():
            raise SageError(
                f"profile {profile.name} needs a CUDA GPU and none was found: choose the profile smoke or laptop, "
                f"or see what {profile.name} would do with: python -m sage_lib.pipeline.reproduce --profile {profile.name} --dry-run"
            )
    require_space(
        runs.sft_run(profile).build.parent,
        EMBEDDED_DISK_GB if profile.task else 60,
        f"profile {profile.name}",
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("stage", choices=("sft", "rl", "trace", "effects", "evaluate"))
    parser.add_argument("--profile", required=True)
    parser.add_argument("--method")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(argv)
    try:
        _run(options, load_profile(options.profile))
    except SageError as error:
        sys.exit(f"error: {error}")


def _run(options: argparse.Namespace, profile: Profile) -> None:
    if (
        options.stage == "rl" or options.method is not None
    ) and options.method not in profile.methods:
        raise SageError(
            f"there is no method {options.method!r} in profile {profile.name}: choose one of {', '.join(profile.methods)}"
        )
    check_machine(profile)
    sft_run = runs.sft_run(profile)
    trained = (
        sft_run if options.method is None else runs.rl_run(profile, options.method, options.seed)
    )
    run = {
        "evaluate": lambda: runs.evaluation_run(profile, trained),
        "trace": lambda: runs.trace_run(profile),
        "effects": lambda: runs.effects_run(profile),
    }.get(options.stage, lambda: trained)()
    if run.done():
        return
    if int(os.environ.get("RANK", 0)) == 0:
        run.prepare()
    else:  # of several processes the first one makes the folder
        while not run.prepared():
            time.sleep(0.1)
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(
        run.build / "unsloth_cache"
    )  # one run's compiled code never meets another's
    import torch

    # What runs alone takes the threads of all the processes that may run beside each other.
    torch.set_num_threads(
        profile.compute.threads
        * (profile.compute.parallel if options.stage in ("sft", "trace", "effects") else 1)
    )
    if options.stage == "sft":
        from sage_lib.training import sft

        sft.train(profile, run)
    elif options.stage == "rl":
        from sage_lib.training import rl

        rl.train(profile, run, options.method, options.seed)
    elif options.stage == "trace":
        from sage_lib.evaluation import guide_traces

        guide_traces.measure(profile, run)
    elif options.stage == "effects":
        from sage_lib.evaluation import expected_gradients

        expected_gradients.measure(profile, run)
    else:
        from sage_lib.evaluation import evaluate

        if int(os.environ.get("RANK", 0)) == 0:
            run.live_steps.unlink(
                missing_ok=True
            )  # only shows progress: the samples are in a file of their own
        evaluate.evaluate(
            profile,
            run,
            trained,
            lambda done, total, rate: append_line(
                run.live_steps, {"step": done, "tokens_per_second": rate}
            ),
        )


if __name__ == "__main__":
    main()
