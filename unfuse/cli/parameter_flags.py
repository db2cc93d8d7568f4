"""Flags for the parameters in the media's tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import Parameter as Argument
from typing import Annotated

import typer

from unfuse.cli.options import KEYWORD_ONLY, MADE, gathering
from unfuse.core.errors import InvalidParameter
from unfuse.core.media import IMAGE, VIDEO
from unfuse.core.parameters import Parameter

TYPES = {"integer": int, "number": float, "flag": bool, "scaled": list[str]}
"""Types that the command line parses; all others are text."""

LINES = {one.name: one for medium in (IMAGE, VIDEO) for one in medium.parameters if one.offered}


def asks(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb a flag for each of these parameters (without names: all); it gets them as its argument `asked`."""
    lines = [LINES[name] for name in names] or LINES.values()
    return gathering("asked", {one.name: _argument(one) for one in lines})


def check_numbers(asked: Mapping[str, object]) -> None:
    """Raise InvalidParameter for a number that JSON does not have, such as NaN."""
    for name, value in asked.items():
        if isinstance(value, float) and not math.isfinite(value):
            flag = _flag(LINES[name])
            raise InvalidParameter(f"{flag} {value} is no number to multiply by: give one such as 5 or 7.5", flag)


def words_of(line: Parameter) -> str:
    """What `--help` says of a parameter: its words, its bounds, its default."""
    parts = [f"{line.description[:1].upper()}{line.description[1:]}."]
    parts += [f"[{line.bounds}]"] if line.bounds else []
    parts += [f"[default: {line.default}]"] if line.default not in (None, "") else []
    return " ".join(parts)


def _flag(line: Parameter) -> str:
    return line.flag or "--" + line.name.replace("_", "-")


def _argument(line: Parameter) -> Argument:
    flag, kind = _flag(line), TYPES.get(line.kind, str)
    names = f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag
    option = typer.Option(names, help=words_of(line), metavar=line.metavar or None, rich_help_panel=MADE)
    return Argument(line.name, KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])
