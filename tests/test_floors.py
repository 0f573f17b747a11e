"""Imports point one way: a module may import only from floors below its own, and each external library has its place."""

import ast
import subprocess
import sys

import pytest

from sage_lib.paths import ROOT

FLOORS = [
    {"errors", "prompts", "__init__"},
    {"paths", "metrics", "guides", "anchors", "embedded_task", "verifier", "knights_knaves", "word_problems", "theory"},
    {"files", "config", "reported", "counts", "texts", "smollm", "embedded_model", "backend", "estimators", "two_path", "closed_forms"},
    {"records", "benchmarks", "guide_choice", "findings"},
    {"layout", "data", "models"},
    {"sampling", "scoring"},
    {"tables", "training", "trainer", "interventions"},
    {"figures", "plan", "sft", "sample_tables"},
    {"rl", "evaluate", "traces", "guide_effects", "theory_figures", "guide_figures", "exploration_figures"},
    {"stages"},
    {"reproduce"},
]
#: Libraries with one door each.
DOORS = {"unsloth": {"backend"}, "trl": {"backend"}, "math_verify": {"verifier"}, "pebble": {"verifier"}, "papermill": {"reproduce"}, "reasoning_gym": {"knights_knaves", "word_problems"}, "matplotlib": {"figures", "theory_figures", "guide_figures", "exploration_figures"}, "matplotlib_venn": {"exploration_figures"}, "seaborn": {"figures"}}


def imports(module):
    found = set()
    for node in ast.walk(ast.parse((ROOT / "sage_lib" / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" if node.module == "sage_lib" else node.module for alias in node.names}
    return found


MODULES = sorted(p.stem for p in (ROOT / "sage_lib").glob("*.py"))


def test_every_module_has_a_floor():
    assert sorted(m for floor in FLOORS for m in floor) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    floor = next(i for i, f in enumerate(FLOORS) if module in f)
    below = set().union(*FLOORS[:floor])
    inside = {name.split(".")[1] for name in imports(module) if name.startswith("sage_lib.")}
    assert inside <= below, f"{module} (floor {floor}) imports {sorted(inside - below)}"


@pytest.mark.parametrize("library", DOORS)
def test_each_library_has_one_door(library):
    users = {m for m in MODULES if any(name.split(".")[0] == library for name in imports(m))}
    assert users == DOORS[library]


def test_importing_the_package_and_reading_results_load_no_training_code():
    code = "import sys, sage_lib.tables, sage_lib.figures, sage_lib.plan, sage_lib.stages; print(*{'torch', 'trl', 'unsloth', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_unsloth_comes_before_trl():
    lines = (ROOT / "sage_lib" / "backend.py").read_text().splitlines()
    first = {name: next(i for i, line in enumerate(lines) if line.startswith((f"import {name}", f"from {name}"))) for name in ("unsloth", "trl")}
    assert first["unsloth"] < first["trl"]
