"""Problems, prompts, and who judges an answer. Knows nothing of profiles."""
