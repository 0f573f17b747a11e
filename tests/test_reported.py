"""Reported numbers: recomputed averages, and, where the papers' text is at hand, every number found in it again."""

import os
import re
from pathlib import Path

import pytest

from sage_lib import reported
from sage_lib.errors import SageError
from sage_lib.paths import ROOT

PRINTED_AVERAGES = {"sage_table1": 3, "sage_table3": 3, "sage_table4": 3, "report_table4": 2, "report_table6": 2}
CELLS = {"sage_table1": 56, "sage_table2": 9, "sage_table3": 40, "sage_table4": 24, "sage_table5": 9, "sage_table6": 18, "sage_table9": 6,
         "report_table3": 34, "report_table4": 80, "report_table5": 12, "report_table6": 56}


def test_every_table_is_whole():
    assert {t: len(reported.load(t)) for t in reported.tables()} == CELLS


def test_printed_averages_that_do_not_match_their_row():
    found = {(t, r.row, r.metric) for t, d in PRINTED_AVERAGES.items() for r in reported.printed_average_mismatches(t, d).itertuples()}
    assert found == {("sage_table1", "GRPO w/o KL", "pass@1"), ("sage_table1", "GRPO + Token", "pass@256"),
                     ("sage_table1", "GRPO + Branch", "pass@1"), ("sage_table3", "DAPO (no KL)", "pass@1")}
    assert all(reported.printed_average_mismatches(t, d)["rounding_explains"].all() for t, d in PRINTED_AVERAGES.items())


@pytest.fixture
def copy(tmp_path, monkeypatch):
    text = (reported.REPORTED / "sage_table1.csv").read_text()
    monkeypatch.setattr(reported, "REPORTED", tmp_path)
    return text, tmp_path / "sage_table1.csv"


def test_a_mistyped_cell_shows_in_the_averages(copy):
    text, path = copy
    path.write_text(text.replace("GRPO + Branch,AMC23,pass@1,0.465", "GRPO + Branch,AMC23,pass@1,0.456"))
    worst = reported.printed_average_mismatches("sage_table1", 3)
    assert not worst[worst["row"] == "GRPO + Branch"]["rounding_explains"].all()


@pytest.mark.parametrize("damage", [lambda t: t.replace(",std", "", 1), lambda t: t + t.splitlines()[-1] + "\n", lambda t: t.replace("0.465", "high")])
def test_a_damaged_file_is_refused(copy, damage):
    text, path = copy
    path.write_text(damage(text))
    with pytest.raises(SageError, match="restore it"):
        reported.load("sage_table1")


def test_unknown_table():
    with pytest.raises(SageError, match="choose one of"):
        reported.load("table99")


def test_reported_and_measured_share_no_file():
    measured = {p.name for p in (ROOT / "data" / "measured").rglob("*")}
    assert not measured & {p.name for p in reported.REPORTED.glob("*.csv")}


@pytest.mark.skipif("SAGE_PAPERS" not in os.environ, reason="set SAGE_PAPERS to a folder with text copies of the papers to find every number in them again")
def test_each_row_stands_in_the_papers_text():
    text = "\n".join(p.read_text() for p in Path(os.environ["SAGE_PAPERS"]).glob("*.txt"))
    lines = [set(re.findall(r"\d+\.\d{1,3}", re.sub(r"(\d\.\d{3})(?=\d\.\d{3})", r"\1 ", line))) for line in text.splitlines()]
    for table in reported.tables():
        frame = reported.load(table).astype({"mean": str})
        numbers = frame.assign(mean=[f"{float(m):g}" for m in frame["mean"]])
        for row, group in numbers.groupby("row", sort=False):
            wanted = {float(m) for m in group["mean"]} | {float(s) for s in group["std"].dropna()}
            if table == "sage_table2":
                assert all(any(w in {float(x) for x in line} for line in lines) for w in wanted), (table, row)
            else:
                assert any(wanted <= {float(x) for x in line} for line in lines if line), (table, row)
