"""Workers on the nodes of a Ray: an actor holds each, and another one elsewhere when its node is lost or drained."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import Any, TextIO, cast

import structlog
from msgspec.structs import replace
from typing_extensions import override

from unfuse.core.errors import ConfigError, TransientError, UnfuseError, UsageError
from unfuse.core.supervisor import Supervisor, first
from unfuse.launch.base import Hear, Launcher, OpenLauncher, WorkerSpec
from unfuse.launch.local import LAST_S, SETTLED_S, WAITING, LocalLauncher, OutputPump, pass_on, pause_after
from unfuse.planning.placement import CPU, only_cpu
from unfuse.worker.records import write_records

LOOK_S, LOST_S, ROOM_S = 1.0, 10.0, 30.0
"""Seconds between two looks at which nodes are drained; without an answer, or a place, after which that is said."""

LOST = "the head of Ray does not answer: Ray will end this server; start both again, what was accepted is in its queue"

log = structlog.get_logger(__name__)


def at(address: str) -> OpenLauncher:
    """What opens launchers for the Ray at HOST:PORT, or one of our own. Raises ConfigError, as Nodes does."""
    return partial(RayLauncher, RayCluster(address))


class RayLauncher(Launcher):
    """A set of `unfuse worker` processes, each held by an actor, which keeps it as this machine's launcher would.

    An actor that is lost is followed by another one; from a node that is drained, before its worker has finished.
    """

    def __init__(self, nodes: RayCluster, specs: Sequence[WorkerSpec], hear: Hear = pass_on) -> None:
        self._nodes, self._specs, self._output = nodes, specs, OutputPump(hear)
        self._relays: dict[NodeSlot, asyncio.Task[str] | None] = {}  # what relays the lines of each, once it has begun
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

    async def _relay(self, number: int, held: NodeSlot) -> str:
        """Tell what a worker writes, until it is over; returns why."""
        over = None
        while over is None:
            lines, over = await held.heard()
            for line in lines:
                self._output.tell(number, line)
        return over

    async def _end(self, held: NodeSlot, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        """End a worker, tell the rest of what it wrote, and give up its place; soon once `hurry` is set."""
        if held.node:
            await first(held.stop(drain_timeout), *([hurry.wait()] if hurry else []))
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


QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
"""What Ray reads as it is imported: no telemetry, and no stack printed when somebody ends this process by SIGTERM."""

LOOPBACK, HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}, ("", "127.0.0.1", "localhost")
"""What has Ray listen on loopback, on Linux too, and not on all addresses; and the hosts for which it does."""

ENDING_S, LEAVING_S = 15.0, 600.0
"""Seconds beside the drain timeout until a worker must have ended; and for leaving a node that gives no time itself."""


class NodeSlot:
    """A place on one node, whichever has room, with an actor that is to hold a worker there."""

    def __init__(self, cpus: float, gpus: int) -> None:
        self.node = ""  # the id of the node, once there is one
        self.leaves: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Set to the seconds within which the worker is to leave it."""
        self._made = asyncio.ensure_future(_answer(asyncio.to_thread(_make, cpus, gpus)))

    async def begin(self, spec: WorkerSpec) -> None:
        """Start the worker as soon as there is room. Raises TransientError, as `heard` does, once somebody is gone."""
        self.node = await self._ask("node")
        await self._ask("begin", spec)

    async def heard(self) -> tuple[list[bytes], str | None]:
        """What the worker wrote since, as RayWorker says."""
        lines, over = await self._ask("heard")
        return lines, over

    async def stop(self, drain_timeout: float) -> None:
        """Have the worker finish what it runs, and end, if its node is there."""
        with suppress(TransientError, TimeoutError):
            async with asyncio.timeout(drain_timeout + ENDING_S):
                await self._ask("stop", drain_timeout)

    async def release(self) -> None:
        """Give up actor and place."""
        with suppress(TransientError):
            await _answer(asyncio.to_thread(_free, *await self._made))

    async def _ask(self, what: str, *told: object) -> Any:
        _, actor = await asyncio.shield(self._made)
        return await _answer(getattr(actor, what).remote(*told))


