"""Settings of Sphinx: ``python -m sphinx -W --keep-going docs build/docs`` builds the site, offline."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).parent.parent))
sys.path.insert(0, os.fspath(Path(__file__).parent / "extensions"))

import oocdl

project = "oocdl"
author = "the developers of oocdl"
version = release = oocdl.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "repository_text"]
nitpicky = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Names of oocdl are links. Other names are not looked up, because that would take the network.
default_role = "py:obj"
nitpick_ignore_regex = [("py:.*", r"(?!oocdl\.).*")]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False

html_theme = "pydata_sphinx_theme"
html_title = "oocdl"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}
html_copy_source = html_show_sourcelink = False
html_theme_options = {
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["sphinx-version"],
    "footer_end": ["theme-version"],
}
smartquotes = False
