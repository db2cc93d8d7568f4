"""The heartbeats of a worker, and the counts that they carry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from unfuse.core.messages import Heartbeat, HeartbeatReply
from unfuse.core.task import Claim, Lease
from unfuse.core.worker_status import WorkerStatus
from unfuse.worker.compute_messages import Leak
from unfuse.worker.executor import Executor
from unfuse.worker.link import HEARTBEAT_TIMEOUT_S, SchedulerLink
from unfuse.worker.objects import WorkerLeakCheck, WorkerObjects


class Heartbeats:
    """Sends the heartbeats of a worker.

    What happened since the last heartbeat is counted once: a heartbeat that reached no scheduler puts its counts back.

    - `active`: the leases of the worker's tasks.
    - `wait_s`: seconds between two heartbeats.
    """

    def __init__(
        self,
        link: SchedulerLink,
        executor: Executor,
        objects: WorkerObjects,
        active: Mapping[Claim, Lease],
        wait_s: float,
    ) -> None:
        self._link = link
        self._executor, self._objects = executor, objects
        self._active, self._wait_s = active, wait_s
        self._leaks = WorkerLeakCheck()
        self._ended_claims = set[Claim]()  # claims that the scheduler ended and that compute is still to drop

    def record_leaks(self, leaks: Iterable[Leak]) -> None:
        """Log leaks of the compute processes and count them."""
        self._leaks.record(leaks)

    async def send(self, status: WorkerStatus, *, idle: bool) -> HeartbeatReply | None:
        """Send one heartbeat. Returns the reply, or None without one.

        `idle`: whether the worker has no task and has reported the end of all tasks.
        """
        objects, executor = self._objects, self._executor
        self._leaks.check(objects, idle=idle and executor.ready)
        heartbeat = Heartbeat(
            claims=tuple(self._active.keys() - self._ended_claims),
            stored_requests=tuple(objects.stored_requests()),
            wait=self._wait_s,
            status=status,
            transfers=objects.copies.counters.take_counts(),
            retracted=executor.retracted,
            leaks=self._leaks.take_counts(),
            device_errors=executor.health.errors.take_counts(),
        )
        executor.retracted = 0
        try:
            reply = await self._link.once(heartbeat, HEARTBEAT_TIMEOUT_S)
        except TimeoutError:
            return None  # a scheduler that answers late has counted these numbers; they must not be counted twice
        except OSError:
            self._put_back(heartbeat)
            return None
        if not isinstance(reply, HeartbeatReply):
            await asyncio.sleep(self._wait_s)
            return None
        self._ended_claims = (self._ended_claims | set(reply.ended_claims)) & self._active.keys()
        return reply

    def _put_back(self, heartbeat: Heartbeat) -> None:
        """Count again what a heartbeat could not report."""
        self._objects.copies.counters.put_back(heartbeat.transfers)
        self._leaks.put_back(heartbeat.leaks)
        self._executor.retracted += heartbeat.retracted
        for errors in heartbeat.device_errors:
            self._executor.health.errors.add(errors)
