"""A model: load it, sample from it, score it."""
