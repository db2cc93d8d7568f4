"""Parses flags of the form name=number."""

from __future__ import annotations

from unfuse.core.errors import ConfigError
from unfuse.core.task import ARENA, SLOTS
from unfuse.service.groups import Settings


def resources(settings: Settings) -> dict[str, int]:
    """The amounts of named resources of each worker. Raises ConfigError for a malformed one."""
    found = counts("--resources", settings.worker.resources, "NAME=N, like kv_blocks=4096")
    if own := sorted(found.keys() & {SLOTS, ARENA}):
        raise ConfigError(f"--resources {own[0]}: every worker has that, and as much as --{own[0]} says")
    return found


def counts(flag: str, given: tuple[str, ...], example: str) -> dict[str, int]:
    """The numbers of a flag, by name. Raises ConfigError for a malformed one."""
    found = {}
    for entry in given:
        name, _, count = entry.partition("=")
        if not name or not count.isdecimal() or not int(count):
            raise ConfigError(f"{flag} {entry}: write {example}")
        found[name] = int(count)
    return found
