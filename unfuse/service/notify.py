"""Tells systemd how far a service is (sd_notify), where it was started by a unit of `Type=notify`."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

VARIABLE = "NOTIFY_SOCKET"

READY, STOPPING = "READY=1", "STOPPING=1"


def notify(state: str) -> None:
    """Tell systemd, if it wants to hear. Never fails."""
    address = os.environ.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        to.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
