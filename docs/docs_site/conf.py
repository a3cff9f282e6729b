"""Sphinx's settings: `make docs`. The pages are plain Markdown, so that a git host shows them as well."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import verbatim  # noqa: E402
from docs_site import reference_python  # noqa: E402
from docs_site.navigation import with_toctrees, without_links_outside  # noqa: E402

project = "Verbatim"
author = "The authors of Verbatim"
release = version = verbatim.__version__
html_title = f"Verbatim {release}"
html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
smartquotes = False  # "--resume" is an option, not a dash
html_theme_options = {"navigation_with_keys": True}
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["docs_site"]
source_suffix = {".md": "markdown"}
master_doc = "index"
nitpicky = True
myst_heading_anchors = 4  # links such as metrics.md#training work as on a git host
myst_enable_extensions = ["dollarmath"]
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_exclude = ".linenos, .gp, .go"

# `make docs-links` asks for every link outside, which needs a network; links among pages are checked by every build.
linkcheck_timeout = 20
linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1)"]


def _read(app: Sphinx, page: str, content: list[str]) -> None:
    if page == "reference_python":
        content[0] = reference_python.document()
    content[0] = without_links_outside(content[0])
    if page == master_doc:
        content[0] = with_toctrees(content[0])


def setup(app: Sphinx) -> None:
    """Prepare each page as it is read."""
    app.connect("source-read", _read)
