"""Configuration of the documentation site: `make docs` builds it with Sphinx into docs/_build/html."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "unfuse"
copyright = "the unfuse authors"  # noqa: A001  the name that Sphinx reads
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "tools.site"]
exclude_patterns = ["_build", "images/**/*.md"]
root_doc = "index"

# Pages
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "attrs_block"]
highlight_language = "text"
smartquotes = False  # "--port" is a flag, and no dash
copybutton_prompt_text = "$ "

# Python API: signatures and docstrings, which are Markdown-like text
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

# Look
html_theme = "furo"
html_title = "unfuse"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
