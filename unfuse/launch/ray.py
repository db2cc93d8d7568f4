"""The Ray launcher: runs workers in actors, and moves them from lost and drained nodes."""

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
from unfuse.core.supervisor import Supervisor, first_completed
from unfuse.launch.base import Launcher, LineSink, OpenLauncher, WorkerSpec
from unfuse.launch.local import LAST_S, STABLE_S, WAITING, LocalLauncher, OutputPump, pause_after, write_line
from unfuse.planning.placement import CPU, is_cpu_only
from unfuse.worker.records import write_records

#: Seconds between two checks for drained nodes.
LOOK_S = 1.0
#: Seconds until a log line reports that Ray does not answer.
LOST_S = 10.0
#: Seconds until a log line reports that Ray has no room for a worker.
ROOM_S = 30.0

#: Environment that Ray reads when it is imported: no telemetry, and no stack trace when SIGTERM ends this process.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}

#: Environment that makes Ray listen on loopback only, despite its name also on Linux. The hosts for which it is set.
LOOPBACK, HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}, ("", "127.0.0.1", "localhost")

#: Seconds after the drain timeout until a worker must have ended, and seconds to leave a node without a drain deadline.
ENDING_S, LEAVING_S = 15.0, 600.0

LOST = "the Ray head node does not answer, and this server will stop: restart both, accepted requests are in the queue"

log = structlog.get_logger(__name__)


def ray_launchers(address: str) -> OpenLauncher:
    """Return the factory of launchers on one Ray cluster. Raises ConfigError as `RayCluster` does.

    address: HOST:PORT, or "" for a new cluster of this machine alone.
    """
    return partial(RayLauncher, RayCluster(address))


class RayLauncher(Launcher):
    """Runs each worker in a Ray actor, whose local launcher restarts it when it dies.

    A lost actor is replaced by a new one. When a node is drained, the new actor starts before the old worker has
    finished its tasks, so that a pool with one worker is never empty.

    on_line: called with each output line of a worker.
    """

    def __init__(self, cluster: RayCluster, specs: Sequence[WorkerSpec], on_line: LineSink = write_line) -> None:
        self._cluster = cluster
        self._specs = specs
        self._output = OutputPump(on_line)
        #: By slot, the task that relays its worker's lines. None before the worker has started.
        self._relays: dict[NodeSlot, asyncio.Task[str] | None] = {}
        self._background = Supervisor()
        self.failed = asyncio.get_running_loop().create_future()

    @override
    def start(self) -> None:
        for number in range(len(self._specs)):
            self._background.start("running a worker on Ray", partial(self._run_worker, number))
        self._background.start_loop("watching Ray for drained nodes", self._watch_drains)

    @override
    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        await self._background.close()
        await asyncio.gather(*(self._end_worker(slot, drain_timeout, hurry) for slot in [*self._relays]))
        self.failed.cancel()
        await asyncio.to_thread(self._output.close)

    async def _run_worker(self, number: int) -> None:
        """Run a worker in one actor after another.

        A ConfigError of the first one sets `failed` and ends this. Later errors are retried.
        """
        deaths = 0
        clock = asyncio.get_running_loop().time
        for attempt in count():
            started_at = clock()
            try:
                await self._run_once(number)
            except UnfuseError as error:
                if isinstance(error, ConfigError) and not attempt:
                    if not self.failed.done():
                        self.failed.set_exception(error)
                    return
                deaths = 1 if clock() - started_at >= STABLE_S else deaths + 1
                fields = {"role": self._specs[number].role, "reason": str(error)}
                log.warning("a worker on Ray is lost, starting a new one", pause_s=pause_after(deaths), **fields)
                await asyncio.sleep(pause_after(deaths))

    async def _run_once(self, number: int) -> None:
        """Run a worker in one actor until its node is drained.

        Raises ConfigError if the worker cannot start, and TransientError if its actor or node is lost.
        """
        spec = renumbered(self._specs[number])  # Ray selects the GPUs
        slot = self._cluster.reserve(*required_resources(spec))
        self._relays[slot] = None
        log_wait = partial(
            log.warning, "a worker waits for a Ray node with free resources", cpus_and_gpus=required_resources(spec)
        )
        wait_timer = asyncio.get_running_loop().call_later(ROOM_S, log_wait)
        try:
            await slot.start_worker(spec)
            wait_timer.cancel()
            relay = self._relays[slot] = asyncio.create_task(self._relay(number, slot))
            await asyncio.wait((relay, slot.leaves), return_when=asyncio.FIRST_COMPLETED)
            if not slot.leaves.done():  # the worker could not start: a local launcher restarts one that has started
                raise ConfigError(relay.result())
        except UnfuseError:
            await self._end_worker(slot, 0)
            raise
        finally:
            wait_timer.cancel()

        # The old worker drains in the background, while the caller starts the next one on another node.
        log.warning("a Ray node is draining, moving its worker", role=spec.role, node=slot.node)
        self._background.start(
            "ending a worker on a drained Ray node", partial(self._end_worker, slot, slot.leaves.result())
        )

    async def _relay(self, number: int, slot: NodeSlot) -> str:
        """Pass on a worker's lines until the worker ends. Returns the reason of its end."""
        end_reason = None
        while end_reason is None:
            lines, end_reason = await slot.read_lines()
            for line in lines:
                self._output.put(number, line)
        return end_reason

    async def _end_worker(self, slot: NodeSlot, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        """Stop a worker, pass on its last lines, and release its slot.

        When `hurry` is set, this waits no longer for the worker, which ends with its actor.
        """
        if slot.node:
            await first_completed(slot.stop(drain_timeout), *([hurry.wait()] if hurry else []))
        if relay := self._relays[slot]:
            await asyncio.wait({relay}, timeout=LAST_S)
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)
        await slot.release()
        self._relays.pop(slot, None)

    async def _watch_drains(self) -> None:
        """Wait for LOOK_S seconds, then set `leaves` of all slots on draining nodes."""
        await asyncio.sleep(LOOK_S)
        lost_timer = asyncio.get_running_loop().call_later(LOST_S, log.error, LOST)
        try:
            seconds_left = await self._cluster.draining_nodes() if self._relays else {}
        finally:
            lost_timer.cancel()
        for slot in self._relays:
            if slot.node in seconds_left and not slot.leaves.done():
                slot.leaves.set_result(seconds_left[slot.node])


