"""The one exception that is written for the person at the keyboard."""


class SageError(Exception):
    """Bad input, with one sentence that says what was wrong and how to put it right: all that
    command lines and notebooks print."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the place of a traceback."""
        return [f"error: {self}"]
