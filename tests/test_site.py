"""The built site, read in a browser: make site, then make test-site.

Every page is opened at the width of a screen and of a phone. The browser is Playwright's own, or
the one that SAGE_CHROMIUM names.
"""

import functools
import http.server
import os
import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

from sage_lib import paths

pytestmark = pytest.mark.site

SITE = paths.build("site")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
WIDTHS = (1280, 390)
#: Pages that are read in the browser, beside the first page of each room.
READ = (
    *("index", "running", "profiles", "countdown_task", "own_code", "scaling"),
    *("gallery", "reported", "fidelity", "equations", "api", "search"),
)


class Parts(HTMLParser):
    """What a page refers to, and the names in it that others may refer to."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.names, self.without_words = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.names |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("img", "script", "iframe", "source") and given.get("src"):
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given.get("href", ""))
        if tag == "img" and "alt" not in given:
            self.without_words.append(given.get("src", "")[:60])


@functools.cache
def page(path):
    return Parts(path.read_text())


def pages():
    found = sorted(SITE.rglob("*.html"))
    assert found, "there is no site: make site"
    return found


def is_outside(link):
    return bool(urlsplit(link).scheme or link.startswith("//"))


def broken(path, links):
    """Links of a page that lead to no file, or to no place in it."""
    found = []
    for link in links:
        if is_outside(link):
            continue
        place, name = urldefrag(link)
        place = place.partition("?")[0]
        target = Path(os.path.normpath(path.parent / unquote(place))) if place else path
        if target.is_dir():
            target /= "index.html"
        there = target.is_file()
        if there and name and target.suffix == ".html":
            there = unquote(name) in page(target).names
        if not there:
            found.append(link)
    return found


def test_every_link_and_picture_of_every_page_is_there():
    wrong = {
        str(path.relative_to(SITE)): found
        for path in pages()
        if (found := broken(path, [*page(path).links, *page(path).loaded]))
    }
    assert wrong == {}


def test_nothing_is_loaded_from_another_host():
    outside = {link for path in pages() for link in page(path).loaded if is_outside(link)}
    assert {link for link in outside if not link.startswith("data:")} == set()
    styles = [*SITE.rglob("*.css")]
    fetched = [re.findall(r"url\(['\"]?(https?:|//)", path.read_text()) for path in styles]
    assert styles and not any(fetched)


def test_a_broken_link_and_another_host_would_be_noticed(tmp_path):
    first = tmp_path / "first.html"
    first.write_text('<a href="gone.html">a</a><a href="#no">b</a><a href="#yes" id="yes">c</a>')
    assert broken(first, Parts(first.read_text()).links) == ["gone.html", "#no"]
    assert Parts('<script src="https://cdn.example/x.js">').loaded == ["https://cdn.example/x.js"]


def test_no_page_names_a_path_of_the_machine_that_built_it():
    held = [str(path) for path in pages() if str(paths.ROOT) in path.read_text()]
    assert held == []


def test_every_notebook_every_figure_and_every_room_has_its_place():
    for notebook in paths.NOTEBOOKS.glob("[0-9]*.ipynb"):
        assert (SITE / "notebooks" / f"{notebook.stem}.html").is_file()
    gallery = page(SITE / "gallery.html").loaded
    for figure in paths.FIGURES.glob("*/*.png"):
        assert f"_static/thumbnails/{figure.parent.name}/{figure.name}" in gallery
    rooms = {path.parent.name for path in (paths.ROOT / "sage_lib").glob("*/__init__.py")}
    for room in rooms:
        assert f"api/sage_lib/{room}/index.html" in page(SITE / "api.html").links


# --- in a browser ---------------------------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # a page asks for many files at once


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address():
    serve = functools.partial(Quiet, directory=str(SITE))
    with Server(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        chosen = os.environ.get("SAGE_CHROMIUM")
        opened = started.chromium.launch(executable_path=chosen, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(params=WIDTHS)
def tab(request, browser):
    opened = browser.new_page(viewport={"width": request.param, "height": 900})
    opened.set_default_timeout(120_000)  # other work may share the machine
    opened.complaints = []
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.on(
        "console",
        lambda said: opened.complaints.append(said.text) if said.type == "error" else None,
    )
    opened.on("requestfailed", lambda request: opened.complaints.append(request.url))
    yield opened
    opened.close()


def read_in_browser():
    notebooks = sorted(f"notebooks/{path.stem}" for path in paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
    return [*READ, *notebooks, "api/sage_lib/theory/solutions/index"]


@pytest.mark.parametrize("name", read_in_browser())
def test_a_page_opens_without_errors_and_fits_the_window(tab, address, name):
    tab.goto(urljoin(address, f"{name}.html"), wait_until="load")
    tab.wait_for_function(
        "() => !window.MathJax?.startup?.promise || window.MathJax.startup.output"
    )
    tab.evaluate("() => window.MathJax?.startup?.promise")
    assert tab.complaints == []
    width = tab.viewport_size["width"]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "scrolls sideways"
    empty = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    assert tab.evaluate(empty) == []
    assert tab.locator("mjx-merror").count() == 0, "a formula cannot be read"


def test_formulas_are_set(tab, address):
    tab.goto(urljoin(address, "notebooks/02_closed_form_tilting.html"))
    tab.wait_for_selector("mjx-container", timeout=20_000)


def test_the_page_can_be_dark(tab, address):
    tab.goto(address)
    background = "getComputedStyle(document.body).backgroundColor"
    tab.evaluate("document.body.dataset.theme = 'light'")
    light = tab.evaluate(background)
    for _ in range(3):  # auto, light, dark
        tab.locator("button.theme-toggle:visible").first.click()
        if tab.evaluate("document.body.dataset.theme") == "dark":
            break
    assert tab.evaluate("document.body.dataset.theme") == "dark"
    assert tab.evaluate(background) != light


def test_search_finds_a_function(tab, address):
    tab.goto(urljoin(address, "search.html?q=entropy_bonus"))
    tab.wait_for_selector("#search-results li a", timeout=20_000)


#: Notebooks with a slider, and what of it changes.
SLIDERS = {
    "01_toy_two_path": ".picture",
    "02_closed_form_tilting": ".picture",
    "03_what_the_trainer_optimises": ".picture",
    "22_guides": ".texts",
    "08_main_results": ".picture",
    "13_verdict": ".picture",
}


@pytest.mark.parametrize("name", SLIDERS)
def test_a_slider_moves_its_figure_by_the_keyboard(tab, address, name):
    tab.goto(urljoin(address, f"notebooks/{name}.html"))
    slider = tab.locator(".sage-slider").first
    moved = slider.locator(SLIDERS[name])
    before, said = moved.inner_html(), slider.locator("output").inner_text()
    named = slider.get_by_role("slider")
    assert named.get_attribute("aria-valuetext") == said
    named.focus()
    tab.keyboard.press("ArrowLeft")
    assert moved.inner_html() != before
    assert slider.locator("output").inner_text() != said
    assert tab.complaints == []


@pytest.mark.parametrize("name", ["03_what_the_trainer_optimises", "08_main_results", "13_verdict"])
def test_a_box_hides_a_series_and_a_moved_slider_leaves_it_hidden(tab, address, name):
    tab.goto(urljoin(address, f"notebooks/{name}.html"))
    slider = tab.locator(".sage-slider").first
    box = slider.locator("input[type=checkbox]").first
    parts = slider.locator(f".picture [id='{box.get_attribute('value')}']")
    hidden = "all => all.map(one => one.style.display)"
    assert parts.count() and set(parts.evaluate_all(hidden)) == {""}
    box.click()
    assert set(parts.evaluate_all(hidden)) == {"none"}
    slider.get_by_role("slider").press("ArrowLeft")
    assert set(parts.evaluate_all(hidden)) == {"none"}


def test_a_pointer_finds_a_tokens_numbers(tab, address):
    tab.goto(urljoin(address, "notebooks/22_guides.html"))
    slider = tab.locator(".sage-slider").first
    slider.locator(".texts span[data-place='1']").first.click()
    assert slider.locator("output").inner_text().startswith("token 2 of ")
    assert slider.locator(".texts .marked").count() == 5, "in each line"


def test_a_wide_figure_keeps_its_size_on_a_phone_with_its_words_below(tab, address):
    tab.goto(urljoin(address, "notebooks/02_closed_form_tilting.html"))
    figure = tab.locator("figure.wide-figure").first
    picture, words = figure.locator("img"), figure.locator("figcaption")
    assert picture.bounding_box()["width"] >= 560
    assert words.text_content() == picture.get_attribute("alt")
    assert words.is_visible() == (tab.viewport_size["width"] == min(WIDTHS))
