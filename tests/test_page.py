"""The page of a notebook: what it saves and shows; the looks of methods, and files of figures."""

import base64
import re

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from nbclient import NotebookClient

from sage_lib.experiment.profile import load_profile
from sage_lib.experiment.results import load_results
from sage_lib.report import page as page_module
from sage_lib.report import style
from sage_lib.report.page import Page


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """What is displayed below the cell, in order."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    displayed = []
    monkeypatch.setattr(page_module, "_display", displayed.append)
    return displayed


@pytest.fixture
def page(shown):
    return Page(load_results("smoke", own=True))


@pytest.fixture(autouse=True)
def closed():
    with plt.rc_context():  # a page sets the style of the whole notebook
        yield
    plt.close("all")


FRAME = pd.DataFrame(
    {"method": ["base", "grpo"], "share": [0.12345, float("nan")], "n": [1, 2]}, index=[5, 5]
)


def test_a_kept_table_has_keys_in_its_file_and_labels_below_the_cell(tmp_path, shown, page):
    assert page.keep(FRAME, "table1") is None
    path = tmp_path / "measured" / "smoke" / "table1.csv"
    assert pd.read_csv(path).equals(FRAME.reset_index(drop=True))
    [html] = [one.to_html() for one in shown]
    assert "Base Model" in html and ">0.123<" in html and ">grpo<" not in html
    assert ">5<" not in html, "no row numbers"
    page.keep(FRAME, "table1", shown=FRAME.head(1))
    assert len(pd.read_csv(path)) == 2 and len(shown[1].data) == 1


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ({"share": [0.12345 * (1 + 3e-10), float("nan")]}, True),
        ({"share": [0.12345 * (1 + 1e-6), float("nan")]}, False),
        ({"share": [0.12345, 1e-30]}, False),
        ({"n": [1, 3]}, False),
        ({"n": [1, 200_000_000]}, False),
        ({"method": ["base", "NA"]}, False),
    ],
)
def test_a_kept_table_stays_where_only_rounding_differs(tmp_path, page, change, stays):
    path = tmp_path / "measured" / "smoke" / "table1.csv"
    page.keep(FRAME, "table1")
    before = path.read_text()
    changed = FRAME.assign(**change)
    page.keep(changed, "table1")
    assert (path.read_text() == before) is stays
    for broken in (before[: len(before) // 2], "", '"'):
        path.write_text(broken)
        page.keep(changed, "table1")
        assert path.read_text() == changed.to_csv(index=False, float_format="%.10g")


def test_a_count_of_many_and_a_number_near_zero_are_not_rounded(tmp_path, page):
    path = tmp_path / "measured" / "smoke" / "t.csv"
    for before, after in ((200_000_000, 200_000_001), (1e-30, 1e-14), ("None", "")):
        for one in (before, after):
            page.keep(pd.DataFrame({"a": [one], "b": ["x"]}), "t")
        assert path.read_text() == pd.DataFrame({"a": [after], "b": ["x"]}).to_csv(index=False)


def test_a_column_may_have_a_format_of_its_own_and_a_named_index_is_shown(shown, page):
    page.table(FRAME.set_index("method"), 1, share="{:.2%}", n="{:.0f} runs")
    html = shown[0].to_html()
    assert ">12.35%<" in html and ">2 runs<" in html
    assert ">Base Model</th>" in html and ">GRPO</th>" in html
    head, _, _ = html.partition("<tbody>")
    assert head.count("<tr>") == 1 and ">method</th>" in head, "one row of names"


def test_no_text_of_a_table_is_live_html(shown, page):
    """A label of a stranger's profile or data file is text in cells, in names of rows and columns,
    and in rows that are folded away."""
    live = "<img src=x onerror=alert(1)>"
    many = page_module.ROWS + 1
    frame = pd.DataFrame({"label": [live] * many, live: 1.0}, index=pd.Index([live] * many))
    for table in (frame, frame.rename_axis("name"), frame.rename_axis("a_b").astype(object)):
        page.table(table, label="{:s}")
        page.table(table)
    texts = [one if isinstance(one, str) else one.to_html() for one in shown]
    assert len(texts) == 12 and all(text.count("&lt;img src") >= 2 for text in texts)
    assert not any("<img" in text for text in texts)
    named = pd.DataFrame({"a": [1.0]}, index=pd.Index(["b"], name=live))
    page.table(named)
    assert "<img" not in shown[-1].to_html()


def test_a_column_without_any_value_is_left_out_of_the_display_alone(tmp_path, shown, page):
    frame = FRAME.assign(std=float("nan"))
    page.keep(frame, "table1", std="{:.1f}")
    html = shown[0].to_html()
    assert ">std<" not in html and "nan" not in html and ">share<" in html
    assert list(pd.read_csv(tmp_path / "measured" / "smoke" / "table1.csv")) == list(frame)
    page.table(frame.head(0))
    assert ">std<" in shown[-1].to_html(), "a table without rows keeps its head"


def test_rows_after_the_first_are_folded_away_and_none_is_lost(shown, page):
    frame = pd.DataFrame({"number": range(100, 100 + page_module.ROWS + 3)})
    page.table(frame)
    style_shown, folded = shown
    first, rest = (re.findall(r">(\d{3})<", text) for text in (style_shown.to_html(), folded))
    assert first + rest == [str(number) for number in frame["number"]] and len(rest) == 3
    assert folded.startswith("<details><summary>3 more rows<")
    page.table(frame, rows=len(frame))
    assert len(shown) == 3 and ">110<" in shown[-1].to_html(), "all of them"


@pytest.mark.parametrize("name", ["smoke", "theory"])
def test_a_figure_is_saved_closed_and_shown_once(tmp_path, shown, name):
    one = Page("theory", own=True) if name == "theory" else Page(load_results(name, own=True))
    figure, _ = plt.subplots()
    assert one.show(figure, "figure2") is None
    made = sorted(path.name for path in (tmp_path / "figures" / name).iterdir())
    assert made == ["figure2.pdf", "figure2.png"]
    assert shown == [figure] and not plt.fignum_exists(figure.number)
    one.show(plt.figure())
    assert len(list((tmp_path / "figures" / name).iterdir())) == 2, "without a name, not saved"


def test_the_folder_of_published_results_is_that_of_a_published_page(tmp_path, shown, monkeypatch):
    monkeypatch.setattr(page_module.paths, "FIGURES", tmp_path / "published")
    Page(load_results("smoke")).show(plt.figure(), "figure2")
    assert (tmp_path / "published" / "smoke" / "figure2.pdf").is_file()
    assert not (tmp_path / "figures").exists()


def test_the_same_figure_is_the_same_bytes(tmp_path):
    def drawn(folder, last):
        figure, axis = plt.subplots(figsize=(3, 2))
        axis.plot([1, 2, last], label="m", **style.look("grpo"))
        axis.fill_between([0, 1], 0, 1)
        style.describe(figure, "Title", "caption")
        return [path.read_bytes() for path in style.save_figure(figure, "f", tmp_path / folder)]

    first = drawn("a", 3)
    assert first == drawn("b", 3) and first[0][:4] == b"%PDF" and first[1][1:4] == b"PNG"
    assert all(one != other for one, other in zip(first, drawn("c", 4), strict=True))


def test_a_figure_says_in_words_what_it_shows():
    """Titles, caption and axes are the alt text of the picture; axes that are off have none."""
    figure, (left, right, off) = plt.subplots(1, 3)
    left.set(title="first", xlabel="k", ylabel="pass@k")
    right.set(xlabel="k", ylabel="pass@k")
    off.set(xlabel="never seen")
    off.axis("off")
    style.describe(figure, "Two  panels", "of 3 seeds", "")
    assert style.described(figure) == "Two panels; first; of 3 seeds; pass@k by k"


def test_a_figure_is_a_picture_with_words_whatever_the_backend(monkeypatch):
    """Where MPLBACKEND is set, Jupyter's own way of showing a figure leaves the picture out."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    code = """import matplotlib.pyplot as plt
