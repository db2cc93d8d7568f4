"""What all generated pages of docs/reference/ share: tables, code, and the line that names the command."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "reference"
WRITTEN = "This page is written by `python -m tools.references`."


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown; `head` has its titles between bars."""
    count = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * count]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def code(value: object) -> str:
    """Return a value as code; "" for None and for no text."""
    return f"`{value}`" if value not in (None, "") else ""


def next_step(*links: str) -> str:
    """Return the last paragraph of a page."""
    return f"\nNext: {', '.join(links)}\n"


def comments(struct: type) -> dict[str, str]:
    """Return the comments (`#:`) on the fields of a class by name."""
    found = re.findall(r"((?:    #: .*\n)+)    (\w+): ", inspect.getsource(struct))
    return {name: " ".join(line.strip().removeprefix("#: ") for line in text.splitlines()) for text, name in found}
