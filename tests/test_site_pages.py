"""The site's parts that need no builder: sliders, the equation map, pages of what there is."""

import ast
import json
import re

import matplotlib.pyplot as plt
import pytest

from sage_lib import paths
from sage_lib.experiment.profile import load_profile, published_specs
from sage_lib.pipeline import notebooks, site
from sage_lib.report import (
    equations,
    paper_items,
    report_items,
    reported,
    site_pages,
    sliders,
)
from sage_lib.report.equations import REPORT, SAGE, Equation

# --- sliders --------------------------------------------------------------------------------------


def figure(height, name="bar"):
    drawn, axis = plt.subplots()
    axis.plot([0, height], gid=name)
    plt.close(drawn)
    return drawn


def test_a_slider_holds_every_frame_and_shows_the_one_it_starts_with():
    drawn = {"1": figure(1), "</script>": figure(2)}
    page = sliders.slider(drawn, "k & more", start=1, choices={"bar": ("a <bar>", "#0173b2", "■")})
    assert page == sliders.slider(
        {"1": figure(1), "</script>": figure(2)},
        "k & more",
        1,
        {"bar": ("a <bar>", "#0173b2", "■")},
    )
    data = re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    positions, pictures = json.loads(data)
    assert positions == ["1", "</script>"] and len(pictures) == 2
    assert pictures[0] != pictures[1] and all(one.count("<svg") == 1 for one in pictures)
    assert "id='bar'" in pictures[0]
    assert f'below it: k &amp; more">{pictures[1]}</div>' in page
    assert 'style="color: #0173b2">■</span>a &lt;bar&gt;</label>' in page and 'max="1"' in page
    assert "http" not in page.replace("http://www.w3.org/", "")


def test_a_frames_text_is_text_and_its_style_stays_inside():
    picture = sliders.svg(figure(1))
    assert "<text" in picture and "metadata" not in picture
    assert re.search(r"[^ ] ?\*\{", picture) is None or ".sage-slider svg *{" in picture
    assert not re.search(r"\.\d{3,}", picture)


def test_of_many_choices_a_few_are_shown_at_first():
    figure, _ = plt.subplots()
    choices = {key: (key, "#0173b2", "●") for key in ("one", "two")}
    page = sliders.slider({"1": figure}, "k", choices=choices, ticked=["two"])
    assert 'value="one">' in page and 'value="two" checked>' in page
    assert sliders.slider({"1": figure}, "k", choices=choices).count(" checked>") == 2
    plt.close("all")


def test_words_in_lines_have_their_numbers_and_one_is_marked_by_a_slider():
    lines = {"a": [("x", "red"), ("<y>", "none")], "b": [("x", "blue"), ("<y>", "none")]}
    page = sliders.text(lines, ['1 "of" 2', "2 of 2"], "word & place", start=1)
    assert page.count('<span data-place="1"') == 2 and page.count("&lt;y&gt;") == 2
    assert 'title="1 &quot;of&quot; 2" style="background: blue">x</span>' in page
    assert 'max="1" step="1" value="1"' in page and "<output>2 of 2</output>" in page
    assert "word &amp; place" in page and page == sliders.text(
        lines, ['1 "of" 2', "2 of 2"], "word & place", start=1
    )
    assert page != sliders.text(lines, ["1", "2"], "word & place", start=1)


# --- the equation map -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("Eq. 4: pi.", {(SAGE, 4)}),
        ("q (eq. 9-12) of", {(SAGE, n) for n in (9, 10, 11, 12)}),
        ("eq. 2, 4 and 27, and where", {(SAGE, 2), (SAGE, 4), (SAGE, 27)}),
        ("eq. 11, 1 + 0.3 of it", {(SAGE, 11)}),
        ("Source: Chen et al. 2021; exploration\n    report, eq. 2.", {(REPORT, 2)}),
        ("G_t of the exploration report (eq. 4, 14).\n\nEq. 39 here.",
         {(REPORT, 4), (REPORT, 14), (SAGE, 39)}),
        ("it is equal to 4", set()),
    ],
)  # fmt: skip
def test_what_a_docstring_names(docstring, found):
    assert equations.equations(docstring) == {Equation(*one) for one in found}


