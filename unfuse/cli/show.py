"""Printing data: JSON for programs, a table for people, both on standard output."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from unfuse.arena.limits import readable_bytes
from unfuse.service.logs import harmless
from unfuse.service.settings import ByteSize

INDENT = "    "


def as_json(data: object) -> None:
    """Print data as JSON."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def listing(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], empty: str, json: bool) -> None:
    """Print rows whole as JSON, or these columns of them as a table."""
    as_json(rows) if json else as_table(rows, columns, empty)


def as_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], empty: str) -> None:
    """Print these columns of the rows, or the sentence `empty` when there is none; no wider than the terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table(rows, columns, empty, width):
        typer.echo(line)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], empty: str, width: int | None = None) -> list[str]:
    """The lines of a table of these columns, or the sentence `empty` when there is no row.

    Columns that do not fit into `width` characters stand on further lines of their row, indented; nothing is cut.
    """
    if not rows:
        return [empty]
    lines = [[column.replace("_", " ").upper() for column in columns]]
    lines += [[cell(shown(column, row.get(column))) for column in columns] for row in rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    groups: list[list[int]] = [[]]
    for place in range(len(columns)):
        taken = len(INDENT) * (len(groups) > 1) + sum(widths[other] + 2 for other in groups[-1])
        if groups[-1] and width and taken + widths[place] > width:
            groups.append([])
        groups[-1].append(place)
    parts = (
        (INDENT * (number > 0) + "  ".join(line[place].ljust(widths[place]) for place in group)).rstrip()
        for line in lines for number, group in enumerate(groups)
    )  # fmt: skip
    return [piece for part in parts for piece in _wrapped(part, width)]


def _wrapped(line: str, width: int | None) -> list[str]:
    if not width or len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, max(width, 20), subsequent_indent=indent or INDENT)


def cell(value: Any) -> str:
    """A value as it stands in a table."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{harmless(str(name))}={cell(one)}" for name, one in value.items()) or "-"
    if isinstance(value, ByteSize):
        return readable_bytes(value)
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return harmless(str(value))


def shown(name: str, value: Any) -> Any:
    """A field of that name as people read it: times as local date and time."""
    return when(value) if name == "created" or name.endswith("_at") else value


def when(seconds: float | None) -> str | None:
    """Unix seconds as local date and time."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
