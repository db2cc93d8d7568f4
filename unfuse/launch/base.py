"""The launcher port: how the workers of a service are started, kept running and ended.

Whoever writes a launcher runs `unfuse.testing.check_launcher` on it: the suite is the contract in executable form.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import msgspec

Hear = Callable[[int, bytes], None]  # called with a worker's number and a line that it wrote, without the line's end


class WorkerSpec(msgspec.Struct, frozen=True):
    """One worker to start: `unfuse worker` with these flags, by name, and these variables beside those it has anyway.

    By `role` and `device` a launcher may choose where it runs. Where it ends by itself with an error after it had
    started once, one of those in `smaller` may start in its place: they do with fewer of its devices. Without `models`
    it serves what its scheduler offers.
    """

    role: str
    device: str = "cpu"
    flags: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    smaller: tuple[WorkerSpec, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The arguments of `unfuse worker`."""
        told = {"role": self.role, "device": self.device, **self.flags}
        models = (("model", name) for name in self.models)
        return [text for name, value in (*told.items(), *models) for text in (f"--{name}", value)]


class Launcher(ABC):
    """Workers that are kept running, one for each of the specs it was made with; a worker's number is its spec's place.

    It is made with those and with who is to hear what workers write, line by line, in whatever thread; and belongs to
    the event loop that ran then. No worker outlives the process that started it, however that ends.
    """

    failed: asyncio.Future[None]
    """Set to a ConfigError when a worker ends by itself with an error the first time, as one that cannot start does;
    `stop` cancels it."""

    @abstractmethod
    def start(self) -> None:
        """Start every worker, and again when it dies, ever more slowly; not one that cannot start at all."""

    @abstractmethod
    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        """Tell the workers to stop; kill those that have not ended after so many seconds, or soon after `hurry` is set.

        Returns when none is left and what they wrote has been told. Called once, whether or not they were started.
        """


OpenLauncher = Callable[[Sequence[WorkerSpec], Hear], Launcher]
"""Makes a launcher of these workers, whose lines are told to that."""
