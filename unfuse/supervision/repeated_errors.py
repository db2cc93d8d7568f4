"""What goes wrong again and again is told now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from unfuse.core.errors import UnfuseError
from unfuse.core.token_bucket import Seldom

log = structlog.get_logger(__name__)


class RepeatedErrors:
    """Tells of each cause, which is what failed and the type of error it failed with, at most once in TELL_S seconds.

    An error that unfuse raises on purpose is its sentence; any other is a defect, and told with its traceback.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._seldom = Seldom(now)

    def tell(self, what: str, error: Exception, **about: object) -> None:
        """Log that `what` failed, and how often it did since that was last told."""
        times = self._seldom.times(f"{what}: {type(error).__name__}")
        if times and isinstance(error, UnfuseError):
            log.warning("failed, going on", doing=what, reason=str(error), times=times, **about)
        elif times:
            log.error("failed, going on", doing=what, exc_info=error, times=times, **about)
