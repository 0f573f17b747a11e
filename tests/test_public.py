"""The public surface: names come from their homes, late."""

import ast
import importlib
import json
import subprocess
import sys
import tomllib

import pytest

import sage_lib
from sage_lib.algorithm import unsloth_first
from sage_lib.paths import ROOT

SOURCE = ROOT / "sage_lib" / "__init__.py"
HEAVY = ("torch", "transformers", "trl", "unsloth", "matplotlib", "math_verify")


def fresh(code):
    """What a line of Python prints (as JSON) in an interpreter of its own."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def loaded_by(code):
    return fresh(f"{code}; import json, sys; print(json.dumps([m for m in sys.modules]))")


def test_the_package_alone_loads_no_library():
    modules = loaded_by("import sage_lib; dir(sage_lib); sage_lib.__version__")
    assert not set(HEAVY) & set(modules)
    assert [m for m in modules if m.startswith("sage_lib")] == ["sage_lib"]


@pytest.mark.parametrize(
    "code",
    [
        "import sage_lib, sage_lib.report, sage_lib.evaluation.metrics",
        "from sage_lib import pass_at_k, bootstrap_interval, paired_difference",
        "from sage_lib import BranchGuide, TokenGuide, RandomGuide, compose, GuideInputs",
        "from sage_lib import Verifier, last_answer, accuracy_reward, load_profile, SageError",
    ],
)
def test_reading_results_and_choosing_a_guide_load_no_trainer(code):
    assert not {"torch", "transformers", "trl", "unsloth"} & set(loaded_by(code))


#: Prints the modules in the order in which they were first looked for, up to the first of TRL's.
WATCH = """
import json, os, sys
order = []
class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        order.append(name)
        if name == "trl":
            print(json.dumps(order), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch)
from sage_lib import {name}
"""


@pytest.mark.parametrize("name", ["SageTrainer", "GRPOConfig"])
def test_a_trainer_imports_the_unsloth_that_it_needs_before_trl(name):
    order = fresh(WATCH.format(name=name))
    if not unsloth_first.is_needed():
        pytest.skip("TRL trains here without Unsloth")
    assert "unsloth" in order, "TRL comes first"
    assert order.index("sage_lib.algorithm.backend") < order.index("unsloth") < order.index("trl")


@pytest.mark.parametrize("name", sorted(sage_lib._HOMES))
def test_every_name_is_the_object_of_its_home(name):
    home = importlib.import_module(f"sage_lib.{sage_lib._HOMES[name]}")
    assert getattr(sage_lib, name) is getattr(home, name)


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(AttributeError, match="module 'sage_lib' has no attribute 'SageTrainr'"):
        _ = sage_lib.SageTrainr
    with pytest.raises(ImportError, match="SageTrainr"):
        from sage_lib import SageTrainr  # noqa: F401


def test_dir_lists_the_surface():
    assert set(sage_lib.__all__) == {*sage_lib._HOMES, "__version__"}
    assert set(sage_lib.__all__) <= set(dir(sage_lib))


def test_editors_and_mypy_see_the_same_names():
    """What ``if TYPE_CHECKING`` imports is what the table of homes holds."""
    seen = {}
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("sage_lib."):
            home = node.module.removeprefix("sage_lib.")
            seen |= {alias.name: home for alias in node.names}
    assert seen == sage_lib._HOMES


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sage_lib.__version__"}
    assert f"\nversion: {sage_lib.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {sage_lib.__version__} " in (ROOT / "CHANGELOG.md").read_text()
