"""Run the notebooks in order, headless, and check what each was to make.

python -m sage_lib.pipeline.reproduce --profile smoke --only 05 06 --resume
python -m sage_lib.pipeline.reproduce --profile paper --dry-run
"""

import argparse
import ast
import logging
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile, load_profile, profile_names
from sage_lib.pipeline import stages
from sage_lib.report import tables

#: The kernel of the interpreter that runs this: ipykernel brings it, and jupyter_client starts it with this very Python.
KERNEL = "python3"


@dataclass(frozen=True)
class Notebook:
    """One notebook: its number and name, what it is about, and what it leaves in figures/<profile> and data/measured/<profile>.

    ``task_figures`` and ``task_measured`` are made where the profile has the embedded task, those of tables.FAMILIES where it
    has the methods.
    """

    name: str
    about: str
    figures: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    task_figures: tuple[str, ...] = ()
    task_measured: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        return self.name[:2]

    def artefacts(self, profile: Profile) -> list[Path]:
        figures, measured = (
            (self.figures, self.measured)
            if profile.task is None
            else (self.figures + self.task_figures, self.measured + self.task_measured)
        )
        figures = [f for f in figures if f not in tables.FAMILIES or f in tables.families(profile)]
        return [
            *(
                paths.figures(profile.name) / f"{f}{ending}"
                for f in figures
                for ending in (".pdf", ".png")
            ),
            *(paths.measured(profile.name) / m for m in measured),
        ]


#: Every notebook, in the order in which they run.
NOTEBOOKS = (
    Notebook("00_start_here", "what this is, the map, the machine, the settings"),
    Notebook(
        "01_toy_two_path",
        "Appendix C, in its own terms and on a tree that can have its entropies",
        ("two_path_printed", "two_path_tree", "two_path", "two_path_region"),
    ),
    Notebook(
        "02_closed_form_tilting",
        "every closed form against enumeration and optimisers, Figure 5",
        ("detection", "entropy_bonus", "separation", "figure5"),
    ),
    Notebook(
        "03_what_the_trainer_optimises",
        "each KL estimator's gradient and fixed point, exactly",
        ("fixed_points", "distances", "branch_ratio"),
    ),
    Notebook(
        "05_sft",
        "the base policy, and where its uncertainty lies",
        ("sft_loss",),
        ("sft/record.json", "sft/entropy.json"),
    ),
    Notebook(
        "06_grpo_and_sage",
        "RL with every method, the same seeds and budget; Table 5",
        ("entropy_thresholds", "training_curves", "training_losses", "training_controls"),
        ("table5.csv",),
        ("guide_effects",),
        ("effects/effects.json",),
    ),
    Notebook(
        "04_guides",
        "what each guide does to real completions, Figure 1; after 06, whose policy it traces",
        ("figure1", "signals", "schedules"),
        ("trace/traces.json", "trace/signals.json"),
    ),
    Notebook(
        "07_evaluate",
        "n samples a problem, verified and counted",
        (),
        ("evaluation/sft/counts.csv",),
        ("mode_shares", "support"),
        ("modes.csv", "support.csv"),
    ),
    Notebook(
        "08_main_results", "Table 1, Figure 2, Figure 3", ("figure2", "figure3"), ("table1.csv",)
    ),
    Notebook(
        "09_ood_knights_and_knaves",
        "Figure 4: pass@k outside what was trained on",
        ("figure4",),
        ("ood.csv",),
    ),
    Notebook(
        "10_reasoning_patterns",
        "Table 2, response defects, three solutions side by side",
        (),
        ("table2.csv",),
    ),
    Notebook("11_perplexity", "Figure 7: samples under the base model", ("figure7",)),
    Notebook(
        "12_exploration_metrics",
        "Figure 1 of the exploration report: diversity, votes, unsolvable sets, branching",
        ("exploration", "unsolvable_venn", "unsolvable_upset", "token_updates"),
        ("votes.csv",),
    ),
)


