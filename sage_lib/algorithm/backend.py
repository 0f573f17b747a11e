"""The one place that imports Unsloth and TRL, in the order that works.

Unsloth comes first: on a GPU it replaces TRL's trainers, and on a CPU without Triton plain TRL 1.15 has no kernel for
its chunked log-probabilities until Unsloth supplies one. Every module that trains imports from here.
"""

import os

# TRL and Unsloth write caches of compiled code below the working directory unless told otherwise; one run's cache must
# not meet another's, so the stages point this at their own folder before they import this module.
os.environ.setdefault(
    "UNSLOTH_COMPILE_LOCATION",
    os.path.join(os.path.expanduser("~"), ".cache", "sage-companion", "unsloth"),
)

import unsloth  # noqa: F401, E402  (must come before trl)
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: E402
from unsloth import FastLanguageModel  # noqa: E402

__all__ = ["FastLanguageModel", "GRPOConfig", "GRPOTrainer", "SFTConfig", "SFTTrainer"]