from sage_lib.report.page import Page
figure, axes = plt.subplots()
axes.set(xlabel="k", ylabel="pass@k")
Page("theory", own=True).show(figure)"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    [cell] = NotebookClient(notebook, kernel_name="python3", startup_timeout=300).execute()["cells"]
    [output] = [one for one in cell["outputs"] if one["output_type"] != "stream"]
    assert base64.b64decode(output["data"]["image/png"]).startswith(b"\x89PNG")
    assert output["metadata"]["image/png"]["alt"] == "pass@k by k"


def test_methods_of_a_family_look_different_and_each_the_same_everywhere():
    methods = load_profile("study").methods
    for family in {method.family for method in methods.values()}:
        keys = ["base", "grpo", *(key for key, one in methods.items() if one.family == family)]
        looks = [style.look(key) for key in dict.fromkeys(keys)]
        seen = {(one["color"], one["marker"]) for one in looks}
        assert len(seen) == len(looks), family
    assert style.look("mine") == style.look("mine") != style.look("yours")
    taken = {style.look(key)["color"] for key in ("base", "grpo", "grpo_branch")}
    own = {style.look(f"mine{number}")["color"] for number in range(50)}
    assert not own & taken and len(own) == 6


def test_an_error_bar_never_has_a_negative_length_and_may_have_none():
    _, axis = plt.subplots()
    style.error_bar(axis, 0, 0.3, 0.3 + 1e-17, 0.2, **style.look("grpo"))
    style.error_bar(axis, 1, 0.3, np.nan, np.nan, horizontal=True, **style.look("grpo"))
    style.error_bar(axis, 2, 0.3, 0.1, 0.7, **style.look("grpo"))
    [bars] = axis.containers[2][2]
    assert bars.get_segments()[0][:, 1].tolist() == pytest.approx([0.1, 0.7])


@pytest.mark.parametrize(("shift", "bases"), [(0, 0), (0.25, 0), (0, 2)])
def test_no_row_of_a_forest_lies_on_the_frame(shift, bases):
    rows = pd.DataFrame({"method": ["a", "b"], "difference": 0.1, "low": 0.0, "high": 0.2})
    axis = plt.figure().add_subplot()
    style.forest(axis, rows, str.upper, shift, [rows] * bases)
    drawn = [y for line in axis.lines[:-1] for y in line.get_ydata()]  # the last is the line at 0
    low, high = axis.get_ylim()
    assert low + 0.2 < min(drawn) and max(drawn) < high - 0.2
    assert len({round(y, 2) for y in drawn}) == 2 * (1 + bases)
