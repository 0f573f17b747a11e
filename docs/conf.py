"""Sphinx's settings for the site. tools/build_site.py puts its pages together: this folder holds
what is written by hand."""

import re
import sys
from functools import cache
from typing import Any

from astroid.manager import AstroidManager
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

import sage_lib
from sage_lib import paths

sys.path.insert(0, str(paths.ROOT / "tools"))
import links

project = "SAGE companion"
author = "The SAGE companion maintainers"
version = release = sage_lib.__version__
language = "en"
extensions = ["myst_nb", "autoapi.extension", "sphinx_copybutton"]
default_role = "literal"  # `name` in a docstring is code
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 80  # a longer one has a line for each parameter
templates_path = []
exclude_patterns = []
suppress_warnings = [
    "myst.header",  # a README's headings are as they are
    "autoapi.python_import_resolution",  # nothing outside the library is read
]

html_theme = "furo"
html_title = project
html_favicon = "_static/favicon.svg"
html_static_path = ["_static", str(paths.ROOT / "sage_lib" / "report" / "tilt.js")]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
smartquotes_action = "qe"  # no dashes: "--resume" in a sentence is typed as it stands
html_theme_options = {"navigation_with_keys": True}
if address := links.repository():
    link = {"name": "repository", "url": f"https://github.com/{address}", "class": ""}
    html_theme_options["footer_icons"] = [{**link, "html": "The repository"}]

# The notebooks' own outputs are shown; nothing runs here.
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # nothing of another host
nb_merge_streams = True
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath", "amsmath", "attrs_inline", "colon_fence"]
myst_heading_anchors = 4
# The formulas are set by a copy beside the pages, where tools/build_site.py puts it.
mathjax_path = "mathjax/tex-chtml.js"


class _Outside(set):
    """The modules of neither this library nor Python itself."""

    def __contains__(self, module: object) -> bool:
        return str(module).partition(".")[0] not in {"sage_lib", *sys.stdlib_module_names}


# Read, not imported, and nothing but the library: with torch read as well it takes ten minutes.
AstroidManager.brain["module_denylist"] = _Outside()
autoapi_dirs = [str(paths.ROOT / "sage_lib")]
autoapi_root = "api"
autoapi_add_toctree_entry = False
autoapi_keep_files = False
autoapi_own_page_level = "module"
autoapi_member_order = "bysource"
autoapi_options = ["members", "undoc-members", "show-inheritance", "show-module-summary"]
autoapi_options += ["inherited-members"]  # of them the arguments: see _explain

#: Parts of a docstring that are shown letter by letter.
_LITERAL = re.compile(r"(`+[^`]+`+|(?<=::)\n\n(?:(?: [^\n]*)?\n)+)")
#: The line before an indented block, and the end of a sentence.
_BEFORE_BLOCK = re.compile(r"^((?!\.\. |- )\S.*(?<!::))\n\n(?=  +\S)", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z])")


def _to_page(_: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """A docstring as reStructuredText, by napoleon. As its own extension calls it, an attribute's
    words before a colon would be a type. Indented blocks are code and no quotations, the bars of a
    divergence no substitutions, and a summary is the first sentence, not the first line."""
    whole = _BEFORE_BLOCK.sub(r"\1\n\n::\n\n", "\n".join(lines))
    text = _LITERAL.split(str(GoogleDocstring(whole)).strip("\n") + "\n")
    marks = "([|*_@])" if what == "comment" else "([|@])"  # pass@256 is no address
    text[::2] = [re.sub(marks, r"\\\1", part) for part in text[::2]]
    first, *rest = "".join(text).split("\n\n", 1)
    if not first.startswith((":", "..")):
        first = _SENTENCE.sub("\n", first.replace("\n", " "), count=1)
    lines[:] = "\n\n".join([first, *rest]).split("\n")


@cache
def _comments(module: str) -> dict[tuple[str, str], list[str]]:
    """What comments say of a module's attributes, by class and name: above (#:) or behind them."""
    place = paths.ROOT / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    source = re.sub(r"(?<=\S)  # (?!type:|noqa)", "  #: ", file.read_text())
    return ModuleAnalyzer.for_string(source, module).find_attr_docs()


def _explain(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool:
    """Comments in the place of docstrings. Attributes with neither comment nor type are hidden, and
    so is what a class inherits, but for the arguments of a private class, which has no page."""
    owner, _, own = thing.qual_name.rpartition(".")
    module = name.removesuffix(f".{thing.qual_name}")
    if thing.inherited:
        module, _, owner = thing.obj["inherited_from"]["full_name"].rpartition(".")
        if what != "attribute" or not owner.startswith("_"):
            return True
    if what in {"attribute", "data"} and not thing.docstring:
        lines = _comments(module).get((owner, own), [])
        if lines:
            _to_page(app, "comment", name, None, None, lines := list(lines))
            thing.docstring = "\n".join(lines)
    return skip or (what == "attribute" and not (thing.docstring or thing.annotation))


def _short_names(app: Sphinx, page: str, source: list[str]) -> None:
    """Modules stand in the navigation by the last part of their names."""
    source[0] = re.sub(r"^   (/api/\S+/(\w+)/index)$", r"   \2 <\1>", source[0], flags=re.MULTILINE)


def _colons(app: Sphinx, page: nodes.document) -> None:
    """A parameter's name ends with a colon, in the place of Sphinx's two dashes."""
    for text in [one for one in page.findall(nodes.Text) if one == " -- "]:
        text.parent.replace(text, nodes.Text(": "))


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _to_page)
    app.connect("autoapi-skip-member", _explain)
    app.connect("source-read", _short_names)
    app.connect("doctree-read", _colons)