def required_resources(spec: WorkerSpec) -> tuple[int, int]:
    """Return the numbers of CPUs and GPUs that a worker needs.

    On CPUs, each thread of each rank needs a CPU. On GPUs, each rank needs a CPU and a GPU.
    """
    ranks = len(spec.device.split("+"))
    return (ranks * int(spec.flags.get("threads", 1)), 0) if is_cpu_only([spec.device]) else (ranks, ranks)


def renumbered(spec: WorkerSpec) -> WorkerSpec:
    """Return the spec with its GPUs numbered from 0.

    The process of its actor sees only these GPUs.
    """
    gpus = [name for name in spec.device.split("+") if name != CPU]

    def renumber(spec: WorkerSpec) -> WorkerSpec:
        devices = [f"cuda:{gpus.index(name)}" if name in gpus else name for name in spec.device.split("+")]
        return replace(spec, device="+".join(devices), smaller=tuple(map(renumber, spec.smaller)))

    return renumber(spec)


class NodeSlot:
    """Reserved CPUs and GPUs on one node, with an actor for one worker."""

    def __init__(self, cpus: float, gpus: int) -> None:
        #: Id of the node. "" while no node has room.
        self.node = ""
        #: Set when the node is drained, to the seconds within which the worker must leave the node.
        self.leaves: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._actor_future = asyncio.ensure_future(_await_ray(asyncio.to_thread(_create_actor, cpus, gpus)))

    async def start_worker(self, spec: WorkerSpec) -> None:
        """Start the worker as soon as a node has room.

        Raises TransientError if the actor or node is lost.
        """
        self.node = await self._call("node")
        await self._call("start_worker", spec)

    async def read_lines(self) -> tuple[list[bytes], str | None]:
        """Wait for output, then return the worker's new lines and the reason of its end.

        The result is that of `RayWorker.read_lines`. Raises TransientError if the actor or node is lost.
        """
        lines, end_reason = await self._call("read_lines")
        return lines, end_reason

    async def stop(self, drain_timeout: float) -> None:
        """Drain and stop the worker, if its node still exists."""
        with suppress(TransientError, TimeoutError):
            async with asyncio.timeout(drain_timeout + ENDING_S):
                await self._call("stop", drain_timeout)

    async def release(self) -> None:
        """Remove the actor and release its CPUs and GPUs."""
        with suppress(TransientError):
            await _await_ray(asyncio.to_thread(_remove_actor, *await self._actor_future))

    async def _call(self, method: str, *arguments: object) -> Any:
        """Call a method of the `RayWorker` in the actor."""
        _, actor = await asyncio.shield(self._actor_future)
        return await _await_ray(getattr(actor, method).remote(*arguments))


