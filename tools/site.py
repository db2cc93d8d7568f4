"""Extension of Sphinx for the documentation site: checks of the pages, and links to files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

from tools.docstrings import process_docstring, replace_dashes
from tools.pages import site_problems

logger = logging.getLogger(__name__)
ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]*)\)")


def name_repository_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace links to files of the repository outside docs/ by their path, which a site has no page for.

    A link whose file does not exist is a warning with page and line.
    """
    page = Path(app.srcdir, docname).with_suffix(".md")

    def replaced(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        if target.is_relative_to(app.srcdir):
            return found[0]
        if not target.exists():
            line = found.string.count("\n", 0, found.start()) + 1
            logger.warning("the link target %s does not exist", found[2], location=(docname, line))
            return found[0]
        path = target.relative_to(ROOT)
        label = found[1].strip("`")
        return f"`{path}`" if label in (str(path), path.name) else f"{found[1]} (`{path}`)"

    source[0] = LINK.sub(replaced, source[0])


def report_problems(app: Sphinx) -> None:
    """Report the problems of all pages as warnings, which fail `make docs`."""
    for problem in site_problems():
        logger.warning(problem.message, location=f"{problem.page}:{problem.line}")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension to Sphinx."""
    app.connect("builder-inited", report_problems)
    app.connect("source-read", name_repository_files)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("doctree-read", replace_dashes)
    return {"parallel_read_safe": True}
