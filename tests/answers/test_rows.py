"""Every row of the public bug reports has a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]

PICTURES = (
    1,
    2,
    4,
    5,
    7,
    8,
    10,
    11,
    13,
    14,
    16,
    17,
    19,
    21,
    22,
    23,
    25,
    26,
    27,
    29,
    31,
    33,
    35,
    37,
    38,
    40,
    42,
    43,
    44,
    45,
    46,
    47,
)
CHATS = (
    1,
    2,
    4,
    5,
    7,
    8,
    10,
    11,
    13,
    14,
    16,
    17,
    19,
    20,
    22,
    23,
    25,
    26,
    28,
    29,
    31,
    32,
    34,
    35,
    37,
    38,
    40,
    41,
    43,
    44,
    46,
    47,
    49,
    50,
    52,
    53,
    55,
    56,
    58,
    59,
    61,
    62,
)
PEERS = range(1, 10)
ROWS = {*(f"P{row:02}" for row in PICTURES), *(f"C{row}" for row in CHATS), *(f"N{row}" for row in PEERS)}


def texts(path: Path) -> Iterator[str]:
    """Yield the string constants of a file that marks tests with rows."""
    source = path.read_text()
    if "mark.row(" in source:
        yield from (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))


def test_every_bug_report_row_has_a_test() -> None:
    assert sorted(ROWS - {text for path in TESTS.rglob("test_*.py") for text in texts(path)}) == []
