"""Callbacks for scheduler events, for example for metrics."""

from __future__ import annotations

from collections.abc import Mapping

from unfuse.core.messages import Memory, TransferStats, WorkerInfo
from unfuse.core.request import RequestContext
from unfuse.core.worker_status import DeviceErrors


class Observer:
    """Base class of scheduler observers, whose methods do nothing by default.

    Each method is called once per event. Only the scheduler that made a transition calls its observers. Times are in
    seconds.
    """

    def on_announced(self, context: RequestContext) -> None:
        """A request is about to be queued. None of its tasks can be leased yet."""

    def on_refused(self, context: RequestContext) -> None:
        """An announced request was refused by admission control."""

    def on_submitted(self, context: RequestContext) -> None:
        """A new request was accepted. Repeats of an earlier request are not reported."""

    def on_ended(self, context: RequestContext) -> None:
        """A request has ended: its status is terminal."""

    def on_billed(self, context: RequestContext, seconds: Mapping[str, float]) -> None:
        """Device seconds, by device, were added to the bill of a request that had ended."""

    def on_lost_device_time(self, context: RequestContext, seconds: Mapping[str, float]) -> None:
        """Lost attempts at a request used device seconds, by device, which are not billed."""

    def on_dispatched(self, pool: str) -> None:
        """A task of this pool was leased to a worker."""

    def on_lease_expired(self, pool: str) -> None:
        """A lease on a task of this pool expired because its worker sent no heartbeat.

        The task is retried, or its request fails if the task has no retries left.
        """

    def on_transfer(self, engine: str, moved: TransferStats) -> None:
        """A worker pulled objects from another node with this transfer engine."""

    def on_first_delta(self, model: str, pieces: int, seconds: float) -> None:
        """The first `pieces` chunks of an output were recorded, `seconds` after its request was accepted."""

    def on_deltas(self, model: str, pieces: int, seconds: float | None) -> None:
        """Another `pieces` chunks of an output were recorded, `seconds` after the previous ones.

        `seconds` is None if another scheduler recorded the previous chunks.
        """

    def on_swapped(self, holds: str, seconds: float) -> None:
        """A worker loaded the model `holds` in place of another one. Loading took `seconds`."""

    def on_retracted(self, times: int) -> None:
        """A worker retracted texts `times` times: it freed their KV cache for other texts."""

    def on_leaked(self, role: str, memory: Memory, nbytes: int) -> None:
        """An idle worker of this role reported a memory leak of `nbytes` bytes."""

    def on_device_errors(self, worker: WorkerInfo, errors: DeviceErrors) -> None:
        """A device of this worker had errors."""

    def on_webhook_attempt(self, outcome: str) -> None:
        """A webhook was called, with this outcome of the delivery attempt.

        `outcome`: "delivered", "failed" (to be retried) or "given_up" (failed for good).
        """

    def on_cache_lookup(self, hits: int, misses: int) -> None:
        """The encoder cache was searched for an accepted request: the numbers of hits and misses."""
