"""Drain a process within a time budget, notify systemd, and exit despite hangs."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

import structlog

from unfuse.core.supervisor import StopBudget

MIN_STOP_S = 5.0  # seconds that a stop may take even with a shorter budget, since child processes have to exit
AT_ONCE_S = 10.0  # seconds that a stop may take after a second signal
ENDING_S = 3.0  # most seconds of the budget that are reserved for closing after all workers have ended
ENDING = 0.3  # largest share of the budget that is reserved for it

#: Messages to systemd.
READY = "READY=1"
STOPPING = "STOPPING=1"

log = structlog.get_logger(__name__)


class Stoppable:
    """A service that runs until `stop`, and then drains within the drain timeout.

    `drain_timeout`: the most seconds from `stop` to the end.
    """

    def __init__(self, drain_timeout: float) -> None:
        #: Set by `stop`.
        self.stopping = asyncio.Event()

        #: The time budget of the stop. It starts anew with the first call of `stop`.
        self.budget = StopBudget(drain_timeout)

    def stop(self) -> None:
        """Start draining. A second call skips the rest of the drain timeout."""
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
    """Exit this process if its event loop still runs after these seconds.

    It does if a disk or a server hangs. Processes that it started end with it.

    `seconds`: the time limit; at least MIN_STOP_S is used.
    """
    asyncio.get_running_loop().call_later(max(MIN_STOP_S, seconds), _end, seconds)


def _end(seconds: float) -> None:
    """Log the timeout, and exit without any cleanup, which might hang too."""
    log.error("the stop timed out: this process exits now, and running tasks begin again", seconds=seconds)
    os._exit(1)


def notify(state: str) -> None:
    """Send the state of this process to systemd (sd_notify). Never fails.

    `state`: READY or STOPPING.

    Nothing is sent unless a unit of `Type=notify` runs this process.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        # A leading @ stands for the abstract socket namespace.
        sender.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
