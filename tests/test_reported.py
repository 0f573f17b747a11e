"""Numbers of the papers: averages and shares recomputed from the printed digits, and lines that
contradict no other."""

import os
import re
import shutil
from fractions import Fraction
from pathlib import Path

import nbformat
import pytest
from test_profile import stated_values

from sage_lib import paths
from sage_lib.errors import SageError
from sage_lib.experiment.profile import load_profile
from sage_lib.report import reported

CELLS = {
    "sage_table1": 56,
    "sage_table2": 9,
    "sage_table3": 40,
    "sage_table4": 24,
    "sage_table5": 9,
    "sage_table6": 18,
    "sage_table9": 6,
    "report_table3": 34,
    "report_table4": 80,
    "report_table5": 12,
    "report_table6": 56,
}
#: Printed averages that are not the rounded mean of their row as printed (data/reported/README.md).
AVERAGED_BEFORE_ROUNDING = {
    ("sage_table1", "GRPO w/o KL", "pass@1"),
    ("sage_table1", "GRPO + Token", "pass@256"),
    ("sage_table1", "GRPO + Branch", "pass@1"),
    ("sage_table3", "DAPO (no KL)", "pass@1"),
}


def printed(table):
    """{(row, dataset, metric): mean as text}"""
    lines = reported.as_printed(table).itertuples(index=False)
    return {tuple(line[1:4]): line[4] for line in lines}


def half_unit(text):
    """0.950 stands for anything within 1/2000 of it."""
    return Fraction(1, 2 * 10 ** len(text.partition(".")[2]))


def mean(numbers):
    return sum(numbers, Fraction(0)) / len(numbers)


def averages(table):
    """(row, metric, printed average, the cells that it averages); one of pass@k has all of them."""
    cells = printed(table)
    for (row, dataset, metric), average in cells.items():
        if dataset == "Avg":
            parts = [
                text
                for (r, d, m), text in cells.items()
                if r == row and d != "Avg" and metric in (m, "pass@k")
            ]
            yield row, metric, average, parts


def mismatches(table):
    """Averages further from the mean of their row than rounding of the cells explains."""
    return {
        (row, metric)
        for row, metric, average, parts in averages(table)
        if abs(Fraction(average) - mean(list(map(Fraction, parts))))
        > half_unit(average) + mean(list(map(half_unit, parts)))
    }


def test_every_table_is_whole():
    assert {table: len(reported.read_table(table)) for table in reported.tables()} == CELLS
    frame = reported.read_table("sage_table1").set_index(["row", "dataset", "metric"])
    cell = frame.loc[("GRPO + Branch", "AMC23", "pass@1")]
    assert cell[["mean", "std"]].tolist() == [0.465, 0.063]
    assert (frame["std"].isna() == (frame.index.get_level_values("dataset") == "Avg")).all()


def test_every_item_names_the_notebooks_that_show_it_or_says_why_none_does():
    items = reported.items().set_index(["paper", "item"])
    notebooks = {path.name[:2] for path in (paths.ROOT / "notebooks").glob("*.ipynb")}
    shown = items["notebooks"].str.split()
    assert len(items) == 45 and set(shown.sum()) <= notebooks
    told = ("measured here", "measured in part", "not testable here")
    assert (shown.map(len) > 0).eq(items["state"].isin(told)).all()
    assert set(items["state"]) == {*told, "reported only", "set in the profiles"}
    assert items["why"].ne("").all(), "also of what is measured: on which task, by which model"


def places():
    """Every place in items.csv: (paper, item, the kind or the notebook's number, what is there)."""
    for row in reported.items().itertuples():
        for place in filter(None, row.place.split("; ")):
            yield row.paper, row.item, *place.split(" ", 1)


def shows(cells, place):
    """A cell that draws or prints has an output; what another computes, one of the next two has."""
    displays = re.search(r"page\.|print\(", cells[place].source)
    return any(cell.outputs for cell in cells[place : place + (1 if displays else 3)])


