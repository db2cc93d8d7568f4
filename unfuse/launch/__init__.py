"""Launchers: start, restart and stop the worker processes of a service."""

from __future__ import annotations

from unfuse.core.registry import resolve
from unfuse.launch.base import OpenLauncher

#: By name, the function that returns an `OpenLauncher` for the address after the name.
LAUNCHERS = {"ray": "unfuse.launch.ray:ray_launchers"}


def resolve_launcher(url: str) -> OpenLauncher | None:
    """Return the factory of the launcher that `url` names, or None for "local".

    url: "local", NAME[:ADDRESS] or "module:attr". Raises ConfigError for an unknown launcher.
    """
    # In "module:attr", the colon precedes no address.
    name, _, address = url.partition(":")
    name, address = (name, address) if name in LAUNCHERS else (url, "")
    open_launcher: OpenLauncher | None = None if url == "local" else resolve(LAUNCHERS, name, "launcher")(address)
    return open_launcher