def test_every_function_of_the_map_exists_and_every_test_too():
    known = equations.equation_map()
    assert {Equation(SAGE, n) for n in (2, 4, 7, 8, 9, 10, 11, 12, 13, 24, 38, 39)} <= set(known)
    for places in known.values():
        for place in places:
            path = paths.ROOT.joinpath(*place.module.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            node = ast.parse(path.read_text())
            for part in place.name.split(".") if place.name else ():
                [node] = [n for n in ast.iter_child_nodes(node) if getattr(n, "name", "") == part]
            for test in place.tests:
                file, _, name = test.partition("::")
                assert f"def {name}(" in (paths.ROOT / file).read_text()


def test_the_method_itself_is_tested_by_name():
    """Every equation that the rooms of the method and of its theory hold has a test."""
    for equation, places in equations.equation_map().items():
        ours = [p for p in places if p.module.split(".")[1] in ("algorithm", "theory") and p.name]
        assert not ours or any(place.tests for place in ours), equation


def test_a_new_function_and_its_test_come_into_the_map(tmp_path):
    library, tests = tmp_path / "sage_lib", tmp_path / "tests"
    library.mkdir()
    tests.mkdir()
    (library / "new.py").write_text('def made():\n    """Eq. 4."""\n')
    (tests / "test_new.py").write_text(
        "from sage_lib import new\n\ndef test_it():\n    new.made()\n\ndef test_other():\n    1\n"
    )
    [place] = equations.equation_map(library, tests)[Equation(SAGE, 4)]
    assert place.qualified == "sage_lib.new.made"
    assert place.tests == ("tests/test_new.py::test_it",)


# --- pages ----------------------------------------------------------------------------------------


def profiles():
    return [load_profile(spec, "published") for spec in published_specs().values()]


def reported_page():
    found = profiles()
    [evidence] = [profile for profile in found if profile.name == "countdown"]
    names = {notebook.number: notebook.name for notebook in notebooks.found()}
    return site_pages.reported_tables(found, evidence, names)


def test_every_reported_number_is_on_its_page_with_its_decimals():
    page = reported_page()
    for table in reported.tables():
        lines = (paths.REPORTED / f"{table}.csv").read_text().splitlines()
        assert f"## {site_pages.title(table)}\n" in page and lines
    assert ">0.950 ± 0.018</td>" in page  # Table 1, base model, AMC23, pass@256


def test_a_table_is_measured_where_a_published_run_has_its_rows():
    known = {profile.name: profile for profile in profiles()}
    of_table = site_pages.measured_rows("sage_table1", known.values())
    assert "GRPO + Branch" in of_table["countdown"]
    assert site_pages.measured_rows("sage_table1", []) == {}
    assert site_pages.measured_rows("sage_table6", known.values()) == {}


def test_every_item_of_both_papers_is_on_the_page_with_its_state():
    page = reported_page()
    rows = dict(
        re.findall(r"<tr><td>(?:<a[^>]*>)?([^<]+)(?:</a>)?</td><td>[^<]*</td><td>([^<]*)", page)
    )
    for item in (*paper_items.ITEMS, *report_items.ITEMS):
        assert item.item in rows
    assert rows["Figure 5"] == "measured here" and rows["Figure 2"] == "reported only"
    assert '<a href="#sage-table-4">Table 4</a></td>' in page
    of_table4 = page.partition("## SAGE, Table 4\n")[2].partition("##")[0]
    assert "**reported only**: needs the distilled model" in of_table4


def test_the_gallery_has_a_card_for_every_published_figure():
    page = site_pages.gallery({"countdown/front": "13_verdict"}, {"13_verdict": "a < b"})
    figures = list(paths.FIGURES.glob("*/*.png"))
    assert page.count("<img ") == len(figures) > 0
    assert "sage-companion reproduce --profile countdown --only 13" in page and "a &lt; b" in page


def test_the_home_page_is_the_readme_with_links_that_lead_somewhere():
    text = "![f](figures/a.png) [n](notebooks/13_verdict.ipynb) [l](LICENSE) [w](https://x.org)"
    page = site.home(
        f"{text} [p](docs/profiles.md#names) [![b](https://x.org/b.svg)](https://b.org)"
    )
    assert "![f](/figures/a.png) [n](notebooks/13_verdict.ipynb) l (`LICENSE`)" in page
    assert "[w](https://x.org) [p](profiles.md#names) [b](https://b.org)" in page
    for notebook in notebooks.found():
        assert f"notebooks/{notebook.name}\n" in page
    whole = site.home((paths.ROOT / "README.md").read_text())
    for name in ("gallery", "equations", "reported", "fidelity"):
        assert f"]({name}.md)" in whole.split("## More\n")[1].split("## ")[0]


def test_links_of_a_page_in_docs_lead_to_the_sites_pages():
    text = "[a](../README.md) [b](scaling.md#grids) [c](../CONTRIBUTING.md) [d](../sage_lib/theory)"
    page = site.on_site(f"{text} [e](../sage_lib/files.py) [f](../sage_lib/__init__.py)", "docs")
    assert page.startswith("[a](index.md) [b](scaling.md#grids) c (`CONTRIBUTING.md`) ")
    assert page.endswith(
        "[d](api/sage_lib/theory/index) [e](api/sage_lib/files/index) [f](api/sage_lib/index)"
    )
    assert site.on_site("![g](../figures/a/b.png)", "docs") == "![g](/figures/a/b.png)"


def test_every_page_written_by_hand_is_in_the_navigation():
    written = {path.stem for path in site.DOCS.glob("*.md")}
    assert written == {*site.USE, "api"}
    for name in written:
        assert f"\n{name}\n" in site.home("")


def test_the_page_of_the_library_has_every_room():
    rooms = {path.parent.name for path in (paths.ROOT / "sage_lib").glob("*/__init__.py")}
    text = site.library((paths.ROOT / "docs" / "api.md").read_text())
    assert set(re.findall(r"api/sage_lib/(\w+)/index\) \| ", text)) == rooms
