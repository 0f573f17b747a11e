"""The page of a notebook: what it saves, and what it shows."""

import base64
import io
import re

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from sage_lib.experiment.profile import load_profile
from sage_lib.pipeline.notebooks import WIDE, with_words
from sage_lib.report import page as page_module
from sage_lib.report.page import Page, theory_page


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """What is displayed below the cell, in order."""
    monkeypatch.setenv("SAGE_RESULTS", str(tmp_path))
    displayed = []
    monkeypatch.setattr(page_module, "_display", displayed.append)
    return displayed


FRAME = pd.DataFrame(
    {"method": ["base", "grpo"], "share": [0.12345, float("nan")], "n": [1, 2]}, index=[5, 5]
)


def test_a_kept_table_has_keys_in_its_file_and_labels_below_the_cell(tmp_path, shown):
    assert Page(load_profile("smoke")).keep(FRAME, "table1") is None
    path = tmp_path / "measured" / "smoke" / "table1.csv"
    assert pd.read_csv(path).equals(FRAME.reset_index(drop=True))
    [style, _] = shown
    html = style.to_html()
    assert "Base Model" in html and ">0.123<" in html and ">grpo<" not in html
    assert ">5<" not in html, "no row numbers"


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ({"share": [0.12345 * (1 + 3e-10), float("nan")]}, True),
        ({"share": [0.12345 * (1 + 1e-6), float("nan")]}, False),
        ({"share": [0.12345, 1e-9]}, False),
        ({"share": [0.12345, 1e-30]}, False),
        ({"n": [1, 3]}, False),
        ({"n": [1, 200_000_000]}, False),
        ({"method": ["base", "NA"]}, False),
        ({"method": ["base", "grpo_no_kl"]}, False),
    ],
)
def test_a_kept_table_stays_where_only_rounding_differs(tmp_path, shown, change, stays):
    page = Page(load_profile("smoke"))
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


def test_a_count_of_many_and_a_number_near_zero_are_not_rounded(tmp_path, shown):
    page, path = Page(load_profile("smoke")), tmp_path / "measured" / "smoke" / "t.csv"
    for before, after in ((200_000_000, 200_000_001), (1e-30, 1e-14), ("None", "")):
        page.keep(pd.DataFrame({"a": [before], "b": ["x"]}), "t")
        page.keep(pd.DataFrame({"a": [after], "b": ["x"]}), "t")
        assert path.read_text() == pd.DataFrame({"a": [after], "b": ["x"]}).to_csv(index=False)
    page.keep(pd.DataFrame([]), "t")
    assert path.read_text() == "\n"


def test_a_layout_may_be_shown_instead_of_the_table_that_is_kept(tmp_path, shown):
    Page(load_profile("smoke")).keep(FRAME, "table1", shown=FRAME.head(1))
    kept = pd.read_csv(tmp_path / "measured" / "smoke" / "table1.csv")
    assert len(kept) == 2 and len(shown[0].data) == 1


def test_a_column_may_have_a_format_of_its_own_and_a_named_index_is_shown(shown):
    page = Page(load_profile("smoke"))
    page.table(FRAME.set_index("method"), 1, share="{:.2%}", n="{:.0f} runs")
    html = shown[0].to_html()
    assert ">12.35%<" in html and ">2 runs<" in html
    assert ">Base Model</th>" in html and ">GRPO</th>" in html
    head, _, _ = html.partition("<tbody>")
    assert head.count("<tr>") == 1 and ">method</th>" in head, "one row of names"


def test_a_column_is_displayed_by_words_and_kept_by_its_name(tmp_path, shown):
    frame = FRAME.assign(holds_for="these two checkpoints", dr_grpo=1.0)
    Page(load_profile("smoke")).keep(frame, "table1")
    html = shown[0].to_html()
    assert ">holds for</th>" in html and "holds_for" not in html and ">dr_grpo</th>" in html
    kept = pd.read_csv(tmp_path / "measured" / "smoke" / "table1.csv")
    assert list(kept) == list(frame)


def test_a_column_without_any_value_is_left_out_of_the_display_alone(tmp_path, shown):
    frame = FRAME.assign(std=float("nan"))
    Page(load_profile("smoke")).keep(frame, "table1", std="{:.1f}")
    html = shown[0].to_html()
    assert ">std<" not in html and "nan" not in html and ">share<" in html
    kept = pd.read_csv(tmp_path / "measured" / "smoke" / "table1.csv")
    assert list(kept) == [*FRAME, "std"]
    theory_page().table(frame.head(0))
    assert ">std<" in shown[-1].to_html(), "a table without rows keeps its head"


