"""The page of the exploration report's figures and tables: what it names is there, and it names
all."""

import os
import re
from pathlib import Path

import pytest

from sage_lib.pipeline import notebooks
from sage_lib.report import report_items
from sage_lib.report.report_items import HERE, ITEMS, PART, REPORTED


def numbers(word):
    """Numbers of the items whose name begins so: "Tables 7-9" has three."""
    found = set()
    for one in ITEMS:
        match = re.fullmatch(rf"{word}s? (\d+)(?:-(\d+))?[a-d]?", one.item)
        if match:
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def test_every_named_artefact_is_made_by_its_notebook():
    made = {
        one.number: {
            name
            for part in (one.makes, *one.by_part.values())
            for name in (*part.figures, *part.measured)
        }
        for one in notebooks.found()
    }
    for one in ITEMS:
        for number, artefacts in one.made:
            assert artefacts and set(artefacts) <= made[number], one.item


def test_every_figure_and_table_is_there_once_and_says_why_it_is_not_all_here():
    assert numbers("Figure") == set(range(1, 9)) and numbers("Table") == set(range(1, 10))
    assert len({one.item for one in ITEMS}) == len(ITEMS)
    for one in ITEMS:
        assert one.state in (HERE, PART, REPORTED) and one.shows
        assert bool(one.made) == (one.state != REPORTED), one.item
        assert one.why or one.state == HERE, one.item
    assert list(report_items.page().columns) == report_items.COLUMNS
    assert len(report_items.page()) == len(ITEMS)


@pytest.mark.skipif("SAGE_PAPERS" not in os.environ, reason="SAGE_PAPERS is not set")
def test_the_reports_captions_are_those_of_the_page():
    [text] = [
        text
        for path in Path(os.environ["SAGE_PAPERS"]).glob("*.txt")
        if (text := path.read_text()).startswith("From Trial-and-Error")
    ]
    for word in ("Figure", "Table"):
        captions = {int(n) for n in re.findall(rf"^{word} (\d+):", text, flags=re.MULTILINE)}
        assert captions <= numbers(word) and len(captions) > 4
