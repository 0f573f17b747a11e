"""Every published figure and table, drawn again from the published results: nothing is trained.

    sage-companion figures
    sage-companion figures --profile smoke --only 07 08

The notebooks' own cells run here, in a few processes without kernels, so that libraries are loaded
once for many notebooks. What comes out the same leaves its files as they are.
"""

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment import runs
from sage_lib.experiment.profile import Profile, load_profile, published_specs
from sage_lib.pipeline import notebooks, processes
from sage_lib.pipeline.notebooks import Notebook
from sage_lib.report.generality_tables import read_beside

#: Processes that draw at a time.
PROCESSES = 2


@dataclass(frozen=True)
class Drawing:
    """A notebook, and the published profile that it is drawn for (None: theory)."""

    notebook: Notebook
    spec: str | None

    def __str__(self) -> str:
        return self.notebook.name if self.spec is None else f"{self.notebook.name}, {self.spec}"


def run_cells(path: Path, given: dict[str, object]) -> None:
    """Run a notebook's code cells in this process, as with these parameters; what they print and
    show is dropped.

    A failing cell raises SageError with the notebook, the cell and the reason."""
    import nbformat

    space: dict[str, object] = {"__name__": "__main__"}
    cells = nbformat.read(path, as_version=4).cells
    with contextlib.ExitStack() as stack:
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirect(io.StringIO()))
        stack.enter_context(contextlib.chdir(path.parent))
        for number, cell in enumerate(cells):
            if cell.cell_type != "code":
                continue
            try:
                exec(compile(cell.source, f"{path.stem}, cell {number}", "exec"), space)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise SageError(f"notebook {path.stem}, cell {number}: {reason}") from error
            if "parameters" in cell.metadata.get("tags", []):
                space |= given


def _draw(drawing: Drawing) -> tuple[float, str]:
    """Seconds, and why it failed ("" where it did not)."""
    started = time.perf_counter()
    given: dict[str, object] = {"results": "published"}
    if drawing.spec is not None:
        given["profile"] = drawing.spec
    try:
        run_cells(drawing.notebook.path, given)
    except SageError as error:
        return time.perf_counter() - started, str(error)
    return time.perf_counter() - started, ""


def drawings(
    profiles: list[Profile], theory: bool, only: Collection[str] | None = None
) -> list[Drawing]:
    """What there is to draw: the theory once, then every notebook that makes something; with
    ``only``, of the notebooks of these numbers."""
    every = [one for one in notebooks.found() if not only or one.number in only]
    exact = [one for one in every if "profile" not in notebooks.parameters(one.path)]
    found = [Drawing(one, None) for one in exact if theory and notebooks.THEORY in one.by_part]
    for profile in profiles:
        for notebook in every:
            made = notebook.made(profile)
            makes = made.figures or made.measured
            if notebook not in exact and makes and notebook.lacks(profile) is None:
                found.append(Drawing(notebook, profile.spec))
    return found


def missing(profile: Profile) -> list[str]:
    """Names of the runs of a published profile whose results are not there (yet)."""
    return [run.name for run in runs.every_run(profile) if not run.record.is_file()]


def redraw(
    profiles: list[Profile], theory: bool = True, only: Collection[str] | None = None
) -> bool:
    """Draw again what is published of some profiles, and the theory; True when all of it could be.

    A profile that is published in part, as a grid grows, waits until it is whole. One that is read
    beside another (:func:`read_beside`) is drawn there alone.
    """
    started, whole, failed = time.perf_counter(), [], 0
    for profile in profiles:
        main = read_beside(profile.name)
        if main is not None:
            print(f"{profile.name}: read beside {main} in notebook 20, which draws it", flush=True)
            continue
        lacking = missing(profile)
        try:
            runs.require_current(profile)
        except SageError as error:
            known = runs.known_stale(profile)
            reason = f"the figures stay as they are, {known}" if known else f"not drawn: {error}"
            print(f"{profile.name}: {reason}", flush=True)
            failed += not known
            continue
        if lacking:
            print(f"{profile.name}: not drawn before it is whole: {lacking[0]} is not published")
        else:
            whole.append(profile)
    before = _files()
    if theory and not only:
        benchmarks()
    chosen = drawings(whole, theory, only)
    with ProcessPoolExecutor(PROCESSES, initializer=_prepare) as pool:
        for drawing, (seconds, reason) in zip(chosen, pool.map(_draw, chosen), strict=True):
            print(
                f"{drawing}: {seconds:.1f} s{f', failed: {reason}' if reason else ''}", flush=True
            )
            failed += bool(reason)
    after = _files()
    changed = sorted(name for name in after if before.get(name) != after[name])
    same = f"{len(after) - len(changed)} files as they were"
    print(f"{len(chosen)} notebooks in {time.perf_counter() - started:.0f} s; {same}")
    for name in changed:
        print(f"changed: {name}")
    return not failed


def _prepare() -> None:
    """In a process that draws, and not in the one that started it: to files, on one thread."""
    processes.end_with_pool()
    os.environ |= {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}


def benchmarks() -> None:
    """Draw what is drawn from data/published/benchmarks, which no notebook does."""
    from sage_lib.report import growth_figures
    from sage_lib.report.style import save_figure

    save_figure(growth_figures.growth(), "growth", paths.FIGURES / "benchmarks")


def _files() -> dict[str, bytes]:
    """Every published file by its place."""
    found = [path for folder in (paths.FIGURES, paths.PUBLISHED) for path in folder.rglob("*.*")]
    return {"/".join(path.parts[-3:]): path.read_bytes() for path in found if path.is_file()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`do` reads from a command line."""
    parser.add_argument(
        "--profile", nargs="+", choices=published_specs(), help="of these published profiles alone"
    )
    parser.add_argument("--only", nargs="+", metavar="NN", help="these notebooks alone")


def do(options: argparse.Namespace) -> None:
    specs = published_specs()
    names = options.profile or specs
    profiles = [load_profile(specs[name], "published") for name in names]
    if not redraw(profiles, theory=not options.profile, only=options.only):
        sys.exit(1)
