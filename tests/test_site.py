"""The built site (make site, then make test-site): links lead somewhere, nothing comes from another
host."""

import json
import re
from functools import cache
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import build_site
import law
import pytest
import site_claims
import site_results

from sage_lib import paths
from sage_lib.experiment.results import load_results
from sage_lib.files import write_text
from sage_lib.report import ladder, outcomes, trained_guides

pytestmark = pytest.mark.site
SITE = paths.build("site")


class Parts(HTMLParser):
    """What a page links, what it loads, and the names in it that others may link."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.names = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = {key: value for key, value in attributes if value}
        self.names |= {given[key] for key in ("id", "name") if key in given}
        to = self.links if tag == "a" else self.loaded
        if tag in ("a", "img", "script", "link", "iframe"):
            to += [given[key] for key in ("src", "href") if key in given]


@cache
def page(path):
    return Parts(path.read_text())


def is_outside(link):
    return bool(urlsplit(link).scheme) or link.startswith("//")


def broken(path, links):
    """Links of a page that lead to no file, or to no place in it."""
    found = []
    for link in (one for one in links if not is_outside(one)):
        parts = urlsplit(link)
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        target = target / "index.html" if target.is_dir() else target
        named = parts.fragment and target.suffix == ".html" and target.is_file()
        if not target.is_file() or (named and unquote(parts.fragment) not in page(target).names):
            found.append(link)
    return found


def test_links_lead_somewhere_and_nothing_is_loaded_from_another_host():
    pages = sorted(SITE.rglob("*.html"))
    assert len(pages) > 50
    for path in pages:
        assert broken(path, [*page(path).links, *page(path).loaded]) == [], path
        outside = [one for one in page(path).loaded if is_outside(one)]
        assert [one for one in outside if not one.startswith("data:")] == [], path


def test_a_picture_has_words_and_no_number_is_an_address():
    for path in sorted(SITE.rglob("*.html")):
        text = path.read_text()
        assert "mailto:" not in text, path
        for picture in re.findall(r"<img[^>]*>", text):
            words = re.search(r'alt="([^"]*)"', picture)
            assert words and words[1] and not words[1].endswith(".png"), f"{path}: {picture}"


def test_the_navigation_has_its_parts_and_the_search_the_terms():
    text = (SITE / "index.html").read_text()
    captions = re.findall(r'<span class="caption-text">([^<]+)</span>', text)
    parts = ["Start", "Results", "Notebooks", "Guides", "Reference"]
    assert [caption for caption in captions if caption in parts] == parts
    for path in ("theory", "walkthrough", "the-paper", "why", "exploration-report", "further"):
        assert f'href="notebooks/{path}.html"' in text
    glossary = page(SITE / "glossary.html").names
    assert {"term-anchor", "term-pass-k", "term-trade-off-curve"} <= glossary
    linked = {
        page_of: set(page(SITE / f"{page_of}.html").links) for page_of in ("index", "own_code")
    }
    assert all({"claims.html", "runs.html", "gallery.html"} <= links for links in linked.values())
    verdict = (SITE / "notebooks" / f"{site_results.notebook('verdict')}.html").read_text()
    assert all(
        f'href="../{name}.html">' in verdict.partition("<article")[2]
        for name in ("claims", "runs", "gallery")
    )


def test_a_notebooks_page_folds_cells():
    text = (SITE / "notebooks" / "02_the_optimum.html").read_text()
    assert 0 < text.count("hide above-input") < text.count('class="cell ')


def test_a_broken_link_and_another_host_are_noticed(tmp_path):
    first = tmp_path / "first.html"
    first.write_text('<a href="gone.html">a</a><a href="#no">b</a><a href="#yes" id="yes">c</a>')
    assert broken(first, page(first).links) == ["gone.html", "#no"]
    assert Parts('<script src="https://cdn.example/x.js">').loaded == ["https://cdn.example/x.js"]


def test_the_run_browser_has_every_published_run():
    text = (SITE / "_static" / "runs_data.js").read_text()
    assert len(text) < 2_000_000
    found = json.loads(text.removeprefix("const RUNS = ").removesuffix(";\n"))
    own = {(one["key"], run["seed"]) for one in found["methods"] for run in one["runs"]}
    assert {"smoke", "smollm_paper", "smollm_aimless"} <= {*site_results.BESIDE}
    published = set()
    for profile in ("study", *site_results.BESIDE):
        runs = load_results(profile).runs.query("stage == 'rl'")
        names = runs["method"] if profile == "study" else f"{profile}/" + runs["method"]
        published |= set(zip(names, runs["seed"], strict=True))
    assert own == published
    columns = [(panel["part"], panel["column"]) for panel in found["panels"]]
    for run in (run for one in found["methods"] for run in one["runs"]):
        for part, column in columns:
            assert len(run[part][column]) == len(run[part]["step"])


def test_the_pages_of_results_show_what_they_are_for():
    claims, gallery, api = (
        (SITE / name).read_text()
        for name in ("claims.html", "gallery.html", "api/sage_lib/algorithm/advantages/index.html")
    )
    stated = [one for name in site_claims.CLAIMS for one in outcomes.load_claims(name).claims]
    predicted = len(ladder.outcomes(ladder.load())) + len(law.EXPECTED)
    of_guides = (trained_guides.outcomes(task) for task in trained_guides.TASKS)
    predicted += sum(table["prediction"].nunique() for table in of_guides)
    assert claims.count("<tr>") == len(stated) + predicted + 2 > 45
    assert gallery.count("<figcaption>") == gallery.count('loading="lazy"') == 10
    assert "log pi of the sampled tokens" in api  # a comment behind a field
    guides = (SITE / "api/sage_lib/algorithm/guides/index.html").read_text()
    inherited = guides.partition('id="sage_lib.algorithm.guides.BranchGuide.high"')[2]
    assert "the largest q" in inherited[:1500]  # an argument of every guide that clamps
    assert {"_static/runs_data.js", "_static/runs.js"} <= set(page(SITE / "runs.html").loaded)
    assert all(f'"{name}"' in (SITE / "searchindex.js").read_text() for name in ("claims", "runs"))


def test_a_site_that_cannot_be_built_leaves_the_former_one(tmp_path, monkeypatch):
    """Sphinx itself, on one page: twice with a link that leads nowhere."""
    (tmp_path / "conf.py").write_text("extensions = ['myst_parser']\n")
    monkeypatch.setattr(build_site, "DOCS", tmp_path)
    monkeypatch.setenv("SAGE_BUILD", str(tmp_path))

    def build(page):
        monkeypatch.setattr(build_site, "assemble", lambda to: write_text(to / "index.md", page))
        build_site.main()

    shown = paths.build("site") / "index.html"
    build("# The first\n")
    for _ in range(2):
        with pytest.raises(SystemExit, match="could not build the site"):
            build("# The second\n\n[nowhere](gone.md)\n")
        assert "The first" in shown.read_text()
    build("# The third\n")
    assert "The third" in shown.read_text() and not paths.build("site-new").exists()
