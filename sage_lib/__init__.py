"""Reproducible companion to "SAGE: Shaping Anchors for Guided Exploration in RLVR of LLMs".

The names below are the public surface: ``from sage_lib import SageTrainer, BranchGuide``. Each is
loaded from its room when it is first asked for, so that reading results never waits for torch. The
rooms and their one rule are in CONTRIBUTING.md.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sage_lib.algorithm.backend import GRPOConfig
    from sage_lib.algorithm.guides import (
        BranchGuide,
        CosineSchedule,
        GuideInputs,
        IdentityGuide,
        RandomGuide,
        ShuffledGuide,
        TokenGuide,
        build_guide,
        compose,
    )
    from sage_lib.algorithm.trainer import SageTrainer
    from sage_lib.errors import SageError
    from sage_lib.evaluation.metrics import (
        bootstrap_interval,
        minimum_detectable_effect,
        paired_difference,
        pass_at_k,
    )
    from sage_lib.experiment.profile import load_profile
    from sage_lib.tasks.verifier import Verifier, accuracy_reward, last_answer
    from sage_lib.theory.solutions import tilted
    from sage_lib.theory.tree import Tree

__version__ = "0.1.0"

__all__ = [
    "BranchGuide",
    "CosineSchedule",
    "GRPOConfig",
    "GuideInputs",
    "IdentityGuide",
    "RandomGuide",
    "SageError",
    "SageTrainer",
    "ShuffledGuide",
    "TokenGuide",
    "Tree",
    "Verifier",
    "__version__",
    "accuracy_reward",
    "bootstrap_interval",
    "build_guide",
    "compose",
    "last_answer",
    "load_profile",
    "minimum_detectable_effect",
    "paired_difference",
    "pass_at_k",
    "tilted",
]

#: Where each public name lives.
_HOMES = {
    "BranchGuide": "algorithm.guides",
    "CosineSchedule": "algorithm.guides",
    "GRPOConfig": "algorithm.backend",
    "GuideInputs": "algorithm.guides",
    "IdentityGuide": "algorithm.guides",
    "RandomGuide": "algorithm.guides",
    "SageError": "errors",
    "SageTrainer": "algorithm.trainer",
    "ShuffledGuide": "algorithm.guides",
    "TokenGuide": "algorithm.guides",
    "Tree": "theory.tree",
    "Verifier": "tasks.verifier",
    "accuracy_reward": "tasks.verifier",
    "bootstrap_interval": "evaluation.metrics",
    "build_guide": "algorithm.guides",
    "compose": "algorithm.guides",
    "last_answer": "tasks.verifier",
    "load_profile": "experiment.profile",
    "minimum_detectable_effect": "evaluation.metrics",
    "paired_difference": "evaluation.metrics",
    "pass_at_k": "evaluation.metrics",
    "tilted": "theory.solutions",
}


if not TYPE_CHECKING:  # a checker that sees __getattr__ lets every name pass

    def __getattr__(name: str) -> object:
        """A public name, from its home, when it is first asked for (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        value = getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
