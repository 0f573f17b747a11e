"""Which settings TRL's and PEFT's configurations know, read from their source files.

Importing TRL and Unsloth takes longer than all the rest of a dry run, and only to learn the names
of some fields. A stage checks the same against the classes themselves before it trains
(``training.callbacks.check_sections``).
"""

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

from sage_lib.errors import SageError
from sage_lib.experiment.profile import Profile
from sage_lib.experiment.typed_fields import refuse_unknown

#: A configuration and the classes that it inherits from: package, file, class.
SFT = (
    ("trl", "trainer/sft_config.py", "SFTConfig"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
GRPO = (("trl", "trainer/grpo_config.py", "GRPOConfig"), *SFT[1:])
LORA = (
    ("peft", "tuners/lora/config.py", "LoraConfig"),
    ("peft", "config.py", "PeftConfig"),
    ("peft", "config.py", "PeftConfigMixin"),
)


def check(profile: Profile) -> None:
    """SageError for a setting of a section that its configuration does not know."""
    by_name = {classes[0][2]: classes for classes in (SFT, GRPO, LORA)}
    for name, place, section in profile.configured():
        refuse_unknown(place, section, names(by_name[name]), name)


@functools.cache
def names(classes: tuple[tuple[str, str, str], ...]) -> frozenset[str]:
    """The fields that these dataclasses take together."""
    return frozenset(name for place in classes for name in _fields(*place))


def _fields(package: str, file: str, name: str) -> list[str]:
    found = importlib.util.find_spec(package)  # of a package: nothing is imported
    if found is None or not found.submodule_search_locations:
        raise SageError(f"the package {package} is missing: install requirements.lock")
    body = ast.parse((Path(found.submodule_search_locations[0]) / file).read_text()).body
    chosen = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    return [
        node.target.id
        for node in chosen.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _taken(node)
    ]


def _taken(node: ast.AnnAssign) -> bool:
    """Whether a field is an argument: neither a class's own constant nor ``field(init=False)``."""
    if ast.unparse(node.annotation).startswith("ClassVar"):
        return False
    words: list[Any] = node.value.keywords if isinstance(node.value, ast.Call) else []
    return not any(w.arg == "init" and ast.unparse(w.value) == "False" for w in words)
