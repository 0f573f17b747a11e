"""Notebooks and stages in order."""
