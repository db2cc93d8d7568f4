"""The nodes of a Ray and places on them. Only here and in the actor is Ray known."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from unfuse.core.errors import ConfigError, TransientError, UsageError
from unfuse.launch.base import WorkerSpec
from unfuse.launch.ray_worker import RayWorker

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
"""What Ray reads as it is imported: no telemetry, and no stack printed when somebody ends this process by SIGTERM."""

LOOPBACK, HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}, ("", "127.0.0.1", "localhost")
"""What has Ray listen on loopback, on Linux too, and not on all addresses; and the hosts for which it does."""

ENDING_S, LEAVING_S = 15.0, 600.0
"""Seconds beside the drain timeout until a worker must have ended; and for leaving a node that gives no time itself."""


class NodePlace:
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


class Nodes:
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

    def hold(self, cpus: int, gpus: int) -> NodePlace:
        """Ask for a place. In a Ray of our own CPUs are nearly free: it was planned who shares them."""
        return NodePlace(cpus if self._address else cpus / 1000, gpus)

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
