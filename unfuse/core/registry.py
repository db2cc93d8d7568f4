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
    """Return the most similar known name, or None.

    Its similarity (0 to 1) must be at least `cutoff`.
    """
    close = get_close_matches(name, known, 1, cutoff) if len(name) <= MAX_NAME_CHARS else []
    return close[0] if close else None


def resolve(table: Mapping[str, str], name: str, what: str) -> Any:
    """Import and return what the table has for `name`, or the `module:attr` that `name` is.

    Errors call it a `what` ("queue", "model family"). Raises ConfigError for an unknown name, or a failed import.
    """
    target = table.get(name, name)
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        near = nearest_name(name, table)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(f"unknown {what} {name!r}: {hint}known are {', '.join(sorted(table))}, or give module:attr")
    try:
        resolved: Any = import_module(module)
        for part in attribute.split("."):
            resolved = getattr(resolved, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} {name!r} cannot be loaded from {target}: {error}") from error
    return resolved
