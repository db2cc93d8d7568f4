"""Launchers: start, restart and stop the worker processes of a service."""

from __future__ import annotations

from unfuse.core.registry import resolve
from unfuse.launch.base import OpenLauncher

#: By name, the function that returns an `OpenLauncher` for the address behind the name.
ELSEWHERE = {"ray": "unfuse.launch.ray:at"}


def opener(url: str) -> OpenLauncher | None:
    """Return the factory of the launcher that `url` names, or None for "local".

    url: "local", NAME[:ADDRESS] or "module:attr". Raises ConfigError for an unknown launcher.
    """
    name, _, address = url.partition(":")
    name, address = (name, address) if name in ELSEWHERE else (url, "")
    open_launcher: OpenLauncher | None = None if url == "local" else resolve(ELSEWHERE, name, "launcher")(address)
    return open_launcher
