"""The stop of a process: its time budget, messages to systemd, and an end even if something hangs."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

import structlog

from unfuse.core.supervisor import StopBudget

LEAST_S = 5.0  # seconds that a stop may take whatever its budget, since processes have to end, too
AT_ONCE_S = 10.0  # seconds that a stop may take that was hurried by a second signal
ENDING_S, ENDING = 3.0, 0.3  # seconds that closing takes once all workers have ended, and its share of a short budget

log = structlog.get_logger(__name__)


READY, STOPPING = "READY=1", "STOPPING=1"  # messages to systemd


class Stoppable:
    """What runs until `stop`, and ends within the drain timeout."""

    def __init__(self, drain_timeout: float) -> None:
        self.stopping, self.budget = asyncio.Event(), StopBudget(drain_timeout)

    def stop(self) -> None:
        """End within the drain timeout. A second call ends at once."""
        if self.stopping.is_set():
            self.budget.hurry.set()
        else:
            self.budget = StopBudget(self.budget.seconds)
        self.stopping.set()

    @property
    def reserve(self) -> float:
        """Seconds reserved for closing after workers are stopped."""
        return min(ENDING_S, ENDING * self.budget.seconds)


def end_after(seconds: float) -> None:
    """End this process if its event loop still runs after so many seconds: a disk or a server that it waits for hangs.

    Processes that it started end with it.
    """
    asyncio.get_running_loop().call_later(max(LEAST_S, seconds), _end, seconds)


def _end(seconds: float) -> None:
    log.error("the stop was not over in time: this process ends now, and what runs begins again", seconds=seconds)
    os._exit(1)


def notify(state: str) -> None:
    """Tell systemd how far a service is (sd_notify), if a unit of `Type=notify` started it. Never fails."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        to.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
