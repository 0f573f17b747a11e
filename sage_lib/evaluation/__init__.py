"""Measurements on policies."""
