"""Logs errors that repeat, but not each time."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from unfuse.core.errors import UnfuseError
from unfuse.core.log_throttle import LogThrottle

log = structlog.get_logger(__name__)


class RepeatedErrors:
    """Logs each cause (what failed, and the type of the error) at most once in LOG_EVERY_S seconds.

    An UnfuseError is logged as its message. Any other error is a defect, and is logged with its traceback.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._throttle = LogThrottle(now)

    def log(self, what: str, error: Exception, **about: object) -> None:
        """Log that `what` failed with this error, and how often since the last line; or only count it."""
        times = self._throttle.count_if_due(f"{what}: {type(error).__name__}")
        if times and isinstance(error, UnfuseError):
            log.warning("failed, going on", doing=what, reason=str(error), times=times, **about)
        elif times:
            log.error("failed, going on", doing=what, exc_info=error, times=times, **about)
