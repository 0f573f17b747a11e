"""The optimum of eq. 4 as a picture to play with, in a notebook's output or on the site."""

from pathlib import Path

from IPython.display import HTML

#: The one file of the picture. It needs no server and no other file.
SCRIPT = Path(__file__).with_name("tilt.js")
#: Where the picture is drawn; its words stand there without JavaScript.
PLACE = "<div data-tilt>The live picture needs JavaScript: execute this cell again.</div>"


def live_tilt() -> HTML:
    """Return bars of five completions at the optimum, with sliders for beta and each q."""
    return HTML(f"{PLACE}<script>{SCRIPT.read_text()}</script>")
