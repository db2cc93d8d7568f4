"""Count the statements of the package by folder: `python -m tools.statements`.

Statements are nodes of the syntax tree, so formatting, comments and docstrings do not count. `unfuse/testing`, the
published conformance suites, is listed apart. The count has no limit.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "unfuse"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def statements(tree: ast.AST) -> int:
    """Return the number of statements below this node, docstrings left out."""
    found = list(ast.walk(tree))
    docstrings = sum(isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None for node in found)
    return sum(isinstance(node, ast.stmt) for node in found) - docstrings


def by_folder() -> Counter[str]:
    """Return the number of statements of each folder of the package; those of files beside them count as "."."""
    counts: Counter[str] = Counter()
    for path in sorted(ROOT.rglob("*.py")):
        inside = path.relative_to(ROOT).parts
        counts[inside[0] if len(inside) > 1 else "."] += statements(ast.parse(path.read_text()))
    return counts


if __name__ == "__main__":
    counts = by_folder()
    for folder, count in sorted(counts.items()):
        print(f"{folder:<14}{count:>8,}")
    print(f"{'all':<14}{counts.total() - counts['testing']:>8,}  without testing")
