"""What goes wrong again and again is told now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from unfuse.core.errors import UnfuseError

EVERY_S = 1.0
"""A cause is told at most so often."""

log = structlog.get_logger(__name__)


class Causes:
    """Tells of each cause, which is what failed and the type of error it failed with, at most once in EVERY_S seconds.

    An error that unfuse raises on purpose is its sentence; any other is a defect, and told with its traceback.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._told: dict[tuple[str, type[Exception]], tuple[float, int]] = {}

    def tell(self, what: str, error: Exception, **about: object) -> None:
        """Log that `what` failed, and how often it did since that was last told."""
        key, now = (what, type(error)), self._now()
        told, since = self._told.get(key, (now - EVERY_S, 0))
        if now - told < EVERY_S:
            self._told[key] = told, since + 1
            return
        self._told[key] = now, 0
        if since:
            about["times_since"] = since
        if isinstance(error, UnfuseError):
            log.warning("failed, going on", doing=what, reason=str(error), **about)
        else:
            log.error("failed, going on", doing=what, exc_info=error, **about)
