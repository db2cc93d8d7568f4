"""Workers on the nodes of a Ray: an actor holds each, and another one elsewhere when its node is lost or drained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import count

import structlog
from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.errors import ConfigError, UnfuseError
from unfuse.core.supervisor import Supervisor
from unfuse.launch.base import Hear, Launcher, OpenLauncher, WorkerSpec
from unfuse.launch.local import SETTLED_S, pause_after
from unfuse.launch.output import LAST_S, Output, pass_on
from unfuse.launch.ray_nodes import NodePlace, Nodes
from unfuse.planning.placement import CPU, only_cpu

LOOK_S, LOST_S, ROOM_S = 1.0, 10.0, 30.0
"""Seconds between two looks at which nodes are drained; without an answer, or a place, after which that is said."""

LOST = "the head of Ray does not answer: Ray will end this server; start both again, what was accepted is in its queue"

log = structlog.get_logger(__name__)


def at(address: str) -> OpenLauncher:
    """What opens launchers for the Ray at HOST:PORT, or one of our own. Raises ConfigError, as Nodes does."""
    return partial(RayLauncher, Nodes(address))


class RayLauncher(Launcher):
    """A set of `unfuse worker` processes, each held by an actor, which keeps it as this machine's launcher would.

    An actor that is lost is followed by another one; from a node that is drained, before its worker has finished.
    """

    def __init__(self, nodes: Nodes, specs: Sequence[WorkerSpec], hear: Hear = pass_on) -> None:
        self._nodes, self._specs, self._output = nodes, specs, Output(hear)
        self._relays: dict[NodePlace, asyncio.Task[str] | None] = {}  # what relays the lines of each, once it has begun
        self._background = Supervisor()
        self.failed = asyncio.get_running_loop().create_future()

    @override
    def start(self) -> None:
        for number in range(len(self._specs)):
            self._background.once("keeping a worker on Ray", partial(self._keep, number))
        self._background.forever("asking Ray which nodes are drained", self._look)

    @override
    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        await self._background.close()
        await asyncio.gather(*(self._end(held, drain_timeout, hurry) for held in [*self._relays]))
        self.failed.cancel()
        await asyncio.to_thread(self._output.close)

    async def _keep(self, number: int) -> None:
        """Have one actor after the other hold a worker. Only the first may fail for good: others run already."""
        deaths, clock = 0, asyncio.get_running_loop().time
        for attempt in count():
            began = clock()
            try:
                await self._run(number)
            except UnfuseError as error:
                if isinstance(error, ConfigError) and not attempt:
                    if not self.failed.done():
                        self.failed.set_exception(error)
                    return
                deaths = 1 if clock() - began >= SETTLED_S else deaths + 1
                told = {"role": self._specs[number].role, "reason": str(error)}
                log.warning("a worker on Ray is lost, starting another one", pause_s=pause_after(deaths), **told)
                await asyncio.sleep(pause_after(deaths))

    async def _run(self, number: int) -> None:
        """Run it until its node is drained. Raises ConfigError if it cannot start, TransientError for its loss."""
        spec, loop = renumbered(self._specs[number]), asyncio.get_running_loop()
        self._relays[held := self._nodes.hold(*takes(spec))] = None
        said = partial(log.warning, "a worker waits for a node of Ray with room", cpus_and_gpus=takes(spec))
        waiting = loop.call_later(ROOM_S, said)
        try:
            await held.begin(spec)
            waiting.cancel()
            relay = self._relays[held] = asyncio.create_task(self._relay(number, held))
            await asyncio.wait((relay, held.leaves), return_when=asyncio.FIRST_COMPLETED)
            if not held.leaves.done():
                raise ConfigError(relay.result())
        except UnfuseError:
            await self._end(held, 0)
            raise
        finally:
            waiting.cancel()
        log.warning("a node of Ray is drained, its worker goes elsewhere", role=spec.role, node=held.node)
        self._background.once("leaving a node of Ray", partial(self._end, held, held.leaves.result()))

    async def _relay(self, number: int, held: NodePlace) -> str:
        """Tell what a worker writes, until it is over; returns why."""
        over = None
        while over is None:
            lines, over = await held.heard()
            for line in lines:
                self._output.tell(number, line)
        return over

    async def _end(self, held: NodePlace, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        """End a worker, tell the rest of what it wrote, and give up its place; soon once `hurry` is set."""
        if held.node:
            stopping = asyncio.create_task(held.stop(drain_timeout))
            hurried = asyncio.create_task(hurry.wait()) if hurry else stopping
            await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
            for task in (stopping, hurried):
                task.cancel()
            await asyncio.gather(stopping, hurried, return_exceptions=True)
            if not stopping.cancelled():
                stopping.result()
        if relay := self._relays[held]:
            await asyncio.wait({relay}, timeout=LAST_S)
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)
        await held.release()
        self._relays.pop(held, None)

    async def _look(self) -> None:
        await asyncio.sleep(LOOK_S)
        lost = asyncio.get_running_loop().call_later(LOST_S, log.error, LOST)
        try:
            ends = await self._nodes.draining() if self._relays else {}
        finally:
            lost.cancel()
        for held in self._relays:
            if held.node in ends and not held.leaves.done():
                held.leaves.set_result(ends[held.node])


def takes(spec: WorkerSpec) -> tuple[int, int]:
    """The CPUs and GPUs of a worker: a CPU for each thread, or each rank on a GPU."""
    ranks = len(spec.device.split("+"))
    return (ranks * int(spec.flags.get("threads", 1)), 0) if only_cpu([spec.device]) else (ranks, ranks)


def renumbered(spec: WorkerSpec) -> WorkerSpec:
    """The same worker where it sees no other GPUs than those that it was given, in that order."""
    gpus = [name for name in spec.device.split("+") if name != CPU]

    def seen(one: WorkerSpec) -> WorkerSpec:
        names = [f"cuda:{gpus.index(name)}" if name in gpus else name for name in one.device.split("+")]
        return replace(one, device="+".join(names), smaller=tuple(map(seen, one.smaller)))

    return seen(spec)
