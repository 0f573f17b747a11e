"""The exception whose message is written for the user."""

from sage_lib.text import visible


class SageError(Exception):
    """Bad input. The message is a sentence with the fault and its remedy; command lines and
    notebooks print nothing else."""

    def __str__(self) -> str:
        return visible(super().__str__())  # it may quote what strangers wrote

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in the place of a traceback."""
        return [f"error: {self}"]
