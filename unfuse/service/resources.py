"""Parses flags of the form name=number."""

from __future__ import annotations

from pathlib import Path

from unfuse.core.errors import UsageError
from unfuse.core.task import ARENA, SLOTS
from unfuse.planning.layout import Means
from unfuse.planning.machine import CONTROL_GROUP, cpus
from unfuse.planning.placement import numbered
from unfuse.service.groups import Settings
from unfuse.service.size import Size

COSTS = "costs.json"
"""The file in the data folder with what stages took."""


def resources(settings: Settings) -> dict[str, int]:
    """The amounts of named resources of each worker. Raises ConfigError for a malformed one."""
    found = counts("--resources", settings.worker.resources, "NAME=N, like kv_blocks=4096")
    if own := sorted(found.keys() & {SLOTS, ARENA}):
        raise UsageError(f"--resources {own[0]}: every worker has that, and as much as --{own[0]} says")
    return found


def device_memory(settings: Settings) -> dict[str, int]:
    """What is planned for on devices at most, in bytes. Raises ConfigError for a malformed one."""
    found = {}
    for entry in settings.serve.device_memory:
        name, _, size = entry.partition("=")
        try:
            found[numbered(name)] = Size.parse(size)
        except ValueError as error:
            raise UsageError(f"--device-memory {entry}: write DEVICE=SIZE, like cuda:0=20GiB: {error}") from error
    return found


def means(settings: Settings) -> Means:
    """What there is to compute with on this machine, by these settings."""
    return Means(max(1, int(cpus(CONTROL_GROUP))), settings.worker.memory_limit, Path(settings.data_dir, COSTS))


def counts(flag: str, given: tuple[str, ...], example: str) -> dict[str, int]:
    """The numbers of a flag, by name. Raises ConfigError for a malformed one."""
    found = {}
    for entry in given:
        name, _, count = entry.partition("=")
        if not name or not count.isdecimal() or not int(count):
            raise UsageError(f"{flag} {entry}: write {example}")
        found[name] = int(count)
    return found
