"""Sphinx's settings for the site. tools/build_site.py puts its pages together: this folder holds
what is written by hand."""

import re
import sys

from astroid.manager import AstroidManager
from sphinx.application import Sphinx

import sage_lib
from sage_lib import paths

sys.path.insert(0, str(paths.ROOT / "tools"))
import links

project = "SAGE companion"
author = "The SAGE companion maintainers"
version = release = sage_lib.__version__
language = "en"
extensions = ["myst_nb", "autoapi.extension", "sphinx.ext.napoleon", "sphinx_copybutton"]
napoleon_numpy_docstring = False
templates_path = []
exclude_patterns = []
suppress_warnings = [
    "myst.header",  # a README's headings are as they are
    "autoapi.python_import_resolution",  # nothing outside the library is read
]

html_theme = "furo"
html_title = project
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
smartquotes_action = "qe"  # no dashes: "--resume" in a sentence is typed as it stands
html_theme_options = {"navigation_with_keys": True}
if where := links.repository(links.CITATION.read_text()):
    link = {"name": "repository", "url": f"https://github.com/{where}", "class": ""}
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

_LITERAL = re.compile(r"(``.*?``|:\w+:`.*?`)", re.DOTALL)


def _plain_bars(
    app: object, what: str, name: str, thing: object, options: object, lines: list
) -> None:
    """The bars of a divergence are no substitutions."""
    text = _LITERAL.split("\n".join(lines))
    text[::2] = [part.replace("|", "\\|") for part in text[::2]]
    lines[:] = "".join(text).split("\n")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _plain_bars)
