"""Reproducible companion to "SAGE: Shaping Anchors for Guided Exploration in RLVR of LLMs".

The names below are the public surface: ``from sage_lib import SageTrainer, BranchGuide``. Each is
imported at its first use, so that reading results never waits for torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sage_lib.algorithm.backend import GRPOConfig as GRPOConfig
    from sage_lib.algorithm.guide_choices import build_guide as build_guide
    from sage_lib.algorithm.guides import BranchGuide as BranchGuide
    from sage_lib.algorithm.guides import CosineSchedule as CosineSchedule
    from sage_lib.algorithm.guides import GuideInputs as GuideInputs
    from sage_lib.algorithm.guides import IdentityGuide as IdentityGuide
    from sage_lib.algorithm.guides import RandomGuide as RandomGuide
    from sage_lib.algorithm.guides import ShuffledGuide as ShuffledGuide
    from sage_lib.algorithm.guides import TokenGuide as TokenGuide
    from sage_lib.algorithm.guides import compose as compose
    from sage_lib.algorithm.trainer import SageTrainer as SageTrainer
    from sage_lib.errors import SageError as SageError
    from sage_lib.evaluation.metrics import bootstrap_interval as bootstrap_interval
    from sage_lib.evaluation.metrics import minimum_detectable_effect as minimum_detectable_effect
    from sage_lib.evaluation.metrics import paired_difference as paired_difference
    from sage_lib.evaluation.metrics import pass_at_k_curve as pass_at_k_curve
    from sage_lib.evaluation.passk_comparison import pass_at_k as pass_at_k
    from sage_lib.experiment.profile import load_profile as load_profile
    from sage_lib.tasks.verifier import Verifier as Verifier
    from sage_lib.tasks.verifier import accuracy_reward as accuracy_reward
    from sage_lib.tasks.verifier import last_answer as last_answer
    from sage_lib.theory.optimum import guide_gain as guide_gain
    from sage_lib.theory.solutions import tilted as tilted
    from sage_lib.theory.tree import Tree as Tree

__version__ = "0.2.0"

#: The module of each public name.
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
    "build_guide": "algorithm.guide_choices",
    "compose": "algorithm.guides",
    "guide_gain": "theory.optimum",
    "last_answer": "tasks.verifier",
    "load_profile": "experiment.profile",
    "minimum_detectable_effect": "evaluation.metrics",
    "paired_difference": "evaluation.metrics",
    "pass_at_k": "evaluation.passk_comparison",
    "pass_at_k_curve": "evaluation.metrics",
    "tilted": "theory.solutions",
}
__all__ = ["__version__", *_HOMES]

if not TYPE_CHECKING:  # a checker that sees __getattr__ lets every name pass

    def __getattr__(name: str) -> object:
        """Import a public name at its first use (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            remedy = "install the extra train, as in pip install '.[train]'"
            raise ImportError(f"{name} needs the package {error.name}: {remedy}") from error
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
