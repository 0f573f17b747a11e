"""The public surface: names come from their homes, late, and the README's names exist."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib

import pytest

import sage_lib
from sage_lib.paths import ROOT
from sage_lib.pipeline import cli

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


#: Prints the modules in the order in which they were first looked for.
WATCH = """
import json, sys
order = []
class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        order.append(name)
sys.meta_path.insert(0, Watch)
from sage_lib import {name}
print(json.dumps(order))
"""


@pytest.mark.parametrize("name", ["SageTrainer", "GRPOConfig"])
def test_a_trainer_imports_unsloth_before_trl(name):
    order = fresh(WATCH.format(name=name))
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


# The README: its examples are read, not run. Names and keywords must exist.

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
MODULES_RUN = sorted(set(re.findall(r"-m (sage_lib[\w.]*)", README)))
COMMANDS = sorted(set(re.findall(r"^sage-companion ([\w-]+)", README, re.MULTILINE)))


def resolve(module, name):
    """An imported name of sage_lib: an attribute, or a module of its own."""
    owner = importlib.import_module(module)
    if hasattr(owner, name):
        return getattr(owner, name)
    return importlib.import_module(f"{module}.{name}")


def imported_names(tree):
    """Name in a block -> the object of sage_lib that it stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "sage_lib":
            for alias in node.names:
                found[alias.asname or alias.name] = resolve(node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "sage_lib":
                    found["sage_lib"] = importlib.import_module(alias.name.split(".")[0])
                    importlib.import_module(alias.name)
    return found


def named_object(node, names):
    """The object of sage_lib that an expression ``a.b.c`` names; None for everything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = named_object(node.value, names)
        if inspect.ismodule(owner):
            assert hasattr(owner, node.attr), f"{owner.__name__} has no {node.attr}"
            return getattr(owner, node.attr)
    return None


def keywords_of(function):
    """The keywords that a callable takes; None where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def test_the_readme_has_examples():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS)
def test_the_readme_uses_names_that_exist(block):
    tree = ast.parse(block)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            named_object(node, names)
        elif isinstance(node, ast.Call):
            function = named_object(node.func, names)
            if function is None:
                continue
            known = keywords_of(function)
            given = {keyword.arg for keyword in node.keywords}
            assert known is None or given <= known, f"{ast.unparse(node.func)}: {given - known}"


def test_the_readme_names_modules_that_can_be_run():
    for module in MODULES_RUN:
        source = inspect.getsource(importlib.import_module(module))
        assert 'if __name__ == "__main__":' in source, module


def test_the_readme_names_commands_that_there_are(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0, capsys.readouterr().err


def test_the_readme_lists_the_names_that_profiles_know():
    from sage_lib.algorithm.anchors import ANCHORS
    from sage_lib.algorithm.guides import GUIDES
    from sage_lib.pipeline.stages import STAGES
    from sage_lib.tasks.table import TASKS

    listed = set(re.findall(r"`(\w+)`", README))
    assert {*GUIDES, *ANCHORS, *TASKS} <= listed
    assert all(f"{name}" in README for name in STAGES)


def test_the_readmes_profiles_load(tmp_path):
    blocks = re.findall(r"^```yaml\n(name: .*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    (tmp_path / "my_problems.csv").write_text("problem,answer\n1 + 1?,2\n")
    for block in blocks:
        name = block.split("name: ")[1].split()[0]
        (tmp_path / f"{name}.yaml").write_text(block)
        profile = sage_lib.load_profile(tmp_path / f"{name}.yaml")
        assert profile.evaluation.data[-1].name == "file"
