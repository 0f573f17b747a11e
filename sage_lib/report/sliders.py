"""Figures that a reader moves, without a kernel: every position is drawn beforehand.

The same HTML works below a cell of JupyterLab and on a page; where scripts do not run, it shows the
frame that it starts with.
"""

import hashlib
import html
import io
import json
import re
from collections.abc import Collection, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
#: Beyond two decimals of a point nothing is seen.
_DIGITS = re.compile(r"(\.\d\d)\d+")
_SPACE = re.compile(r"\s+")
_PAGE = """\
<div class="sage-slider" id="{name}">
<style>
.sage-slider {{max-width: 36rem}}
.sage-slider .picture {{background: white; color: black; border-radius: 4px; padding: 4px}}
.sage-slider .picture svg {{display: block; width: 100%; height: auto}}
.sage-slider .where {{display: flex; gap: 0.7em; align-items: center; margin: 0.5em 0}}
.sage-slider .where input {{flex: 1; min-width: 6em}}
.sage-slider output {{min-width: 4.5em; font-variant-numeric: tabular-nums}}
.sage-slider .which {{display: flex; flex-wrap: wrap; gap: 0.1em 1em; font-size: 0.85em}}
.sage-slider .swatch {{display: inline-block; width: 1em; text-align: center; margin: 0 0.3em}}
</style>
<div class="picture" role="img" aria-label="{alt}">{first}</div>
<label class="where"><span>{label}</span>
<input type="range" min="0" max="{last}" step="1" value="{start}">
<output>{position}</output></label>
<div class="which">{choices}</div>
<script type="application/json">{frames}</script>
<script>
(() => {{
  const root = document.getElementById("{name}"), find = (what) => root.querySelector(what);
  const [positions, pictures] = JSON.parse(find("script[type='application/json']").textContent);
  const range = find("input[type=range]"), boxes = root.querySelectorAll("input[type=checkbox]");
  const draw = () => {{
    find(".picture").innerHTML = pictures[range.value];
    find("output").textContent = positions[range.value];
    range.setAttribute("aria-valuetext", positions[range.value]);
    boxes.forEach((box) => find(".picture").querySelectorAll(`[id="${{box.value}}"]`).forEach(
      (part) => {{ part.style.display = box.checked ? "" : "none"; }}));
  }};
  range.addEventListener("input", draw);
  boxes.forEach((box) => box.addEventListener("change", draw));
  draw();
}})();
</script>
</div>
"""
_TEXT = """\
<div class="sage-slider" id="{name}">
<style>
.sage-slider .texts {{background: white; color: black; border-radius: 4px; padding: 4px 8px}}
.sage-slider .texts p {{line-height: 1.9; margin: 0.3em 0}}
.sage-slider .texts span {{padding: 1px 2px; margin: 1px; font-family: monospace}}
.sage-slider .texts .marked {{outline: 2px solid black}}
.sage-slider .where {{display: flex; gap: 0.7em; align-items: center; margin: 0.5em 0}}
.sage-slider .where input {{flex: 1; min-width: 6em}}
.sage-slider .numbers {{min-height: 3em; font-variant-numeric: tabular-nums}}
</style>
<div class="texts">{lines}</div>
<label class="where"><span>{label}</span>
<input type="range" min="0" max="{last}" step="1" value="{start}"></label>
<div class="numbers"><output>{first}</output></div>
<script>
(() => {{
  const root = document.getElementById("{name}"), find = (what) => root.querySelector(what);
  const range = find("input[type=range]"), parts = root.querySelectorAll(".texts span");
  const draw = () => {{
    parts.forEach((one) => one.classList.toggle("marked", one.dataset.place === range.value));
    const numbers = find(`.texts span[data-place="${{range.value}}"]`).title;
    find("output").textContent = numbers;
    range.setAttribute("aria-valuetext", numbers);
  }};
  const point = (event) => {{
    if (event.target.dataset.place) {{ range.value = event.target.dataset.place; draw(); }}
  }};
  range.addEventListener("input", draw);
  ["pointerover", "click"].forEach((kind) => find(".texts").addEventListener(kind, point));
  draw();
}})();
</script>
</div>
"""
_CHOICE = """\
<label><input type="checkbox" value="{value}"{checked}>\
<span class="swatch" style="color: {colour}">{mark}</span>{label}</label>"""


def svg(figure: Figure) -> str:
    """A figure as a small SVG element whose text is text: the same figure is the same string."""
    drawn = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sage"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    text = _METADATA.sub("", text[text.index("<svg") :])
    # Its style is meant for a file of its own, where no page stands around it.
    text = text.replace("*{stroke-linejoin", ".sage-slider svg *{stroke-linejoin")
    return _SPACE.sub(" ", _TAG.sub(_short, text)).strip()


def _short(tag: re.Match[str]) -> str:
    """An element's tag with short numbers, and quotes that JSON need not escape."""
    text = _DIGITS.sub(r"\1", tag[0])
    return text if "'" in text else text.replace('"', "'")


def slider(
    figures: Mapping[str, Figure],
    label: str,
    start: int = 0,
    choices: Mapping[str, tuple[str, str, str]] | None = None,
    ticked: Collection[str] | None = None,
) -> str:
    """HTML with one figure at a time, and a slider over them.

    ``figures``: position, as it is to be read -> figure; ``label``: what the slider moves;
    ``start``: number of the frame that is shown first. ``choices``: the gid of artists of the
    figures -> label, colour and mark of a box that shows or hides them; ``ticked``: those of many
    that are shown at first (None: all).
    """
    pictures = [svg(figure) for figure in figures.values()]
    positions = list(figures)
    boxes = [
        _CHOICE.format(
            value=html.escape(gid),
            label=html.escape(name),
            colour=colour,
            mark=mark,
            checked=" checked" if ticked is None or gid in ticked else "",
        )
        for gid, (name, colour, mark) in (choices or {}).items()
    ]
    # No "</script>" may end the data.
    frames = json.dumps([positions, pictures], ensure_ascii=False).replace("</", "<\\/")
    return _PAGE.format(
        name=_name(label + frames),
        alt=html.escape(f"figure that follows the slider below it: {label}"),
        label=html.escape(label),
        first=pictures[start],
        last=len(pictures) - 1,
        start=start,
        position=html.escape(positions[start]),
        choices="\n".join(boxes),
        frames=frames,
    )


def text(
    lines: Mapping[str, Sequence[tuple[str, str]]],
    numbers: Sequence[str],
    label: str,
    start: int = 0,
) -> str:
    """HTML with the same words in several lines, and a slider over the words.

    ``lines``: name -> word and colour of its background (as CSS has it), of every word;
    ``numbers``: what is to be read of each word, where the slider stands on it or a pointer;
    ``label``: what the slider moves; ``start``: number of the word that is marked first.
    """
    shown = "\n".join(
        f"<p><b>{html.escape(name)}</b>: "
        + " ".join(
            f'<span data-place="{place}" title="{html.escape(read)}" '
            f'style="background: {colour}">{html.escape(word)}</span>'
            for place, ((word, colour), read) in enumerate(zip(words, numbers, strict=True))
        )
        + "</p>"
        for name, words in lines.items()
    )
    return _TEXT.format(
        name=_name(label + shown),
        lines=shown,
        label=html.escape(label),
        last=len(numbers) - 1,
        start=start,
        first=html.escape(numbers[start]),
    )


def _name(made: str) -> str:
    """An element's id that follows from what it holds."""
    return f"slider-{hashlib.sha256(made.encode()).hexdigest()[:12]}"