def test_a_table_may_have_two_rows_of_column_names(shown):
    columns = pd.MultiIndex.from_product([["both", "Avg"], ["pass@1"]], names=["set", "metric"])
    wide = pd.DataFrame([["a ± b", 0.5]], index=pd.Index(["grpo"], name="method"), columns=columns)
    Page(load_profile("smoke")).table(wide)
    assert ">GRPO</th>" in shown[0].to_html() and ">0.500<" in shown[0].to_html()


@pytest.mark.parametrize(
    ("page", "folder"),
    [(lambda: Page(load_profile("smoke")), "smoke"), (theory_page, "theory")],
)
def test_a_figure_is_saved_closed_and_shown_once(tmp_path, shown, page, folder):
    figure, _ = plt.subplots()
    assert page().show(figure, "figure2") is None
    made = sorted(path.name for path in (tmp_path / "figures" / folder).iterdir())
    assert made == [f"figure2.{ending}" for ending in ("json", "pdf", "png", "svg")]
    assert shown == [figure] and not plt.fignum_exists(figure.number)


def test_a_figure_without_a_name_is_shown_and_not_saved(tmp_path, shown):
    figure, _ = plt.subplots()
    Page(load_profile("smoke")).show(figure)
    assert shown == [figure] and not (tmp_path / "figures").exists()


def test_a_page_of_theory_shows_what_it_is_given(shown):
    theory_page().table(FRAME)
    assert ">grpo<" in shown[0].to_html()


def test_of_a_long_table_the_main_methods_are_displayed_and_all_other_rows_folded_away(shown):
    page = Page(load_profile("smoke"))
    keys = ["base", *page.profile.methods]
    methods = [key for _ in range(6) for key in keys]
    frame = pd.DataFrame({"method": methods, "number": range(100, 100 + len(methods))})
    page.table(frame)
    style, folded, _ = shown
    main = {"base", *page_module.main_methods(page.profile)}
    assert 0 < len(main) < len(keys)
    in_sight = re.findall(r">(\d{3})<", style.to_html())
    hidden = re.findall(r">(\d{3})<", folded)
    assert in_sight == [str(row.number) for row in frame.itertuples() if row.method in main]
    assert sorted(in_sight + hidden) == [str(number) for number in frame["number"]]
    assert folded.startswith(f"<details><summary>{len(hidden)} more rows, of other methods<")
    asked = frame["number"] == int(hidden[0])
    page.keep(frame, "long", first=asked)
    assert sorted(re.findall(r">(\d{3})<", shown[3].to_html())) == sorted([*in_sight, hidden[0]])
    page.keep(frame, "long", first=frame["number"] > 0)
    assert len(re.findall(r">\d{3}<", shown[6].to_html())) == len(frame)
    del shown[3:8]
    by_method = frame.set_index("method")
    page.table(by_method)
    assert re.findall(r">(\d{3})<", shown[3].to_html()) == in_sight
    page.table(frame[["number"]])
    assert len(re.findall(r">\d{3}<", shown[5].to_html())) == page_module.FIRST
    assert shown[6].startswith(f"<details><summary>{len(frame) - page_module.FIRST} more rows<")
    page.table(frame.head(page_module.LONG))
    assert not any("more rows" in one for one in shown[7:] if isinstance(one, str))


def test_below_a_table_stand_the_commands_that_make_its_rows(shown):
    page = Page(load_profile("smoke"))
    page.table(FRAME)
    text = shown[1]
    assert text.startswith("<details>") and page_module.AGAIN in text
    lines = page_module.commands(page.profile, FRAME)
    stage = "sage-companion stage"
    assert lines == [
        f"{stage} sft --profile smoke --run sft",
        f"{stage} evaluate --profile smoke --run eval-sft",
        f"{stage} rl --profile smoke --run grpo-s3407",
        f"{stage} evaluate --profile smoke --run eval-grpo-s3407",
    ]
    assert all(line in text for line in lines)
    page.table(FRAME[["share"]])
    theory_page().table(FRAME)
    assert not any(isinstance(one, str) for one in shown[2:]), "no methods, no commands"
    of_both = pd.DataFrame({"method": ["dapo_branch", "base"]})
    commands = page_module.commands(load_profile("smoke+seeds=[1, 2]"), of_both)
    assert commands[2] == f"{stage} rl --profile 'smoke+seeds=[1, 2]' --run dapo_branch-s1"
    assert len(commands) == 4, "dapo_branch is trained for two seeds and not evaluated at smoke"


