"""The built site (make site, then make test-site): links lead somewhere, nothing comes from another
host."""

from functools import cache
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from sage_lib import paths

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


def test_a_broken_link_and_another_host_are_noticed(tmp_path):
    first = tmp_path / "first.html"
    first.write_text('<a href="gone.html">a</a><a href="#no">b</a><a href="#yes" id="yes">c</a>')
    assert broken(first, page(first).links) == ["gone.html", "#no"]
    assert Parts('<script src="https://cdn.example/x.js">').loaded == ["https://cdn.example/x.js"]
