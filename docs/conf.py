"""The site: ``sphinx-build -W -q -b html docs site``. No network: the theme brings its own fonts and scripts."""

from __future__ import annotations

import tomllib
from pathlib import Path

_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "protofl"
author = "protofl maintainers"
copyright = author  # without a year, so that the same sources give the same site
release = version = _project["version"]

extensions = ["myst_parser"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
smartquotes = False  # P' is a symbol
suppress_warnings = ["myst.header"]  # a number may stand two levels below another

exclude_patterns = ["internals"]  # for developers: read in the source
html_theme = "furo"
html_title = "protofl"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["params.schema.json"]
html_show_sourcelink = False
html_copy_source = False
html_last_updated_fmt = None
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2b5f9e", "color-brand-content": "#2b5f9e"},
    "dark_css_variables": {"color-brand-primary": "#8ab8ee", "color-brand-content": "#8ab8ee"},
    "footer_icons": [],
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