@pytest.mark.parametrize(("paper", "item", "kind", "rest"), list(places()))
def test_each_place_of_an_item_shows_the_item(paper, item, kind, rest):
    """The text stands in a code cell of the notebook that shows something, or in the file."""
    if kind == "profile":
        name, text = rest.split(" ", 1)
        profile = load_profile(name)
        parts = [(paths.PROFILES / f"{name}.yaml").read_text(), *profile.methods]
        assert any(text in part for part in parts)
    elif kind == "file":
        name, text = rest.split(" ", 1)
        assert text in (paths.ROOT / name).read_text()
    else:
        [path] = paths.NOTEBOOKS.glob(f"{kind}_*.ipynb")
        cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
        there = [place for place, cell in enumerate(cells) if rest in cell.source]
        assert there, f"{paper}, {item}: no cell of {path.name} has {rest}"
        assert any(shows(cells, place) for place in there), f"{item}: {rest} shows nothing"


@pytest.mark.parametrize("fault", ["another name", "no output"])
def test_an_item_that_is_not_shown_is_noticed(tmp_path, monkeypatch, fault):
    """Two planted faults in Figure 5's cell."""
    [path] = paths.NOTEBOOKS.glob("02_*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    [cell] = [c for c in notebook.cells if '"figure5"' in c.source]
    if fault == "no output":
        cell.outputs = []
    else:
        cell.source = cell.source.replace("figure5", "modes")
    nbformat.write(notebook, tmp_path / path.name)
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path)
    with pytest.raises(AssertionError, match="figure5"):
        test_each_place_of_an_item_shows_the_item("SAGE", "Figure 5", "02", '"figure5"')


def test_the_notebooks_of_an_item_are_those_of_its_places():
    for row in reported.items().itertuples():
        numbers = {place[:2] for place in row.place.split("; ") if place[:2].isdecimal()}
        assert numbers == set(row.notebooks.split()), row.item


def test_the_rows_of_a_printed_table_that_is_measured_have_a_method_here():
    """Table 5's three rows, and Table 3's but for what items.csv says is not trained."""
    labels = {"Base Model", *(m.label for m in load_profile("study").methods.values())}
    for table in ("sage_table1", "sage_table3", "sage_table5"):
        assert set(reported.read_table(table)["row"]) <= labels, table


def test_every_notebook_of_an_item_has_a_place_for_it():
    """Its text names the figure or the table: "Figure 3", "Figures 3b, 3c and 4a"."""
    for item in reported.items().itertuples():
        kind, number = item.item.split(" ", 1)
        for start in item.notebooks.split():
            [path] = (paths.ROOT / "notebooks").glob(f"{start}_*.ipynb")
            cells = nbformat.read(path, as_version=4).cells
            text = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
            place = rf"\b{kind.removesuffix('s')}s?\b[\w\s,]*\b{re.escape(number)}\b"
            assert re.search(place, text), f"{path.name} says nothing of {item.item}"


def test_rounding_explains_every_average():
    assert all(mismatches(table) == set() for table in CELLS)
    found = {
        (table, row, metric)
        for table in CELLS
        for row, metric, average, parts in averages(table)
        if abs(Fraction(average) - mean(list(map(Fraction, parts)))) > half_unit(average)
    }
    assert found == AVERAGED_BEFORE_ROUNDING


def counts(share, total):
    """The whole numbers n for which n / total prints as a share with three decimals."""
    half, share = Fraction(1, 2000), Fraction(share)
    return [n for n in range(total + 1) if abs(Fraction(n, total) - share) <= half]


@pytest.mark.parametrize(
    ("table", "seeds"),
    [("sage_table1", 5), ("sage_table3", 5), ("sage_table4", 5), ("sage_table6", 3)],
)
def test_printed_shares_are_counts_of_problems_over_the_seeds(table, seeds):
    problems = {"AIME": 60, "AMC23": 40, "MATH-500": 134}
    exact = {}
    for (row, dataset, metric), share in printed(table).items():
        if dataset == "Avg":
            assert abs(mean(exact[row, metric]) - Fraction(share)) <= Fraction(1, 2000)
        else:
            [n] = counts(share, seeds * problems[dataset])
            exact.setdefault((row, metric), []).append(Fraction(n, seeds * problems[dataset]))