class RayCluster:
    """A connection to a Ray cluster.

    Raises UsageError for a malformed address, and ConfigError if Ray is not installed or cannot be reached.

    It must be created by the main thread, since processes that Ray starts end with the thread that started them.

    address: HOST:PORT; "" starts a new cluster on this machine alone, which ends with this process.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        host, _, port = address.rpartition(":")
        if address and not (host and port.isdecimal()):
            raise UsageError(f"--launcher ray:{address} is not an address: use ray:HOST:PORT, or ray")
        if find_spec("ray") is None:
            raise ConfigError("--launcher ray requires the package ray: pip install 'unfuse[ray]'")

        token = {} if address else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        for name, value in (QUIET | token | (LOOPBACK if host in HERE else {})).items():
            os.environ.setdefault(name, value)  # the user's own values take precedence
        import ray  # after its environment is set

        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(address or "local", include_dashboard=False, configure_logging=False, log_to_driver=False)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(f"--launcher ray cannot connect to {address or 'Ray'}: {error}") from error

    def reserve(self, cpus: int, gpus: int) -> NodeSlot:
        """Reserve CPUs and GPUs for one worker, on any node with room.

        In a cluster that this process started, only a thousandth of the CPUs is reserved, since the plan may place
        more workers on this machine than it has CPUs.
        """
        return NodeSlot(cpus if self._address else cpus / 1000, gpus)

    async def draining_nodes(self) -> dict[str, float]:
        """Return the seconds until each draining node is gone, by the node's id.

        Raises TransientError if Ray is lost.
        """
        nodes: dict[str, float] = await _await_ray(asyncio.to_thread(_list_draining_nodes))
        return nodes


def _create_actor(cpus: float, gpus: int) -> tuple[Any, Any]:
    """Return a new placement group and a new actor in it."""
    import ray

    group = ray.util.placement_group([{"CPU": cpus} | ({"GPU": gpus} if gpus else {})], strategy="STRICT_PACK")
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    actor = ray.remote(RayWorker).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy=strategy)
    return group, actor.remote()


def _remove_actor(group: Any, actor: Any) -> None:
    """Kill an actor and remove its placement group."""
    import ray

    ray.kill(actor)
    ray.util.remove_placement_group(group)


def _list_draining_nodes() -> dict[str, float]:
    """Return the seconds until each draining node is gone, by the node's id."""
    from ray._private.state import state  # there is no public API; Ray's own libraries use this one

    deadlines = state.get_draining_nodes()
    return {
        node: max(0.0, deadline_ms / 1000 - time.time()) if deadline_ms else LEAVING_S
        for node, deadline_ms in deadlines.items()
    }


async def _await_ray(call: Awaitable[Any]) -> Any:
    """Return the result of a call of Ray.

    Raises TransientError, with the first line of Ray's error, if Ray, a node or an actor is lost.
    """
    import ray

    try:
        return await call
    except (OSError, RuntimeError, ray.exceptions.RayError) as error:
        raise TransientError(str(error).strip().partition("\n")[0]) from error


class RayWorker:
    """The Ray actor of one worker, which a local launcher runs.

    Ray transports the worker's spec and its output lines, never a tensor.
    """

    def __init__(self) -> None:
        #: Output lines that `read_lines` has not returned yet. Beyond WAITING, the oldest are dropped.
        self._lines = deque[bytes](maxlen=WAITING)
        #: Set when there are new lines, or the worker failed or stopped.
        self._changed = asyncio.Event()
        self._launcher: LocalLauncher | None = None
        #: Why the worker ended. None while it runs.
        self._end_reason: str | None = None
        #: Held during `stop`, which `read_lines` may call too, since a launcher is stopped only once.
        self._stop_lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    async def node(self) -> str:
        """Return the id of the actor's node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    async def start_worker(self, spec: WorkerSpec) -> None:
        """Start the worker.

        Log lines of this actor's process are passed on like the worker's lines.
        """
        write_records(cast(TextIO, self))
        self._launcher = LocalLauncher([spec], self._add_line)
        self._launcher.failed.add_done_callback(lambda _: self._changed.set())
        self._launcher.start()

    async def read_lines(self) -> tuple[list[bytes], str | None]:
        """Wait for output, then return the new lines and the reason of the worker's end.

        The reason is None while the worker runs, and "" after `stop`.
        """
        await self._changed.wait()
        self._changed.clear()
        failed = self._launcher.failed if self._launcher else None
        if failed and failed.done() and not failed.cancelled():
            await self.stop(0, str(failed.exception()))
        return [self._lines.popleft() for _ in range(len(self._lines))], self._end_reason

    def write(self, text: str) -> None:
        """Pass on a line of this process's log.

        Together with `flush`, this method makes the object a text stream.
        """
        self._add_line(0, text.rstrip().encode())

    def flush(self) -> None:
        """Do nothing: lines are not buffered."""

    async def stop(self, drain_timeout: float, reason: str = "") -> None:
        """Stop the worker as a launcher does.

        `reason`: the reason that `read_lines` returns.
        """
        async with self._stop_lock:
            if self._launcher and self._end_reason is None:
                await self._launcher.stop(drain_timeout)
                self._end_reason = reason
        self._changed.set()

    def _add_line(self, _: int, line: bytes) -> None:
        """Add a line for `read_lines`. Any thread may call this."""
        self._lines.append(line)
        self._loop.call_soon_threadsafe(self._changed.set)
