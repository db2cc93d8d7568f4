"""Who hears what a scheduler decides."""

from __future__ import annotations

from typing import Protocol

from unfuse.core.messages import Moved
from unfuse.core.request import RequestContext


class Observer(Protocol):
    """Hears of each transition once, from the scheduler that made it. This one does nothing."""

    def submitted(self, context: RequestContext) -> None:
        """A request was accepted; no repeat of an earlier one."""
        return

    def ended(self, context: RequestContext) -> None:
        """A request is over."""
        return

    def dispatched(self, pool: str) -> None:
        """A task was given to a worker."""
        return

    def lease_expired(self, pool: str) -> None:
        """A worker was silent for too long; its task is another's."""
        return

    def moved(self, engine: str, moved: Moved) -> None:
        """A worker has pulled something from another node."""
        return

    def looked_up(self, hits: int, misses: int) -> None:
        """So many outputs were in the encoder cache for an accepted request, and so many were not."""
        return


class Nobody(Observer):
    """Hears nothing."""
