"""The notebooks as they are committed: with the outputs of a run on the published results.

    sage-companion notebooks               execute them, and store what they show
    sage-companion notebooks --check       execute them, and compare that with what is stored

What is stored depends on the published results alone: no paths, no times, no progress bars, no
names of objects in memory, no state of widgets. Pictures are stored and not compared, since another
processor may round the last digit of a curve; of the text every word is, and every number to one
unit of its last printed digit, but for cells with the tag ``trained``.
"""

import argparse
import base64
import copy
import io
import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import notebook_text, write_text
from sage_lib.pipeline import reproduce
from sage_lib.pipeline.notebooks import Notebook

#: The tag of a cell that shows the machine it runs on: its outputs are not stored.
MACHINE = "machine"
#: The tag of a cell whose numbers come from training: they are stored and not compared, since
#: another processor trains other weights.
TRAINED = "trained"
#: What Unsloth prints of the machine.
_UNSLOTH = re.compile(r"^Unsloth.*\n?", re.MULTILINE)
WIDGET = "application/vnd.jupyter.widget-view+json"
PICTURE = "image/png"
#: A notebook with its outputs is at most this large, and a picture of it, bytes.
LARGEST, LARGEST_PICTURE = 2_000_000, 400_000
#: Colours of a stored picture.
COLOURS = 128
#: What pandas calls a table's elements: five digits drawn at random.
_TABLE = re.compile(r"\bT_[0-9a-f]{5}(?=_|\b)")
#: Where a machine keeps things, and an object's place in memory.
_UNWANTED = {
    "a path of a machine": re.compile(r"(?<![\w./:-])/(?:home|root|tmp|Users|usr|opt|mnt)/"),
    "an object's address": re.compile(r"\bat 0x[0-9a-f]{6,}"),
    "a picture instead of its name": re.compile(r"<Figure size "),
    "a progress bar": re.compile(r"\d+%\|"),
}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
#: Numbers below this are rounding errors of float64: another processor has others.
ROUNDING = 1e-9


def executed(notebook: Notebook) -> Any:
    """The notebook (nbformat) with the outputs of a run on its parameters' defaults, clean.

    Figures that are no published ones go to the build folder. Raises SageError for a cell that
    fails, and for an output that would not be the same elsewhere.
    """
    import nbformat

    folder = paths.build("outputs")
    before = dict(os.environ)
    os.environ |= {"SAGE_RESULTS": str(folder / "results"), "OMP_NUM_THREADS": "1"}
    try:
        copy_of = folder / f"{notebook.name}.ipynb"
        reproduce.run_notebook(notebook.path, copy_of, {})
    finally:
        os.environ.clear()
        os.environ |= before
    stored = with_outputs(
        nbformat.read(notebook.path, as_version=4), nbformat.read(copy_of, as_version=4)
    )
    found = faults(stored)
    if found:
        raise SageError(f"notebook {notebook.name}: {found[0]}")
    return stored


def with_outputs(notebook: Any, ran: Any) -> Any:
    """A notebook with the outputs of its executed copy, nothing else changed."""
    stored = copy.deepcopy(notebook)
    outputs = {cell["id"]: cell for cell in ran.cells if cell.cell_type == "code"}
    number = 0
    for cell in stored.cells:
        if cell.cell_type != "code":
            continue
        number += 1
        cell.execution_count = number
        hidden = MACHINE in cell.metadata.get("tags", [])
        cell.outputs = [] if hidden else _cleaned(outputs[cell["id"]].outputs, cell["id"], number)
    return stored


def _cleaned(outputs: list[Any], cell: str, number: int) -> list[Any]:
    kept: list[Any] = []
    for output in copy.deepcopy(outputs):
        if output.output_type == "stream":
            if output.name != "stdout":  # progress bars and warnings
                continue
            output.text = _UNSLOTH.sub("", _without_root(output.text))
            if not output.text.strip():
                continue
            if kept and kept[-1].output_type == "stream":  # printed in one piece or in two
                kept[-1].text += output.text
                continue
        else:
            data = output.data
            if WIDGET in data:
                continue
            if len(data) > 1:
                data.pop("text/plain", None)  # only says what kind of object it was
            words = output.metadata.get(PICTURE, {}).get("alt")  # where nbconvert reads it
            output.metadata = {PICTURE: {"alt": words}} if words else {}
            if PICTURE in data:
                data[PICTURE] = smaller(data[PICTURE])
            if "execution_count" in output:
                output.execution_count = number
            for kind, text in data.items():
                if kind.startswith("text/"):
                    data[kind] = _named(_without_root(text), f"{cell}-{len(kept)}")
        kept.append(output)
    return kept


def smaller(picture: str) -> str:
    """A picture (PNG in base64) in as many colours as a figure needs: about a third of the size.

    The colours are those that cover all of the picture's: by their frequency the few dots of a
    method would take the colour of another one's.
    """
    from PIL import Image

    shown = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    kept = io.BytesIO()
    few = shown.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(kept, "png", optimize=True)
    return base64.b64encode(kept.getvalue()).decode()


def _without_root(text: str) -> str:
    return text.replace(f"{paths.ROOT}/", "").replace(str(paths.ROOT), ".")