def test_the_commands_of_a_difference_make_both_arms_on_every_base_that_it_is_over(shown):
    page = Page(load_profile("countdown", "published"))
    of_both = {"method": ["rft"], "against": ["base"], "first base": [0.1], "second base": [0.2]}
    page.table(pd.DataFrame(of_both))
    stage = "sage-companion stage"
    for profile, seed in (("countdown", 3407), ("countdown_rebased", 3410)):
        for words in (
            f"sft --profile {profile} --run sft",
            f"rl --profile {profile} --run rft-s{seed}",
        ):
            assert f"{stage} {words}\n" in shown[1]
    page.table(pd.DataFrame({key: of_both[key] for key in ("method", "against")}))
    assert "rft-s3407" in shown[3] and "countdown_rebased" not in shown[3]


def test_the_folder_of_published_results_is_that_of_a_published_page(tmp_path, shown, monkeypatch):
    monkeypatch.setattr(page_module.paths, "FIGURES", tmp_path / "published")
    figure, _ = plt.subplots()
    theory_page("published").show(figure, "figure2")
    assert (tmp_path / "published" / "theory" / "figure2.pdf").is_file()
    assert not (tmp_path / "figures").exists()


def test_a_figure_says_in_words_what_it_shows():
    """Its titles and axes are the alt text of the picture that a front end gets: the
    text of axes that are off, and empty ones, are none."""
    figure, (left, right, off) = plt.subplots(1, 3)
    figure.suptitle("Two  panels\nand a title")
    left.set(title="first", xlabel="k", ylabel="pass@k")
    right.set(xlabel="k", ylabel="pass@k")
    off.set(xlabel="never seen")
    off.axis("off")
    words = "Two panels and a title; first; pass@k by k"
    assert page_module.described(figure) == words
    plt.close(figure)


@pytest.mark.parametrize("backend", ["agg", None])
def test_a_figure_is_a_picture_with_words_whatever_the_backend(backend, monkeypatch):
    """Where MPLBACKEND is set, Jupyter's own way of showing a figure leaves the picture out."""
    if backend:
        monkeypatch.setenv("MPLBACKEND", backend)
    else:
        monkeypatch.delenv("MPLBACKEND", raising=False)
    code = """import matplotlib.pyplot as plt
from sage_lib.report.page import theory_page
figure, axes = plt.subplots()
axes.set(xlabel="k", ylabel="pass@k")
theory_page().show(figure)"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    [cell] = NotebookClient(notebook, kernel_name="python3").execute()["cells"]
    [output] = [one for one in cell["outputs"] if one["output_type"] != "stream"]
    assert base64.b64decode(output["data"]["image/png"]).startswith(b"\x89PNG")
    assert output["metadata"]["image/png"]["alt"] == "pass@k by k"
    [shown] = with_words({"cells": [{"outputs": [output]}]})["cells"][0]["outputs"]
    assert (
        list(shown["data"]) == ["text/html"] and 'alt="pass@k by k"' in shown["data"]["text/html"]
    )


@pytest.mark.parametrize("width", [640, 1400])
def test_a_picture_too_wide_for_a_phone_has_its_words_below_it(width):
    figure = plt.figure(figsize=(width / 100, 1), dpi=100)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    plt.close(figure)
    picture = base64.b64encode(drawn.getvalue()).decode()
    output = {
        "data": {"image/png": picture},
        "metadata": {"image/png": {"alt": 'a "title" & more'}},
    }
    [shown] = with_words({"cells": [{"outputs": [output]}]})["cells"][0]["outputs"]
    element, text = shown["data"]["text/html"], "a &quot;title&quot; &amp; more"
    assert f'<img alt="{text}" src="data:image/png;base64,{picture}">' in element
    assert (f"hidden>{text}</figcaption>" in element) == (width > WIDE)


def test_words_without_their_picture_are_left_as_they_are():
    """A notebook that was run elsewhere, where Matplotlib was told to draw no pictures."""
    output = {"data": {"text/plain": "<Figure>"}, "metadata": {"image/png": {"alt": "words"}}}
    shown = with_words({"cells": [{"outputs": [output]}]})
    assert shown["cells"][0]["outputs"] == [output]
