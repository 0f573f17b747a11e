"""The notebooks: what each needs of a profile, and how one is executed without a browser.

A notebook's own metadata may name, under "sage", what it "needs" (names of :data:`NEEDS`): it is
left out of a profile that lacks that.
"""

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile
from sage_lib.pipeline import jobs

#: The notebooks that train models of their own, each from what those before it made.
WALK = ("04", "05", "06", "07")


def _betas(profile: Profile) -> set[float]:
    """Return the values of beta with which the profile trains GRPO without a guide."""
    methods = profile.methods.items()
    plain = [key for key, m in methods if not (m.guide or m.rft or m.advantage)]
    return {profile.rl_of(key)["beta"] for key in plain}


#: What a notebook may need of a profile, and how to tell that it is there. Any other word is a
#: family of methods.
NEEDS: dict[str, Callable[[Profile], bool]] = {
    "rl": lambda profile: bool(profile.rl) and profile.rl_data is not None,
    "exploration": lambda profile: profile.exploration.seeds > 0,
    "ood": lambda profile: any(data.ood for data in profile.evaluation.data),
    "exact pass@k": lambda profile: profile.exact,
    "front": lambda profile: profile.exact and len(_betas(profile)) > 1,
}


@dataclass(frozen=True)
class Notebook:
    """One notebook: its file, and what it needs of a profile."""

    path: Path
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        return self.name[:2]

    def lacks(self, profile: Profile) -> str | None:
        """Return what the notebook needs and the profile does not have, or None."""
        families = {method.family for method in profile.methods.values()}
        met = {need for need, test in NEEDS.items() if test(profile)} | (families - NEEDS.keys())
        return next((need for need in self.needs if need not in met), None)


def _read(path: Path) -> Any:
    import nbformat  # late: it takes seconds, and most commands read no notebook

    return nbformat.read(path, as_version=4)


def select(only: Sequence[str] | None = None) -> list[Notebook]:
    """Return the notebooks of these numbers, or all; raise SageError for an unknown number."""
    known = {path.name[:2]: path for path in sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))}
    only = [number.partition("_")[0].zfill(2) for number in only or ()]
    for number in only:
        if number not in known:
            raise SageError(f"there is no notebook {number!r}: choose among {', '.join(known)}")
    selected = [path for number, path in known.items() if not only or number in only]
    needs = [_read(path).metadata.get("sage", {}).get("needs", ()) for path in selected]
    return [Notebook(path, tuple(names)) for path, names in zip(selected, needs, strict=True)]


def parameters(path: Path) -> set[str]:
    """Return the names assigned in the cell tagged ``parameters``, the first code cell."""
    code = [cell for cell in _read(path).cells if cell.cell_type == "code"]
    if not code or "parameters" not in code[0].metadata.get("tags", []):
        raise SageError(f"notebook {path.stem}: its first code cell must carry the tag parameters")
    assigned = [node for node in ast.parse(code[0].source).body if isinstance(node, ast.Assign)]
    targets = [target for node in assigned for target in node.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def jobs_of(
    selected: Sequence[Notebook],
    folder: Path,
    values: Mapping[str, Any],
    after: frozenset[Any] = frozenset(),
) -> list[jobs.Job]:
    """Return the execution of notebooks as jobs, of each with the ``values`` that it has parameters
    for. Those of the walk wait for each other, those that read a profile for ``after``."""
    planned: list[jobs.Job] = []
    walked: frozenset[Any] = frozenset()
    for notebook in selected:
        known = parameters(notebook.path)
        passed = {key: value for key, value in values.items() if key in known}
        needs = walked if notebook.number in WALK else after if "profile" in passed else frozenset()
        name, arguments = notebook.name, (notebook.path, folder / f"{notebook.name}.ipynb", passed)
        planned.append(jobs.Job(name, name, execute, arguments, folder / f"{name}.log", needs))
        if notebook.number in WALK:
            walked = frozenset([name])
    return planned


def execute(path: Path, output: Path, values: Mapping[str, Any]) -> None:
    """Execute one notebook through papermill, in its own folder and on one thread.

    SageError names the notebook, the cell that fails, and the executed copy up to there. A kernel
    that dies before its first cell is started again: two that start at once may be given the same
    port."""
    import papermill
    import tenacity

    output.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= jobs.environment(threads=1)  # of its kernel, whose sage_lib is this one
    restarting = tenacity.retry(
        retry=tenacity.retry_if_exception_message(match="Kernel died before replying"),
        stop=tenacity.stop_after_attempt(3),
        reraise=True,
    )
    try:
        restarting(papermill.execute_notebook)(
            str(path),
            str(output),
            parameters=dict(values),
            kernel_name="python3",  # ipykernel's: of this very interpreter
            cwd=str(path.parent),
            progress_bar=False,
            start_timeout=300,  # seconds, for a kernel on a busy machine
            extra_arguments=["--IPKernelApp.log_level=50"],  # its warnings help nobody
        )
    except papermill.PapermillExecutionError as error:
        where = f"{path.stem} failed in cell {error.cell_index} ({error.ename}: {error.evalue})"
        raise SageError(f"notebook {where}; executed copy: {output}") from error
