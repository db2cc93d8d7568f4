"""Print data on standard output: JSON for programs, or a table for people."""

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
from unfuse.service.logs import escape_control
from unfuse.service.settings import ByteSize

#: The indent of a table row's further lines.
INDENT = "    "


def as_json(data: object) -> None:
    """Print data as JSON."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def listing(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], empty: str, json: bool) -> None:
    """Print the rows with all fields as JSON, or with these columns as a table."""
    as_json(rows) if json else as_table(rows, columns, empty)


def as_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], empty: str) -> None:
    """Print these columns of the rows as a table, no wider than the terminal.

    `empty`: the sentence to print if there is no row.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table(rows, columns, empty, width):
        typer.echo(line)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], empty: str, width: int | None = None) -> list[str]:
    """Return the lines of a table of these columns, or the sentence `empty` without rows.

    `width`: the most characters of a line, or None without a limit. Columns that do not fit are on further lines of
    their row, indented. Nothing is cut.
    """
    if not rows:
        return [empty]
    lines = [[column.replace("_", " ").upper() for column in columns]]
    lines += [[cell(format_value(column, row.get(column))) for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]

    # The indexes of the columns on each line of a row.
    groups: list[list[int]] = [[]]
    for index in range(len(columns)):
        used_width = len(INDENT) * (len(groups) > 1) + sum(widths[earlier] + 2 for earlier in groups[-1])
        if groups[-1] and width and used_width + widths[index] > width:
            groups.append([])
        groups[-1].append(index)

    texts = (
        (INDENT * (number > 0) + "  ".join(line[index].ljust(widths[index]) for index in group)).rstrip()
        for line in lines
        for number, group in enumerate(groups)
    )
    return [wrapped for text in texts for wrapped in _wrap(text, width)]


def _wrap(line: str, width: int | None) -> list[str]:
    """Return a line broken at this width. Further lines are indented.

    A width below 20 characters counts as 20.
    """
    if not width or len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, max(width, 20), subsequent_indent=indent or INDENT)


def cell(value: Any) -> str:
    """Return a value as text for a table, with control characters escaped."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{escape_control(str(name))}={cell(item)}" for name, item in value.items()) or "-"
    if isinstance(value, ByteSize):
        return readable_bytes(value)
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return escape_control(str(value))


def format_value(name: str, value: Any) -> Any:
    """Return the value of a field for text output: times become local dates."""
    return when(value) if name == "created" or name.endswith("_at") else value


def when(seconds: float | None) -> str | None:
    """Return Unix seconds as local date and time, or None."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
