"""Imports point one way: a room imports only from rooms of lower rank, and each library has its
door."""

import ast

import forks
import pytest

from sage_lib.paths import ROOT

LIBRARY = ROOT / "sage_lib"
#: Nine rooms and the ground they stand on. Rooms of equal rank never meet.
RANKS = {
    "algorithm": 1,
    "tasks": 1,
    "experiment": 2,
    "policy": 3,
    "theory": 3,
    "training": 4,
    "evaluation": 4,
    "report": 5,
    "pipeline": 6,
}
#: Modules below every room, in the order in which they may import each other.
GROUND = ("text", "errors", "consent", "validation", "paths", "files")
MODULES = {
    ".".join(path.relative_to(LIBRARY).with_suffix("").parts): path
    for path in sorted(LIBRARY.rglob("*.py"))
}


def imports(path):
    packages, found = ("sage_lib", *(f"sage_lib.{room}" for room in RANKS)), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add("sage_lib.relative imports, which hide the room they name")
        elif isinstance(node, ast.ImportFrom) and node.module in packages:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_imports_run_down(module):
    place = module.split(".")[0]
    for name in imports(MODULES[module]):
        if not name.startswith("sage_lib."):
            continue
        other = name.split(".")[1]
        if other == place and place in RANKS:
            continue
        if other in GROUND:
            allowed = place in RANKS or GROUND.index(other) < GROUND.index(place)
        else:
            allowed = place in RANKS and RANKS[other] < RANKS[place]
        assert allowed, f"{module} imports {name}"


#: Everything that draws and tabulates measured files: not theory, not training's curve.
READERS = {m for m in MODULES if m.startswith("report.")}
READERS -= {"report.theory", "report.kl_forms", "report.live"}
READERS |= {"evaluation.metrics", "pipeline.plan", "pipeline.stages", "policy.token_signals"}


@pytest.mark.parametrize(
    "code",
    [
        "import " + ", ".join(f"sage_lib.{m.removesuffix('.__init__')}" for m in sorted(READERS)),
        "from sage_lib import pass_at_k, bootstrap_interval, paired_difference",
        "from sage_lib import BranchGuide, TokenGuide, RandomGuide, compose, GuideInputs",
        "from sage_lib import Verifier, last_answer, accuracy_reward, load_profile, SageError",
        "from sage_lib.experiment import results; results.load_results('smoke').steps",
        "import sys; from sage_lib import load_profile; from sage_lib.experiment import runs; "
        "runs.every_run(load_profile('study')); assert 'pandas' not in sys.modules",
        "from sage_lib.pipeline import cli; cli.main(['dry-run', '--profile', 'paper'])",
    ],
)
def test_reading_and_planning_and_choosing_a_guide_load_no_training_code(code):
    *_, loaded = forks.fresh(f"{code}; import sys; print(*sys.modules)")
    assert not {"torch", "transformers", "trl", "unsloth"} & set(loaded.split())
