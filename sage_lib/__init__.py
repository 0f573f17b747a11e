"""Reproducible companion to "SAGE: Shaping Anchors for Guided Exploration in RLVR of LLMs" (ICML 2026).

Importing the package is cheap: nothing here loads torch, TRL or Unsloth until a module that needs them is imported.
The floors (which module may import which) are listed in README.md and enforced by tests/test_floors.py.
"""

__version__ = "0.1.0"
