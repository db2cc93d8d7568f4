"""Looks up implementations by name. A table of backends is a dict of "module:attr", imported only when it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from unfuse.core.errors import ConfigError

LONGEST = 64  # the longest name, in characters, that is looked up: the time grows with the square of the length


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most similar to `name`, if its similarity (0 to 1) is at least `cutoff`."""
    close = get_close_matches(name, known, 1, cutoff) if len(name) <= LONGEST else []
    return close[0] if close else None


def resolve(table: Mapping[str, str], name: str, what: str) -> Any:
    """Import what the table has for `name`, or `name` itself if it is a `module:attr`.

    Errors call it a `what` ("queue", "model family"). Raises ConfigError for an unknown name, or a failed import.
    """
    target = table.get(name, name)
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        near = nearest(name, table)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(f"unknown {what} {name!r}: {hint}known are {', '.join(sorted(table))}, or give module:attr")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} {name!r} cannot be loaded from {target}: {error}") from error
    return found