class RayCluster:
    """The Ray at HOST:PORT; without an address one of our own, for this machine alone, which ends with us.

    To be made by the main thread: what Ray starts ends with the one that did. Raises ConfigError if it cannot be used.
    """

    def __init__(self, address: str) -> None:
        self._address, (host, _, port) = address, address.rpartition(":")
        if address and not (host and port.isdecimal()):
            raise UsageError(f"--launcher ray:{address} is no address: write ray:HOST:PORT, or ray")
        if find_spec("ray") is None:
            raise ConfigError("--launcher ray needs the library Ray: pip install 'unfuse[ray]'")
        own = {} if address else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        for name, value in (QUIET | own | (LOOPBACK if host in HERE else {})).items():
            os.environ.setdefault(name, value)
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(address or "local", include_dashboard=False, configure_logging=False, log_to_driver=False)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(f"--launcher ray: {address or 'Ray'} cannot be used: {error}") from error

    def hold(self, cpus: int, gpus: int) -> NodeSlot:
        """Ask for a place. In a Ray of our own CPUs are nearly free: it was planned who shares them."""
        return NodeSlot(cpus if self._address else cpus / 1000, gpus)

    async def draining(self) -> dict[str, float]:
        """The nodes that are to be left, and in how many seconds. Raises TransientError."""
        found: dict[str, float] = await _answer(asyncio.to_thread(_draining))
        return found


def _make(cpus: float, gpus: int) -> tuple[Any, Any]:
    import ray

    place = ray.util.placement_group([{"CPU": cpus} | ({"GPU": gpus} if gpus else {})], strategy="STRICT_PACK")
    there = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(place)
    held = ray.remote(RayWorker).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy=there)
    return place, held.remote()


def _free(place: Any, actor: Any) -> None:
    import ray

    ray.kill(actor)
    ray.util.remove_placement_group(place)


def _draining() -> dict[str, float]:
    from ray._private.state import state  # there is no public way; Ray's own libraries ask so

    ends = state.get_draining_nodes()
    return {node: max(0.0, end / 1000 - time.time()) if end else LEAVING_S for node, end in ends.items()}


async def _answer(asked: Awaitable[Any]) -> Any:
    """What Ray answers. Raises TransientError: it, a node or an actor is gone."""
    import ray

    try:
        return await asked
    except (OSError, RuntimeError, ray.exceptions.RayError) as error:
        raise TransientError(str(error).strip().partition("\n")[0]) from error


class RayWorker:
    """A worker as this machine's launcher keeps it. Ray carries how it is started and its lines, never a tensor."""

    def __init__(self) -> None:
        self._lines, self._news = deque[bytes](maxlen=WAITING), asyncio.Event()
        self._launcher: LocalLauncher | None = None
        self._over: str | None = None
        self._ending, self._loop = asyncio.Lock(), asyncio.get_running_loop()

    async def node(self) -> str:
        """The id of its node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    async def begin(self, spec: WorkerSpec) -> None:
        """Start the worker. What this process logs is told as its lines are."""
        write_records(cast(TextIO, self))
        self._launcher = LocalLauncher([spec], self._hear)
        self._launcher.failed.add_done_callback(lambda _: self._news.set())
        self._launcher.start()

    async def heard(self) -> tuple[list[bytes], str | None]:
        """Lines since the last call, once there are some; with the last ones why it is over, "" after `stop`."""
        await self._news.wait()
        self._news.clear()
        failed = self._launcher.failed if self._launcher else None
        if failed and failed.done() and not failed.cancelled():
            await self.stop(0, str(failed.exception()))
        return [self._lines.popleft() for _ in range(len(self._lines))], self._over

    def write(self, text: str) -> None:
        """Hear a line of this process's log, as a stream does."""
        self._hear(0, text.rstrip().encode())

    def flush(self) -> None:
        """Nothing is held back."""

    async def stop(self, drain_timeout: float, why: str = "") -> None:
        """End the worker as a launcher does."""
        async with self._ending:
            if self._launcher and self._over is None:
                await self._launcher.stop(drain_timeout)
                self._over = why
        self._news.set()

    def _hear(self, _: int, line: bytes) -> None:
        self._lines.append(line)
        self._loop.call_soon_threadsafe(self._news.set)
