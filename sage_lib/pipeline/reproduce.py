"""Make what the notebooks ask for, run each of them headless as soon as its part is made, and check
what it was to make.

sage-companion reproduce --profile smoke --only 04 05 --resume
sage-companion dry-run --profile paper
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.runs import Run, put_aside
from sage_lib.files import disk_errors, is_locked, write_text
from sage_lib.pipeline import (
    compare,
    consent,
    known_settings,
    notebooks,
    plan,
    processes,
    stages,
)
from sage_lib.pipeline.notebooks import Notebook

#: The kernel of the interpreter that runs this: ipykernel brings it, and jupyter_client starts it
#: with this very Python.
KERNEL = "python3"


#: nbconvert's page hides what of a line of code is wider than the window, and prints it cut.
WRAPPED = "<style>.jp-InputArea-editor pre {white-space: pre-wrap; overflow-wrap: anywhere}</style>"

#: Endings of the files of a figure.
DRAWN = (".pdf", ".png", ".svg")
#: What to do after an end before the end.
GO_ON = "what was made is kept; the same command with --resume goes on"
#: State of a notebook that needs what the profile does not have.
LEFT_OUT = "left out"


@dataclass(frozen=True)
class Outcome:
    """A line of the closing table: seconds, artefacts that are there, and ok, failed, left out or
    not run; why, where it is not ok."""

    name: str
    seconds: float = 0.0
    made: int = 0
    state: str = "not run"
    reason: str = ""


def run_notebook(path: Path, output: Path, parameters: dict[str, object]) -> float:
    """Execute one notebook through papermill; returns seconds.

    Papermill only warns of a parameter that the notebook does not have; here it is an error. A
    failing cell raises SageError with the notebook, the cell and the path of the executed copy,
    which holds everything up to there."""
    import papermill

    name = path.stem
    if not path.is_file():
        place = path.parent.name
        raise SageError(f"notebook {name} is missing from {place}/: restore it from the repository")
    unknown = set(parameters) - notebooks.parameters(path)
    if unknown:
        missing = sorted(unknown)[0]
        raise SageError(f"notebook {name} has no parameter {missing!r}: see its first code cell")
    output.parent.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = stages.environment()["PYTHONPATH"]  # the kernel's sage_lib is ours
    started = time.perf_counter()
    try:
        papermill.execute_notebook(
            str(path),
            str(output),
            parameters=parameters,
            kernel_name=KERNEL,
            cwd=str(path.parent),
            progress_bar=False,  # those of notebooks beside each other would cover one another
            # A kernel's warnings, and its word of the interrupt that ends it, help nobody.
            extra_arguments=["--IPKernelApp.log_level=50"],
        )
    except papermill.PapermillExecutionError as error:
        raise SageError(
            f"notebook {name} failed in cell {error.cell_index} ({error.ename}: {error.evalue}); "
            f"executed copy: {output}"
        ) from error
    return time.perf_counter() - started


def write_page(executed: Path) -> Path:
    """An executed notebook as a page to read without Jupyter, beside it; long lines wrap."""
    import nbformat
    from nbconvert import HTMLExporter

    shown = nbformat.from_dict(notebooks.with_words(nbformat.read(executed, as_version=4)))
    text, _ = HTMLExporter().from_notebook_node(shown, {"metadata": {"name": executed.stem}})
    page = executed.with_suffix(".html")
    write_text(page, text.replace("</head>", f"{WRAPPED}</head>", 1))
    return page


def select(only: list[str] | None) -> list[Notebook]:
    """The notebooks of these numbers, all without any; SageError for a number that there is not."""
    every = notebooks.found()
    known = {notebook.number: notebook for notebook in every}
    for number in only or ():
        if number not in known:
            raise SageError(f"there is no notebook {number!r}: choose among {', '.join(known)}")
    return [notebook for notebook in every if not only or notebook.number in only]


def _start_afresh(profile: Profile) -> None:
    """Without --resume a run starts from nothing; what an earlier one built is kept, not
    deleted."""
    folder = paths.build(profile.name)
    if any(is_locked(lock) for pattern in ("*.lock", "*/*.lock") for lock in folder.glob(pattern)):
        raise SageError(
            f"another process works in the build folder of {profile.name}: "
            "end it first, or share its work with --resume"
        )
    if folder.is_dir() and any(folder.iterdir()):
        old = put_aside(folder)
        print(
            f"the earlier build of {profile.name} was put aside as {old.name} "
            "(use --resume to go on with one; delete it when it is not needed)"
        )


def reproduce(
    profile: Profile, only: list[str] | None = None, resume: bool = False, yes: bool = False
) -> bool:
    """Make what the notebooks ask for and run them beside that, print the closing table, and where
    something is published the comparison with it; True when all are ok. Stops at the first that
    fails."""
    chosen = select(only)
    known_settings.check(profile)  # before the notebooks, not in one of them
    stages.check_machine(profile)
    afresh = not resume and not only
    consent.before(profile, _asked(profile, chosen), yes, afresh)
    started = time.perf_counter()
    if afresh:
        _start_afresh(profile)
    outcomes = _outcomes(chosen, profile)
    ok = all(outcome.state in ("ok", LEFT_OUT) for outcome in outcomes)
    outcomes += [Outcome(notebook.name) for notebook in chosen[len(outcomes) :]]
    _print_closing_table(outcomes, ok, time.perf_counter() - started)
    if ok:
        try:
            compare.show(profile)
        except SageError as error:  # there is nothing to compare with
            print(f"\n{error}", flush=True)
    return ok


def _asked(profile: Profile, chosen: list[Notebook]) -> list[Run]:
    """The runs of the stages that the notebooks ask for."""
    used = [one for one in chosen if one.lacks(profile) is None]
    names = dict.fromkeys(name for one in used for name in notebooks.stages(one.path))
    return [run for name in names for run in stages.STAGES[name].runs(profile)]


def _outcomes(chosen: list[Notebook], profile: Profile) -> list[Outcome]:
    """Make the stages that the notebooks ask for, and run each notebook as soon as what it and
    those before it ask for is made; the outcomes up to the first that failed."""
    asked = {one.name: notebooks.stages(one.path) for one in chosen if one.lacks(profile) is None}
    names = list(dict.fromkeys(itertools.chain(*asked.values())))
    places = profile.compute.parallel
    with ProcessPoolExecutor(places, initializer=processes.end_with_pool) as pool:
        beside = _Beside(pool, chosen, profile, asked)
        try:
            reason = _make(profile, names, beside)
            left = stages.unmade(profile, names) if reason else ()
            while beside(places, left) or len(beside.outcomes) < len(beside.started):
                time.sleep(stages.EVERY)
            # The next one cannot be run without what failed; unless a second try made it.
            if len(beside.outcomes) < len(chosen):
                lacking = chosen[len(beside.outcomes)]
                beside.tell(Outcome(lacking.name, state="failed", reason=reason))
        except _NotebookFailed:
            print(f"stopped: {GO_ON}", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    return beside.outcomes


def _make(profile: Profile, names: list[str], beside: stages.Beside) -> str:
    """Make some stages, all forked from one process; why some of it failed, "" where nothing
    did."""
    left = len(stages.unmade(profile, names))
    loader = stages.load_for(profile, names, left) if left else None
    try:
        stages.run(profile, *names, beside=beside, loader=loader)
    except stages.Interrupted:
        raise stages.Interrupted(f"interrupted: {GO_ON}") from None
    except SageError as error:
        return str(error)
    finally:
        if loader is not None:
            loader.end()
    return ""


class _NotebookFailed(Exception):
    """A notebook failed, which was told: nothing more is started, and runs that go on are ended."""


class _Beside:
    """The notebooks that run beside the runs of the stages, each in a process of a pool; their
    outcomes are told in their order."""

    def __init__(
        self,
        pool: ProcessPoolExecutor,
        chosen: list[Notebook],
        profile: Profile,
        asked: Mapping[str, Collection[str]],  # by a notebook's name: stages
    ):
        self.pool, self.chosen, self.profile, self.asked = pool, chosen, profile, asked
        self.started: list[Future[Outcome]] = []
        self.outcomes: list[Outcome] = []

    def __call__(self, places: int, left: Collection[str]) -> int:
        """Start what may run in so many processes while these stages are not made; how many
        processes there are. Raises _NotebookFailed once the outcome of one was told that failed."""
        while len(self.outcomes) < len(self.started) and self.started[len(self.outcomes)].done():
            self.tell(self._next())
        going = sum(not one.done() for one in self.started)
        while going < places and len(self.started) < len(self.chosen):
            notebook = self.chosen[len(self.started)]
            told = {one.number for one in self.chosen[: len(self.outcomes)]}
            waits = {one.number for one in self.chosen} & set(notebook.after) - told
            if waits or set(self.asked.get(notebook.name, ())) & set(left):
                break
            self.started.append(self.pool.submit(_outcome, notebook, self.profile))
            going += 1
        return going

    def _next(self) -> Outcome:
        number = len(self.outcomes)
        try:
            return self.started[number].result()
        except BrokenProcessPool:
            reason = f"the process of notebook {self.chosen[number].name} was ended; {GO_ON}"
            return Outcome(self.chosen[number].name, state="failed", reason=reason)

    def tell(self, last: Outcome) -> None:
        """Note the next outcome, and print it; _NotebookFailed where it is a failure."""
        notebook = self.chosen[len(self.outcomes)]
        self.outcomes.append(last)
        place = f"{notebook.name} ({len(self.outcomes)} of {len(self.chosen)})"
        if last.state == LEFT_OUT:
            print(f"{place}: left out, {last.reason}", flush=True)
            return
        if last.reason:
            print(f"error: {last.reason}", file=sys.stderr, flush=True)
        made = _made(notebook, self.profile)
        print(f"{place}: {last.state}, {last.seconds:.0f} s{made}", flush=True)
        if last.state != "ok":
            raise _NotebookFailed


def _made(notebook: Notebook, profile: Profile) -> str:
    """The artefacts that are there, a figure once for all its formats."""
    names = [file for file in notebook.artefacts(profile) if file.is_file()]
    figures = dict.fromkeys(file.stem for file in names if file.suffix in DRAWN)
    shown = [*figures, *(file.name for file in names if file.suffix not in DRAWN)]
    return f"; {', '.join(shown)}" if shown else ""


def _outcome(notebook: Notebook, profile: Profile) -> Outcome:
    lacking = notebook.lacks(profile)
    if lacking is not None:
        reason = f"the profile {profile.name} has no {lacking}"
        return Outcome(notebook.name, state=LEFT_OUT, reason=reason)
    output = paths.build(profile.name) / "notebooks" / f"{notebook.name}.ipynb"
    started = time.perf_counter()
    # Not by the clock, which may be set back.
    before = {file: _written(file) for file in notebook.artefacts(profile)}
    parameters = notebooks.parameters(notebook.path)
    words = {"profile": profile.spec, "results": "own"}
    given: dict[str, object] = {name: value for name, value in words.items() if name in parameters}
    state, reason = "ok", ""
    # In this worker of the pool, for its kernels: others, and runs, have the other cores.
    os.environ["OMP_NUM_THREADS"] = str(profile.compute.threads)
    try:
        run_notebook(notebook.path, output, given)
        write_page(output)
        for file in notebook.artefacts(profile):
            drawn = file.suffix in DRAWN
            if not file.is_file() or (drawn and _written(file) == before[file]):
                place = f"{file.parent.name}/{file.name}"
                raise SageError(
                    f"notebook {notebook.name} ended without making {place}; "
                    f"executed copy: {output}"
                )
    except SageError as error:
        state, reason = "failed", str(error)
    except Exception as error:  # papermill's and nbconvert's, as of a kernel that was killed
        state = "failed"
        reason = f"notebook {notebook.name} failed ({type(error).__name__}: {error}); {GO_ON}"
    made = sum(file.is_file() for file in notebook.artefacts(profile))
    return Outcome(notebook.name, time.perf_counter() - started, made, state, reason)


def _written(file: Path) -> tuple[int, int] | None:
    """Which writing of a file this is: another one when it is written again."""
    if not file.is_file():
        return None
    status = file.stat()
    return status.st_mtime_ns, status.st_ino


def _print_closing_table(outcomes: list[Outcome], ok: bool, seconds: float) -> None:
    """``seconds``: of everything, which is less than the sum where some ran beside each other."""
    made = sum(o.made for o in outcomes)
    total = Outcome("in all", seconds, made, "ok" if ok else "failed")
    width = max(len(outcome.name) for outcome in outcomes)
    print(f"\n{'notebook':<{width}} {'seconds':>8} {'artefacts':>9}  state")
    for o in [*outcomes, total]:
        print(f"{o.name:<{width}} {o.seconds:>8.1f} {o.made:>9}  {o.state}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`do` reads from a command line."""
    stages.add_profile(parser)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NN",
        help="numbers of the notebooks to run; implies that earlier work is kept",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with what an earlier run built instead of starting from nothing",
    )
    stages.add_yes(parser)


def do(options: argparse.Namespace) -> None:
    if not reproduce(stages.given_profile(options), options.only, options.resume, options.yes):
        sys.exit(1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sage_lib.pipeline.reproduce",
        description=(__doc__ or "").split("\n\n")[0],
    )
    add_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print settings, data, plan and memory; train nothing",
    )
    options = parser.parse_args(argv)
    try:
        with disk_errors():
            if options.dry_run:
                print(plan.describe(stages.given_profile(options)))
            else:
                do(options)
    except SageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
