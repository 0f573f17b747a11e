"""The exception whose message is written for the user."""


class SageError(Exception):
    """Bad input. The message is a sentence with the fault and its remedy; command lines and
    notebooks print nothing else."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in the place of a traceback."""
        return [f"error: {self}"]
