"""List the imports of each folder of the package, in the page about its structure: `python -m tools.house`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "contributing" / "package-structure.md"
ROW = re.compile(r"^(?P<start>\| `(?P<folder>\w+)/` \|[^|\n]*)\|[^|\n]*\|$", re.MULTILINE)

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


@cache
def used() -> dict[str, set[str]]:
    """For each folder, the others that it imports from."""
    folders = {file.parent.name for file in (ROOT / "unfuse").glob("*/__init__.py")} - ASIDE
    return {
        folder: {name for file in (ROOT / "unfuse" / folder).rglob("*.py") for name in imported(file)}
        & folders - {folder}
        for folder in folders
    }


def floors(uses: Mapping[str, Set[str]]) -> list[tuple[str, ...]]:
    """The folders by layer, from the top: each imports only from layers below. Raises CycleError for a circle."""
    layers = list[tuple[str, ...]]()
    sorter = TopologicalSorter(uses)
    sorter.prepare()
    while ready := sorter.get_ready():
        layers.insert(0, tuple(sorted(ready)))
        sorter.done(*ready)
    return layers


def with_imports(page: str) -> str:
    """A page with the imports of each folder in the last cell of the folder's row."""
    uses = used()

    def row(found: re.Match[str]) -> str:
        names = " ".join(sorted(uses[found["folder"]])) if found["folder"] in uses else "any"
        return f"{found['start']}| {names or '–'} |"

    return ROW.sub(row, page)


if __name__ == "__main__":
    PAGE.write_text(with_imports(PAGE.read_text()))
