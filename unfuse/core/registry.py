"""Names to implementations: every table of backends is a dict of "module:attr" strings, imported only when named."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from unfuse.core.errors import ConfigError
from unfuse.core.nearest import nearest


def resolve(table: Mapping[str, str], name: str, what: str) -> Any:
    """Return what `name` stands for in the table, or what it names itself as `module:attr`.

    `what` says in errors what is being looked up ("queue", "model family"). Raises ConfigError when nothing has that
    name, or when what has it cannot be imported.
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
