"""Printing data: JSON for programs, a table for people, both on standard output."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from unfuse.cli.settings import Size


def as_json(data: object) -> None:
    """Print data as JSON."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def listing(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], empty: str, json: bool) -> None:
    """Print rows whole as JSON, or these columns of them as a table."""
    as_json(rows) if json else as_table(rows, columns, empty)


def as_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], empty: str, err: bool = False) -> None:
    """Print these columns of the rows, or the sentence `empty` when there is none; on standard error if `err`."""
    if not rows:
        typer.echo(empty, err=err)
        return
    lines = [[column.replace("_", " ").upper() for column in columns]]
    lines += [[cell(shown(column, row.get(column))) for column in columns] for row in rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip(), err=err)


def cell(value: Any) -> str:
    """A value as it stands in a table."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value) or "-"
    if isinstance(value, Size):
        return size(value)
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value)


def shown(name: str, value: Any) -> Any:
    """A field of that name as people read it: times as local date and time."""
    return when(value) if name in ("created", "created_at", "completed_at") else value


def when(seconds: float | None) -> str | None:
    """Unix seconds as local date and time."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def size(count: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
