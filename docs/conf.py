"""Sphinx's settings for the site. Its pages are put together by sage_lib/pipeline/site.py: this
folder holds what is written by hand."""

import sage_lib
from sage_lib import paths

project = "SAGE companion"
author = "The SAGE companion maintainers"
version = release = sage_lib.__version__
language = "en"
extensions = ["myst_nb", "autoapi.extension", "sphinx_copybutton"]
templates_path = []
exclude_patterns = []
suppress_warnings = [
    "myst.header",  # a README's headings are as they are
    "autoapi.python_import_resolution",  # nothing outside the library is read
]

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

# The notebooks' own outputs are shown; nothing runs here.
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # nothing of another host: widgets are not stored
nb_merge_streams = True
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath", "amsmath", "attrs_inline", "colon_fence"]
myst_heading_anchors = 4
# The formulas are set by a copy that lies beside the pages (sage_lib/pipeline/site.py puts it there).
mathjax_path = "mathjax/tex-chtml.js"

# Read, not imported: no torch is needed to document what uses it.
autoapi_dirs = [str(paths.ROOT / "sage_lib")]
autoapi_root = "api"
autoapi_add_toctree_entry = False
autoapi_keep_files = False
autoapi_own_page_level = "module"
autoapi_member_order = "bysource"
autoapi_options = ["members", "undoc-members", "show-inheritance", "show-module-summary"]
