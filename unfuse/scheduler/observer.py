"""Who hears what a scheduler decides."""

from __future__ import annotations

from collections.abc import Mapping

from unfuse.core.messages import Memory, TransferStats
from unfuse.core.request import RequestContext


class Observer:
    """Hears of each transition once, from the scheduler that made it; does nothing of itself."""

    def announced(self, context: RequestContext) -> None:
        """A request is about to be queued: nothing of it can be leased yet."""

    def refused(self, context: RequestContext) -> None:
        """What was announced was not accepted."""

    def submitted(self, context: RequestContext) -> None:
        """A request was accepted; no repeat of an earlier one."""

    def ended(self, context: RequestContext) -> None:
        """A request is over."""

    def billed(self, context: RequestContext, seconds: Mapping[str, float]) -> None:
        """So many seconds of each device more are on the bill of a request that was over already."""

    def written_off(self, context: RequestContext, seconds: Mapping[str, float]) -> None:
        """Attempts at a request that were lost have used so many seconds of each device more."""

    def dispatched(self, pool: str) -> None:
        """A task was given to a worker."""

    def lease_expired(self, pool: str) -> None:
        """A worker was silent for too long; its task is another's."""

    def moved(self, engine: str, moved: TransferStats) -> None:
        """A worker has pulled something from another node."""

    def began_to_grow(self, model: str, pieces: int, seconds: float) -> None:
        """The first pieces of an output are recorded, so many seconds after its request was accepted."""

    def grew(self, model: str, pieces: int, seconds: float | None) -> None:
        """So many pieces more, so many seconds after those before them; None where these are not known here."""

    def swapped(self, holds: str, seconds: float) -> None:
        """A worker has loaded that set of weights in the place of another one, which took so many seconds."""

    def retracted(self, times: int) -> None:
        """So often, texts gave up keys and values for others on a worker."""

    def leaked(self, role: str, memory: Memory, nbytes: int) -> None:
        """An idle worker of that role reported a memory leak of so many bytes."""

    def told(self, outcome: str) -> None:
        """A webhook was called: it heard, the call failed, or it was given up with that."""

    def looked_up(self, hits: int, misses: int) -> None:
        """So many outputs were in the encoder cache for an accepted request, and so many were not."""
