"""The notebooks as they are committed: with the outputs of a run on the published results.

Stored outputs have no paths, times, progress bars or names of objects in memory. A check compares
their words, and their numbers to one unit of the last printed digit. It does not compare pictures,
in which another processor may round otherwise, nor the cells with the tag ``trained``.
"""

import argparse
import base64
import copy
import html
import io
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import zip_longest
from typing import Any

import nbformat

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.files import notebook_text, write_text
from sage_lib.pipeline import jobs, notebooks

WIDGET, PICTURE = "application/vnd.jupyter.widget-view+json", "image/png"
#: A notebook with its outputs is at most this large, and a picture of it, bytes.
LARGEST, LARGEST_PICTURE = 2_000_000, 400_000
_TABLE = re.compile(r"\bT_[0-9a-f]{5}(?=_|\b)")  # a table of pandas, named at random
_UNWANTED = {
    "a path of a machine": re.compile(r"(?<![\w./:-])/(?:home|root|tmp|Users|usr|opt|mnt)/"),
    "an object's address": re.compile(r"\bat 0x[0-9a-f]{6,}"),
    "a picture instead of its name": re.compile(r"<Figure size "),
    "a progress bar": re.compile(r"\d+%\|"),
}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def with_outputs(notebook: Any, ran: Any) -> Any:
    """Return a notebook (nbformat) with the clean outputs of its executed copy."""
    stored = copy.deepcopy(notebook)
    outputs = {cell["id"]: cell.outputs for cell in ran.cells if cell.cell_type == "code"}
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        cell.execution_count, cell.outputs = number, []
        for output in copy.deepcopy(outputs[cell["id"]]):
            if output.output_type == "stream":
                _add_text(cell, output)
            elif WIDGET not in output.data:
                _add_object(cell, output)
    return stored


def _add_text(cell: Any, output: Any) -> None:
    """Add printed text to a cell, but for what Unsloth prints of the machine."""
    output.text = re.sub(r"(?m)^Unsloth.*\n?", "", _without_root(output.text))
    if output.name != "stdout" or not output.text.strip():  # stderr: progress bars and warnings
        return
    if cell.outputs and cell.outputs[-1].output_type == "stream":  # printed in two pieces
        cell.outputs[-1].text += output.text
    else:
        cell.outputs.append(output)


def _add_object(cell: Any, output: Any) -> None:
    data = output.data
    if len(data) > 1:
        data.pop("text/plain", None)  # only says what kind of object it was
    words = output.metadata.get(PICTURE, {}).get("alt")
    output.metadata = {PICTURE: {"alt": words}} if words else {}
    if "execution_count" in output:
        output.execution_count = cell.execution_count
    if PICTURE in data:
        data[PICTURE] = smaller(data[PICTURE])
    for kind in [kind for kind in data if kind.startswith("text/")]:
        data[kind] = _without_root(data[kind])
        for place, name in enumerate(dict.fromkeys(_TABLE.findall(data[kind]))):
            stable = f"T_{cell['id']}-{len(cell.outputs)}-{place}"
            data[kind] = data[kind].replace(name, stable)
    cell.outputs.append(output)


def smaller(picture: str) -> str:
    """Reduce a picture (PNG in base64) to 128 colours, a third of the size. They cover all of the
    picture's: by their frequency, a few dots would take another method's colour."""
    from PIL import Image

    shown, reduced = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"), io.BytesIO()
    few = shown.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(reduced, "png", optimize=True)
    return base64.b64encode(reduced.getvalue()).decode()


def _without_root(text: str) -> str:
    return text.replace(f"{paths.ROOT}/", "").replace(str(paths.ROOT), ".")


def faults(notebook: Any) -> list[str]:
    """Return sentences on stored outputs that would differ elsewhere, or are too large."""
    sentences = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if len(data.get(PICTURE, "")) * 3 // 4 > LARGEST_PICTURE:
                sentences.append(f"cell {number} has a picture of over {LARGEST_PICTURE:,} bytes")
            text = "\n".join([output.get("text", ""), *data.values()])
            shown = [name for name, pattern in _UNWANTED.items() if pattern.search(text)]
            sentences += [f"cell {number} shows {name}" for name in shown]
    if (size := len(notebook_text(notebook).encode())) > LARGEST:
        sentences.append(f"it has {size:,} bytes with its outputs, more than {LARGEST:,}")
    return sentences


def words(cell: Any) -> Iterator[str]:
    """Yield a code cell's outputs, line by line and table cell by table cell; a picture counts as
    the word ``image/png``."""
    for output in cell.outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        text = PICTURE if PICTURE in data else data.get("text/plain", "")
        if "text/html" in data:
            bare = re.sub(r"(?s)<(style|script)\b.*?</\1>", "", data["text/html"])
            text = html.unescape(re.sub(r"<[^>]*>", "\n", bare))
        yield from (line.strip() for line in text.splitlines() if line.strip())


def agree(stored: str, new: str) -> bool:
    """Whether two lines say the same: words are equal, and a number with a fraction is the other
    one to one unit of its last digit. Whole numbers are counts, and equal."""
    if _NUMBER.split(stored) != _NUMBER.split(new):
        return False
    for pair in zip(_NUMBER.findall(stored), _NUMBER.findall(new), strict=True):
        left, right = (Decimal(text.replace(",", "")) for text in pair)
        unit = Decimal(10) ** max(int(number.as_tuple().exponent) for number in (left, right))
        fractions = all("." in text or "e" in text for text in pair)
        # Below 1e-9 both are rounding errors of float64: another processor has others.
        near = abs(left - right) <= unit or max(abs(left), abs(right)) < 1e-9
        if left != right and not (fractions and near):
            return False
    return True


def differences(stored: Any, new: Any) -> list[str]:
    """Return sentences on where two executed copies of a notebook say different things."""
    sentences = []
    for number, (old, ran) in enumerate(zip(stored.cells, new.cells, strict=True)):
        if old.cell_type == "code" and "trained" not in old.metadata.get("tags", []):
            lines = zip_longest(words(old), words(ran), fillvalue="")
            if wrong := next((pair for pair in lines if not agree(*pair)), None):
                sentences.append(f"cell {number}: stored {wrong[0][:80]!r}, now {wrong[1][:80]!r}")
    return sentences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="NN", help="numbers of the notebooks")
    about = "compare text and table cells with what is stored; write nothing"
    parser.add_argument("--check", action="store_true", help=about)


def run_notebooks(options: argparse.Namespace) -> None:
    """Execute the notebooks and print a line for each; raise SageError where one failed or says
    something else."""
    selected, folder = notebooks.select(options.only), paths.build("outputs")
    planned = notebooks.jobs_of(selected, folder, {})
    outcomes = jobs.run(planned, parallel=2)
    failed = False
    for book in [book for book in selected if outcomes[book.name].ok]:
        stored, ran = (nbformat.read(p, 4) for p in (book.path, folder / book.path.name))
        new = with_outputs(stored, ran)
        wrong = faults(new) + (differences(stored, new) if options.check else [])
        if not options.check and not wrong:
            write_text(book.path, notebook_text(new))
        print(f"{book.name}: {'; '.join(wrong) or ('as stored' if options.check else 'stored')}")
        failed |= bool(wrong)
    jobs.require(planned, outcomes)
    if failed:
        raise SageError("the notebooks say something else than what is stored, as shown above")