def _named(html: str, place: str) -> str:
    """Tables called by their place in the notebook instead of at random."""
    names = dict.fromkeys(_TABLE.findall(html))
    for number, name in enumerate(names):
        html = html.replace(name, f"T_{place}-{number}")
    return html


def faults(notebook: Any) -> list[str]:
    """What in stored outputs would not be the same elsewhere, or is too large: sentences."""
    found = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        if set(cell.metadata) - {"tags"}:
            found.append(f"cell {number} has metadata of a run: {', '.join(cell.metadata)}")
        for output in cell.outputs:
            if output.get("name") == "stderr" or WIDGET in output.get("data", {}):
                found.append(f"cell {number} stores a widget or what went to stderr")
            if len(output.get("data", {}).get(PICTURE, "")) * 3 // 4 > LARGEST_PICTURE:
                found.append(f"cell {number} has a picture of over {LARGEST_PICTURE:,} bytes")
            texts = [output.get("text", ""), *output.get("data", {}).values()]
            found += [
                f"cell {number} shows {name}"
                for name, pattern in _UNWANTED.items()
                if any(pattern.search(text) for text in texts)
            ]
    if "widgets" in notebook.metadata:
        found.append("its metadata holds the state of widgets")
    size = len(notebook_text(notebook).encode())
    if size > LARGEST:
        found.append(f"it has {size:,} bytes with its outputs, more than {LARGEST:,}")
    return found


class _Words(HTMLParser):
    """The text of an HTML output: a line for each cell of a table; no styles, no scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._hidden = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden = tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words += [line.strip() for line in data.splitlines() if line.strip()]


def words(cell: Any) -> Iterator[str]:
    """What a code cell's outputs say, line by line and table cell by table cell; a picture counts
    as the word ``image/png``."""
    for output in cell.outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if PICTURE in data:
            yield PICTURE
        elif "text/html" in data:
            parser = _Words()
            parser.feed(data["text/html"])
            yield from parser.words
        else:
            yield from data.get("text/plain", "").splitlines()


def agree(stored: str, new: str) -> bool:
    """Whether two lines say the same: words are equal, and a number with a fraction is the other
    one to one unit of its last digit. Whole numbers are counts, and equal."""
    if _NUMBER.split(stored) != _NUMBER.split(new):
        return False
    pairs = zip(_NUMBER.findall(stored), _NUMBER.findall(new), strict=True)
    return all(_same_number(*pair) for pair in pairs)


def _same_number(one: str, other: str) -> bool:
    if one == other:
        return True
    units = []
    for text in (one, other):
        digits, _, power = text.partition("e")
        if "." not in digits and not power:
            return False
        units.append(10.0 ** (int(power or 0) - len(digits.partition(".")[2])))
    first, second = (float(text.replace(",", "")) for text in (one, other))
    both_tiny = max(abs(first), abs(second)) < ROUNDING
    return both_tiny or abs(first - second) <= max(units) * (1 + 1e-9)


def differences(stored: Any, new: Any) -> list[str]:
    """Where two executed copies of a notebook say different things: sentences."""
    found = []
    for number, (old, ran) in enumerate(zip(stored.cells, new.cells, strict=True)):
        if old.cell_type != "code" or TRAINED in old.metadata.get("tags", []):
            continue
        for line, again in zip_longest(words(old), words(ran), fillvalue=""):
            if not agree(line, again):
                found.append(f"cell {number}: stored {line[:80]!r}, now {again[:80]!r}")
                break
    return found


def _stored(notebook: Notebook) -> Any:
    import nbformat

    return nbformat.read(notebook.path, as_version=4)


def has_outputs(notebook: Any) -> bool:
    """Whether a notebook (nbformat) was stored with the outputs of a run."""
    return any(cell.get("outputs") for cell in notebook.cells)


def check(notebook: Notebook) -> list[str]:
    """How a notebook's stored outputs differ from those of a run now: sentences; SageError where
    it cannot run or stores nothing."""
    stored = _stored(notebook)
    if not has_outputs(stored):
        raise SageError(f"notebook {notebook.name} stores no outputs: make notebooks")
    return differences(stored, executed(notebook))


def store(notebook: Notebook) -> bool:
    """Execute a notebook and write its outputs into it; True where the file changed."""
    text = notebook_text(executed(notebook))
    changed = notebook.path.read_text() != text
    if changed:
        write_text(notebook.path, text)
    return changed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What :func:`do` reads from a command line."""
    parser.add_argument("--only", nargs="+", metavar="NN", help="numbers of the notebooks")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare text and table cells with what is stored; write nothing",
    )


def do(options: argparse.Namespace) -> None:
    """Every chosen notebook, a line each; exit status 1 where one failed or says something else."""
    failed = False
    for notebook in reproduce.select(options.only):
        try:
            if options.check:
                found = check(notebook)
                state = "; ".join(found) or "as stored"
                failed |= bool(found)
            else:
                state = "changed" if store(notebook) else "as it was"
        except SageError as error:
            state, failed = f"failed: {error}", True
        size = _size(notebook.path)
        print(f"{notebook.name}: {size}, {state}", flush=True)
    if failed:
        sys.exit(1)


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1000:,.0f} kB"
