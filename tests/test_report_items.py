"""The page of the exploration report's figures and tables: what it names is there, and it names
all."""

import os
import re
from pathlib import Path

import pytest

from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline import notebooks
from sage_lib.report import paper_items, report_items
from sage_lib.report.report_items import HERE, ITEMS, PART, REPORTED, SETTINGS, Item

both = pytest.mark.parametrize("items", [ITEMS, paper_items.ITEMS], ids=["report", "paper"])


def numbers(word, items=ITEMS):
    """Numbers of the items whose name begins so: "Tables 7-9" has three, "Tables 7, 8" two."""
    found = set()
    for one in items:
        match = re.fullmatch(rf"{word}s? (\d+)(?:(?:-|, )(\d+))?[a-d]?", one.item)
        if match:
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


@both
def test_every_named_artefact_is_made_by_its_notebook(items):
    made = {
        one.number: {
            name
            for part in (one.makes, *one.by_part.values())
            for name in (*part.figures, *part.measured)
        }
        for one in notebooks.found()
    }
    for one in items:
        for number, artefacts in one.made:
            assert artefacts and set(artefacts) <= made[number], one.item


@both
def test_every_figure_and_table_is_there_once_and_says_why_it_is_not_all_here(items):
    figures = 8 if items is ITEMS else 7
    assert numbers("Figure", items) == set(range(1, figures + 1))
    assert numbers("Table", items) == set(range(1, 10))
    assert len({one.item for one in items}) == len(items)
    for one in items:
        assert one.state in (HERE, PART, REPORTED, SETTINGS) and one.shows
        assert bool(one.made) == (one.state in (HERE, PART)), one.item
        assert one.why or one.state == HERE, one.item
    page = report_items.page(load_profile("countdown", "published"), items)
    assert list(page.columns) == report_items.COLUMNS and len(page) == len(items)


def test_an_item_is_measured_as_far_as_its_methods_are_evaluated(monkeypatch):
    profile = load_profile("countdown", "published")
    losses = {key for key, one in profile.methods.items() if one.family == "losses"}
    item = Item("Table 3", "x", HERE, families=("losses",))
    for there, state in {
        frozenset(losses): HERE,
        frozenset(list(losses)[:1]): f"{HERE}: 1 of {len(losses)} methods run",
        frozenset({"grpo"}): "not run yet",
    }.items():
        monkeypatch.setattr(report_items, "evaluated", lambda profile, there=there: there)
        assert item.state_of(profile) == state
    assert Item("Table 4", "x", REPORTED, families=()).state_of(profile) == REPORTED


def test_the_families_of_the_items_are_the_profiles():
    known = {method.family for method in load_profile("countdown").methods.values()}
    assert {name for one in (*ITEMS, *paper_items.ITEMS) for name in one.families} <= known


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
