"""Imports point one way: a room imports only from rooms of lower rank, and each library has its
door."""

import ast
import subprocess
import sys
from pathlib import Path

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
GROUND = ("errors", "paths", "files")
#: Libraries with one door each: who imports it.
DOORS = {
    "unsloth": {"algorithm.unsloth_first"},
    "trl": {"algorithm.backend"},
    "math_verify": {"tasks.verifier", "pipeline.bench"},  # which measures the library itself
    "pebble": {"tasks.verifier"},
    "papermill": {"pipeline.reproduce"},
    "submitit": {"pipeline.grid"},
    "reasoning_gym": {"tasks.knights_knaves", "tasks.word_problems"},
    "matplotlib_venn": {"report.exploration_figures"},
    "seaborn": {"report.style"},
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(LIBRARY).with_suffix("").parts)


MODULES = {module_name(path): path for path in sorted(LIBRARY.rglob("*.py"))}


def imports(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add("sage_lib.relative imports, which hide the room they name")
        elif isinstance(node, ast.ImportFrom) and node.module in ("sage_lib", *ROOM_PATHS):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


ROOM_PATHS = tuple(f"sage_lib.{room}" for room in RANKS)


def test_the_library_is_the_nine_rooms_and_their_ground():
    rooms = {path.name for path in LIBRARY.iterdir() if (path / "__init__.py").is_file()}
    assert rooms == set(RANKS)
    assert {path.stem for path in LIBRARY.glob("*.py")} == {*GROUND, "__init__"}
    for room in rooms:
        body = ast.parse((LIBRARY / room / "__init__.py").read_text()).body
        assert len(body) == 1, f"{room}/__init__.py holds a docstring and nothing else"


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


@pytest.mark.parametrize("library", DOORS)
def test_each_library_has_its_door(library):
    users = {
        module
        for module, path in MODULES.items()
        if any(name.split(".")[0] == library for name in imports(path))
    }
    assert users == DOORS[library]


def test_figures_are_drawn_in_the_report_alone():
    users = {m for m, p in MODULES.items() if any(n.startswith("matplotlib") for n in imports(p))}
    assert users and all(module.startswith("report.") for module in users)


def test_reading_results_loads_no_training_code():
    """Everything that draws and tabulates measured files: not theory, not training's curve."""
    others = {"report.theory_figures", "report.live"}
    readers = [m for m in MODULES if m.startswith("report.") and m not in others]
    readers += ["evaluation.metrics", "evaluation.counts", "experiment.profile"]
    readers += ["pipeline.plan", "pipeline.stages", "policy.token_signals"]
    wanted = ", ".join(f"sage_lib.{m.removesuffix('.__init__')}" for m in readers)
    heavy = "{'torch', 'trl', 'unsloth', 'transformers'}"
    code = f"import sys, sage_lib, {wanted}; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
