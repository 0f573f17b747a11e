"""The public surface: names come from their homes, late."""

import ast

import forks
import pytest

import sage_lib
from sage_lib.algorithm import unsloth_first
from sage_lib.paths import ROOT

#: Prints the modules in the order in which they were first looked for, up to the first of TRL's.
WATCH = """
import os, sys
order = []
class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        order.append(name)
        if name == "trl":
            print(*order, flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch)
from sage_lib import {name}
"""


@pytest.mark.parametrize("name", ["SageTrainer", "GRPOConfig"])
def test_a_trainer_imports_the_unsloth_that_it_needs_before_trl(name):
    order = forks.fresh(WATCH.format(name=name))[-1].split()
    if not unsloth_first.is_needed():
        pytest.skip("TRL trains here without Unsloth")
    assert "unsloth" in order, "TRL comes first"
    assert order.index("sage_lib.algorithm.backend") < order.index("unsloth") < order.index("trl")


def test_every_public_name_is_where_the_table_says():
    for name in sage_lib.__all__:
        assert getattr(sage_lib, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'SageTrainr'"):
        sage_lib.SageTrainr  # noqa: B018


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "sage_lib" / "__init__.py").read_text())
    found = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    seen = {name.asname: one.module for one in found for name in one.names if name.asname}
    assert seen == {name: f"sage_lib.{home}" for name, home in sage_lib._HOMES.items()}