def test_a_mistyped_cell_shows_in_its_average(tmp_path, monkeypatch):
    shutil.copytree(reported.REPORTED, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(reported, "REPORTED", tmp_path)
    path, cell = tmp_path / "sage_table1.csv", "Branch,AMC23,pass@1,0.4"
    text = path.read_text()
    assert text.count(f"{cell}65") == 1
    path.write_text(text.replace(f"{cell}65", f"{cell}56"))
    assert mismatches("sage_table1") == {("GRPO + Branch", "pass@1")}


@pytest.mark.parametrize("table", CELLS)
def test_the_lines_of_a_table_are_filled_and_differ(table):
    """Papers print plain decimals: nothing negative, no nan."""
    frame, number = reported.as_printed(table), r"[0-9]+(?:\.[0-9]+)?"
    labels = frame[["row", "dataset", "metric"]]
    assert list(frame) == ["table", *labels, "mean", "std"] and set(frame["table"]) == {table}
    assert labels.ne("").all(axis=None) and not labels.duplicated().any()
    assert frame["mean"].str.fullmatch(number).all()
    assert frame["std"].str.fullmatch(f"|{number}").all()


@pytest.mark.parametrize("name", ["table99", "../reported/sage_table1", "fidelity", ""])
def test_an_unknown_table_names_the_known_ones(name):
    with pytest.raises(SageError, match=r"report_table3.*sage_table9"):
        reported.read_table(name)


#: First word of `why` in fidelity.csv -> the sources that must say something: those followed.
FOLLOWED = {
    "both": ("paper", "code"),
    "paper": ("paper",),
    "code": ("code",),
    "neither": (),  # another value than the sources have
    "restored": ("paper",),  # a formula that the text copy of the paper lost
    "chosen": (),  # neither source says
}


def test_no_line_of_the_fidelity_table_contradicts_itself_or_another():
    frame = reported.fidelity()
    assert list(frame) == ["setting", "paper", "code", "here", "why"]
    assert frame.ne("").all(axis=None) and not frame["setting"].duplicated().any()
    word, silent = frame["why"].str.split(":").str[0], frame[["paper", "code"]].eq("nothing")
    assert set(word) == {*FOLLOWED}
    assert (silent["code"] | frame["code"].str.contains(r"\w+\.(?:py|yaml|txt)\b")).all()
    assert (word.eq("chosen") == silent.all(axis=1)).all()
    for source in ("paper", "code"):
        follows = word.isin([one for one, sources in FOLLOWED.items() if source in sources])
        assert not (follows & silent[source]).any()
    keys = [key for here in frame["here"] for key in stated_values(here)]
    assert len(set(keys)) == len(keys) > 50


def test_the_authors_reward_overlooks_a_number_tight_between_the_markers():
    """What the table says of Math-Verify, asked as the authors' rewards.py asks it."""
    math_verify = pytest.importorskip("math_verify")

    def reward(text, gold):
        return int(math_verify.verify(math_verify.parse(gold), math_verify.parse(text)))

    tight = "We get 3. Then 4.<end_working_out><SOLUTION>9</SOLUTION>"
    assert [reward(tight, gold) for gold in ("9", "4")] == [0, 1]
    assert reward(tight.replace("9", " 9 "), "9") == 1


@pytest.mark.skipif("SAGE_PAPERS" not in os.environ, reason="SAGE_PAPERS names no folder of texts")
def test_every_quotation_of_the_fidelity_table_is_in_the_papers_text():
    texts = [path.read_text() for path in Path(os.environ["SAGE_PAPERS"]).glob("*.txt")]
    paper = " ".join(" ".join(texts).split())
    quoted = [q for cell in reported.fidelity()["paper"] for q in re.findall(r'"([^"]+)"', cell)]
    assert len(quoted) > 50 and [q for q in quoted if q not in paper] == []
