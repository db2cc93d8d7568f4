"""Looks up implementations by name, and imports them on first use.

A table of backends is a dict of "name": "module:attr".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from unfuse.core.errors import ConfigError

MAX_NAME_CHARS = 64  # characters of the longest name that is compared: the time grows with the square of the length


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar known name; None if no similarity (0 to 1) reaches `cutoff`."""
    matches = get_close_matches(name, known, 1, cutoff) if len(name) <= MAX_NAME_CHARS else []
    return matches[0] if matches else None


def resolve(table: Mapping[str, str], name: str, noun: str) -> Any:
    """Import and return the implementation called `name` in the table.

    A name of the form `module:attr` needs no entry. Errors call the implementation a `noun` ("queue", "model family").
    Raises ConfigError for an unknown name, or a failed import.
    """
    target = table.get(name, name)
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        nearest = nearest_name(name, table)
        hint = f"did you mean {nearest}? " if nearest else ""
        raise ConfigError(f"unknown {noun} {name!r}: {hint}known are {', '.join(sorted(table))}, or give module:attr")
    try:
        resolved: Any = import_module(module)
        for part in attribute.split("."):
            resolved = getattr(resolved, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{noun} {name!r} cannot be loaded from {target}: {error}") from error
    return resolved
