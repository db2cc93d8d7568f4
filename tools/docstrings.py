"""Docstrings for Sphinx: descriptions of parameters and errors become fields, lists and paragraphs get blank lines.

Docstrings describe a parameter by a line "`name`: text" or "name: text", and errors by a sentence "Raises NAME".
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from docutils import nodes

#: Code that letters follow, as in "`rank`s", which reStructuredText needs an escaped space for.
CODE_IN_WORD = re.compile(r"(?<!\w)(`[^`]+`)(?=\w)")

PARAMETER = re.compile(r"`?(\w+)(?:\([\w, ]*\))?`?: (.*)")


def as_fields(lines: list[str], names: set[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText, with a field for each of these parameters."""
    made: list[str] = []
    in_field = False
    for line in lines:
        found = PARAMETER.fullmatch(line)
        starts_item = line.startswith("- ")
        if found and found[1] in names:
            made += [*separated(made, ":param "), f":param {found[1]}: {found[2]}"]
            in_field = True
        elif in_field and line.strip() and not line.startswith("Raises "):
            made.append(f"    {line}")
        else:
            if line.strip() and (in_field or (starts_item and made and not made[-1].startswith(("- ", "  ")))):
                made += separated(made, "")
            in_field = False
            made.append(line)
    return made


def separated(made: list[str], prefix: str) -> list[str]:
    """Return the blank line that a new block needs after these lines; none after a block that begins with `prefix`."""
    last = next((line for line in reversed(made) if not line.startswith("    ")), "")
    return [] if not made or not made[-1].strip() or (prefix and last.startswith(prefix)) else [""]


def process_docstring(app: object, what: str, name: str, value: Any, options: object, lines: list[str]) -> None:
    """Rewrite a docstring for `autodoc-process-docstring`."""
    try:
        names = set(inspect.signature(value).parameters) if callable(value) else set[str]()
    except (TypeError, ValueError):
        names = set()
    lines[:] = [CODE_IN_WORD.sub(r"\1\\ ", line) for line in as_fields(lines, names)]


def replace_dashes(app: object, doctree: nodes.document) -> None:
    """Replace the two hyphens that Sphinx puts between a parameter and its description by a dash."""
    for text in [*doctree.findall(nodes.Text)]:
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))
