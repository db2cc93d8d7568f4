"""Starts workers."""

from __future__ import annotations

from unfuse.core.registry import resolve
from unfuse.launch.base import OpenLauncher

ELSEWHERE = {"ray": "unfuse.launch.ray:at"}  # what opens launchers at the address that follows the name


def opener(url: str) -> OpenLauncher | None:
    """What opens launchers of `local` (None), NAME[:ADDRESS] or `module:attr`. Raises ConfigError if nothing does."""
    name, _, address = url.partition(":")
    name, address = (name, address) if name in ELSEWHERE else (url, "")
    found: OpenLauncher | None = None if url == "local" else resolve(ELSEWHERE, name, "launcher")(address)
    return found
