"""The drawing of SAGE in the README, and the roadmap of the notebooks: figures/sage.svg and
figures/roadmap.svg.

    python tools/drawing.py
"""

from sage_lib import paths
from sage_lib.files import write_text

FONT = "font-family='Helvetica, Arial, sans-serif' text-anchor='middle' fill='#222'"
BLUE, ORANGE, GREY, GREEN = "#dbe9f6", "#fde0c5", "#eeeeee", "#d9f0d9"
#: The parts of the companion: numbers of notebooks, name, what is in it, colour.
PARTS = [
    ("01-03", "Theory", "exact, on small trees", GREY),
    ("04-07", "Walkthrough", "train it yourself", GREEN),
    ("08-13", "The paper", "tables, figures, verdict", BLUE),
    ("14-18", "Exploration report", "entropy, tokens, rivals", ORANGE),
    ("19-25", "Details", "second task, all guides", GREY),
]


def text(x: float, y: float, words: str, size: int = 14, bold: bool = False) -> str:
    weight = " font-weight='bold'" if bold else ""
    return f"<text x='{x}' y='{y}' font-size='{size}'{weight} {FONT}>{words}</text>"


def box(x: float, y: float, width: float, colour: str, title: str, below: str) -> str:
    """A rounded box of height 56 with a title and a line below it."""
    middle = x + width / 2
    frame = f"<rect x='{x}' y='{y}' width='{width}' height='56' rx='7' fill='{colour}' "
    frame += "stroke='#888'/>"
    return frame + text(middle, y + 24, title, 15, bold=True) + text(middle, y + 44, below, 12)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f"x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}'"
    return f"<line {ends} stroke='#444' stroke-width='1.6' marker-end='url(#head)'/>"


def svg(width: int, height: int, parts: list[str], title: str) -> str:
    head = "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
    head += (
        "markerHeight='7' orient='auto'><path d='M0,0 L8,4 L0,8 z' fill='#444'/></marker></defs>"
    )
    page = f"<rect width='{width}' height='{height}' fill='white'/>"
    opened = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img'>"
    return "\n".join([opened, f"<title>{title}</title>", head, page, *parts, "</svg>", ""])


def method() -> str:
    """GRPO with a guided anchor."""
    parts = [
        box(20, 20, 150, BLUE, "policy π", "draws 8 completions"),
        box(250, 20, 150, GREY, "reward", "1 if right, else 0"),
        box(500, 72, 180, BLUE, "GRPO update", "reward - β · KL(π ‖ q·π_ref)"),
        box(20, 130, 130, GREY, "reference π_ref", "the SFT model"),
        box(180, 130, 150, ORANGE, "guide q", "noise, surprisal, entropy"),
        box(360, 130, 100, GREEN, "anchor", "q·π_ref"),
        text(165, 164, "×", 20),
        text(345, 164, "=", 20),
        arrow(170, 48, 248, 48),
        arrow(400, 52, 498, 86),
        arrow(460, 150, 498, 118),
    ]
    return svg(700, 205, parts, "SAGE: the anchor of GRPO's KL term is the reference times a guide")


def roadmap() -> str:
    """The notebooks in five parts."""
    parts = []
    for place, (numbers, name, about, colour) in enumerate(PARTS):
        x = 10 + 178 * place
        parts += [box(x, 34, 160, colour, name, about), text(x + 80, 24, numbers, 13)]
        if place:
            parts.append(arrow(x - 17, 62, x - 2, 62))
    return svg(892, 104, parts, "The notebooks in five parts: start with the walkthrough")


if __name__ == "__main__":
    write_text(paths.ROOT / "figures" / "sage.svg", method())
    write_text(paths.ROOT / "figures" / "roadmap.svg", roadmap())