def _parameters(notebook: nbformat.NotebookNode, name: str) -> set[str]:
    """Names assigned in the cell tagged ``parameters``, which must be the first code cell."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not code or "parameters" not in code[0].metadata.get("tags", []):
        raise SageError(f"notebook {name}: its first code cell must carry the tag parameters")
    return {
        target.id
        for node in ast.parse(code[0].source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }


def run_notebook(path: Path, output: Path, parameters: dict[str, object]) -> float:
    """Execute one notebook through papermill, its output streamed to the terminal; returns seconds.

    Papermill only warns of a parameter that the notebook does not have; here it is an error. A failing cell raises
    SageError with the notebook, the cell and the path of the executed copy, which holds everything up to there.
    """
    import papermill

    name = path.stem
    if not path.is_file():
        raise SageError(
            f"notebook {name} is missing from {path.parent.name}/: restore it from the repository"
        )
    unknown = set(parameters) - _parameters(nbformat.read(path, as_version=4), name)
    if unknown:
        raise SageError(
            f"notebook {name} has no parameter {sorted(unknown)[0]!r}: see its first code cell"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    try:
        papermill.execute_notebook(
            str(path),
            str(output),
            parameters=parameters,
            kernel_name=KERNEL,
            cwd=str(path.parent),
            progress_bar=False,
            log_output=True,
        )
    except papermill.PapermillExecutionError as error:
        raise SageError(
            f"notebook {name} failed in cell {error.cell_index} ({error.ename}: {error.evalue}); executed copy: {output}"
        ) from error
    return time.perf_counter() - started


def _select(only: list[str] | None) -> list[Notebook]:
    known = {n.number: n for n in NOTEBOOKS}
    for number in only or ():
        if number not in known:
            raise SageError(f"there is no notebook {number!r}: choose among {', '.join(known)}")
    return [n for n in NOTEBOOKS if not only or n.number in only]


def _put_aside(profile: Profile) -> None:
    """Without --resume a run starts from nothing; what an earlier one built is kept beside, not deleted."""
    folder = paths.build(profile.name)
    if folder.is_dir() and any(folder.iterdir()):
        n = 1
        while (old := folder.with_name(f"{folder.name}.old{n}")).exists():
            n += 1
        shutil.move(folder, old)
        print(
            f"the earlier build of {profile.name} was put aside as {old.name} (use --resume to go on with one; delete it when it is not needed)"
        )


def reproduce(profile: Profile, only: list[str] | None = None, resume: bool = False) -> bool:
    """Run the notebooks and print the closing table; True when all are ok. Stops at the first that fails."""
    chosen = _select(only)
    stages.check_machine(profile)
    if not resume and not only:
        _put_aside(profile)
    rows, ok = [], True
    for position, notebook in enumerate(chosen, 1):
        print(f"\n== {notebook.name} ({position} of {len(chosen)}): {notebook.about}", flush=True)
        output = paths.build(profile.name) / "notebooks" / f"{notebook.name}.ipynb"
        started, wall = time.perf_counter(), time.time()
        try:
            run_notebook(
                paths.NOTEBOOKS / f"{notebook.name}.ipynb",
                output,
                {"profile": profile.path if profile.name not in profile_names() else profile.name},
            )
            missing = [
                a
                for a in notebook.artefacts(profile)
                if not a.is_file() or (a.suffix in (".pdf", ".png") and a.stat().st_mtime < wall)
            ]
            if missing:
                raise SageError(
                    f"notebook {notebook.name} ended without making {missing[0].parent.name}/{missing[0].name}; executed copy: {output}"
                )
            state = "ok"
        except SageError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            state, ok = "failed", False
        rows.append(
            (
                notebook.name,
                time.perf_counter() - started,
                sum(a.is_file() for a in notebook.artefacts(profile)),
                state,
            )
        )
        if not ok:
            break
    rows += [(n.name, 0.0, 0, "not run") for n in chosen[len(rows) :]]
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'notebook':<{width}} {'seconds':>8} {'artefacts':>9}  state")
    for name, seconds, made, state in rows:
        print(f"{name:<{width}} {seconds:>8.1f} {made:>9}  {state}")
    print(
        f"{'in all':<{width}} {sum(r[1] for r in rows):>8.1f} {sum(r[2] for r in rows):>9}  {'ok' if ok else 'failed'}",
        flush=True,
    )
    return ok


def dry_run(profile: Profile) -> None:
    """Print every resolved setting with its source, the data sets as they load, the plan of runs and the memory they need."""
    from sage_lib.pipeline import plan

    print(plan.describe(profile))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sage_lib.pipeline.reproduce", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--profile",
        default="smoke",
        help=f"one of {', '.join(profile_names())}, or the path of a .yaml file",
    )
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
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print settings, data, plan and memory; train nothing",
    )
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("papermill").setLevel(logging.INFO)
    try:
        profile = load_profile(options.profile)
        if options.dry_run:
            dry_run(profile)
        elif not reproduce(profile, options.only, options.resume):
            sys.exit(1)
    except SageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
