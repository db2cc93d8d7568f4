"""The stop of a process: how its time is divided, and its end, whatever hangs."""

from __future__ import annotations

import asyncio
import os

import structlog

from unfuse.core.time_budget import StopBudget

LEAST_S = 5.0  # seconds that a stop may take whatever its budget, since processes have to end, too
AT_ONCE_S = 10.0  # seconds that a stop may take that was hurried by a second signal
ENDING_S, ENDING = 3.0, 0.3  # seconds that closing takes once all workers have ended, and its share of a short budget

log = structlog.get_logger(__name__)


def share_of(budget: StopBudget) -> float:
    """Return the seconds to leave for closing when workers are told to stop."""
    return min(ENDING_S, ENDING * budget.seconds)


def end_after(seconds: float) -> None:
    """End this process if its event loop still runs after so many seconds: a disk or a server that it waits for hangs.

    Processes that it started end with it.
    """
    asyncio.get_running_loop().call_later(max(LEAST_S, seconds), _end, seconds)


def _end(seconds: float) -> None:
    log.error("the stop was not over in time: this process ends now, and what runs begins again", seconds=seconds)
    os._exit(1)
