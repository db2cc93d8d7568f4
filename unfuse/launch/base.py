"""The launcher port: starts, restarts and stops the workers of a service.

To check a new launcher, run `unfuse.testing.check_launcher`: the suite is the contract in executable form.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import msgspec

#: `(number, line)`: called with each line that the worker of this number writes, without line end, in any thread.
LineSink = Callable[[int, bytes], None]


class WorkerSpec(msgspec.Struct, frozen=True):
    """One worker to start, as a call of `unfuse worker`."""

    #: Roles whose stages it runs, as in `--role`. A launcher may choose the node by role and device.
    role: str
    #: Its devices, joined by "+".
    device: str = "cpu"
    #: Further flags of `unfuse worker`, by name without dashes.
    flags: Mapping[str, str] = {}
    #: Environment variables, added to those of the launcher.
    environment: Mapping[str, str] = {}
    #: Specs with fewer of its devices. One of them may replace it after it has started once and then failed.
    smaller: tuple[WorkerSpec, ...] = ()
    #: Models to serve. If empty, it serves those that its scheduler offers.
    models: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The command line arguments of `unfuse worker`."""
        flags = {"role": self.role, "device": self.device, **self.flags}
        models = (("model", name) for name in self.models)
        return [text for name, value in (*flags.items(), *models) for text in (f"--{name}", value)]


class Launcher(ABC):
    """Starts one worker for each spec, and restarts it until `stop`.

    The number of a worker is the index of its spec. A launcher is created with its specs and a function that is called
    with the workers' output lines. It belongs to the event loop that runs then. No worker may outlive the process that
    started it, however that process ends.
    """

    #: Fails with a ConfigError if a worker exits with an error at its first start. `stop` cancels it.
    failed: asyncio.Future[None]

    @abstractmethod
    def start(self) -> None:
        """Start every worker, and restart it when it dies, with growing pauses.

        A worker that fails at its first start is not restarted: see `failed`.
        """

    @abstractmethod
    async def stop(self, drain_timeout: float, hurry: asyncio.Event | None = None) -> None:
        """Drain and stop the workers. Must be called once, also without `start`.

        Returns when all workers have ended and their output lines were passed on.

        drain_timeout: seconds after which workers that still run are killed.
        hurry: when set, workers that still run are killed soon.
        """


#: Creates a launcher of these workers, which passes their output lines to the function.
OpenLauncher = Callable[[Sequence[WorkerSpec], LineSink], Launcher]
