"""Drain a process within a time budget: notify systemd, and exit even if something hangs."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

import structlog

from unfuse.core.supervisor import StopBudget

MIN_STOP_S = 5.0  # seconds that a stop may always take, whatever its budget, since child processes have to exit, too
AT_ONCE_S = 10.0  # seconds that a stop may take after a second signal
ENDING_S = 3.0  # seconds reserved for closing after all workers have ended
ENDING = 0.3  # the share of a short stop budget that is reserved instead

#: Messages to systemd.
READY = "READY=1"
STOPPING = "STOPPING=1"

log = structlog.get_logger(__name__)


class Stoppable:
    """Something that runs until `stop`, and then drains within the drain timeout."""

    def __init__(self, drain_timeout: float) -> None:
        #: Set once it is to stop.
        self.stopping = asyncio.Event()

        #: The time left for the stop.
        self.budget = StopBudget(drain_timeout)

    def stop(self) -> None:
        """Start draining, within the drain timeout. A second call skips the rest of it."""
        if self.stopping.is_set():
            self.budget.hurry.set()
        else:
            self.budget = StopBudget(self.budget.seconds)
        self.stopping.set()

    @property
    def reserve(self) -> float:
        """Seconds of the budget that are reserved for closing after the workers are stopped."""
        return min(ENDING_S, ENDING * self.budget.seconds)


def end_after(seconds: float) -> None:
    """Exit this process if its event loop still runs after `seconds`, at least LEAST_S.

    Then a disk or a server hangs that it waits for. Processes that it started end with it.
    """
    asyncio.get_running_loop().call_later(max(MIN_STOP_S, seconds), _end, seconds)


def _end(seconds: float) -> None:
    log.error("the stop timed out: this process exits now, and running tasks begin again", seconds=seconds)
    os._exit(1)


def notify(state: str) -> None:
    """Send the state of a service to systemd (sd_notify). Never fails.

    Without a unit of `Type=notify` nothing is sent.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        # A leading @ stands for the abstract socket namespace.
        sender.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
