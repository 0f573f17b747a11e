"""Words and tables of what commands print; it imports nothing that takes time."""

from collections.abc import Iterable, Sequence


def count(number: int, word: str) -> str:
    """ "1 seed", "3 seeds": how many, for a title."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def visible(text: str) -> str:
    """Write control characters, which a terminal would obey, and half surrogates as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as left-aligned text, columns two spaces apart, numbers with 3 digits."""
    cells = [list(names)]
    cells += [
        [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers in rising order as ranges: "1-10, 12"; "none" of no numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts) or "none"
