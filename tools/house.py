"""Draw the folders of the package by their imports, into the page about its structure: `python -m tools.house`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "contributing" / "package-structure.md"
BEGIN, END = "<!-- drawn by `python -m tools.house` -->\n", "<!-- end of the drawing -->\n"

ASIDE = {"testing"}
"""For others to run: it may use whatever it checks, and nothing uses it."""


@cache
def parsed(file: Path) -> ast.Module:
    """A file's syntax: several gates look at it."""
    return ast.parse(file.read_text())


def imported(file: Path) -> Iterator[str]:
    """The folders of the package that a file imports from, wherever in the file it does."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module == "unfuse":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unfuse."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("unfuse."))


def used() -> dict[str, set[str]]:
    """For each folder, the others that it imports from."""
    folders = {file.parent.name for file in (ROOT / "unfuse").glob("*/__init__.py")} - ASIDE
    return {
        folder: {name for file in (ROOT / "unfuse" / folder).rglob("*.py") for name in imported(file)}
        & folders - {folder}
        for folder in folders
    }


def drawing() -> str:
    """The floors from the top, and what each folder uses below. Raises CycleError where imports go in a circle."""
    uses, floors = used(), list[tuple[str, ...]]()
    sorter = TopologicalSorter(uses)
    sorter.prepare()
    while ready := sorter.get_ready():
        floors.insert(0, tuple(sorted(ready)))
        sorter.done(*ready)
    rows = [(folder, " ".join(sorted(uses[folder])) or "–") for floor in floors for folder in floor]
    lines = [" · ".join(floor) for floor in floors]
    width = max(map(len, lines))
    drawn = [line.center(width).rstrip() for line in lines]
    table = [f"{folder:<12}{names}" for folder, names in rows]
    return "\n".join(["```", *drawn, "", *table, "```", ""])


if __name__ == "__main__":
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:start] + drawing() + text[end:])
