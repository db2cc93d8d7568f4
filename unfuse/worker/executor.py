"""Drives a worker's compute process: starts it, feeds it, hears it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping

import structlog

from unfuse.core.errors import ConfigError
from unfuse.core.messages import Done, Failed
from unfuse.core.task import Claim, Lease
from unfuse.worker.channel import (
    Cancel,
    FromCompute,
    Load,
    Loaded,
    LoadFailed,
    ParentChannel,
    Ready,
    Run,
    Stepped,
    Stopped,
)

RESTART_S = 1.0
"""Pause before a compute process that did not start again is tried once more."""

log = structlog.get_logger(__name__)

Report = Callable[[Ready | Stepped | Stopped | Done | Failed], Awaitable[None]]


class Executor:
    """One compute process at a time, behind `run` and `cancel`.

    `report` hears of everything that becomes of a task, crashes included, and when a new process is Ready. What a
    dead process had begun is reported as crashed, what merely waited in it as handed back.
    """

    def __init__(self, load: Load, report: Report) -> None:
        self._load, self._report = load, report
        self._process: asyncio.subprocess.Process | None = None
        self._channel: ParentChannel | None = None
        self._claims: dict[Claim, bool] = {}
        self.ready = False

    @property
    def pid(self) -> int | None:
        """Process id of the compute process, for people and for tests."""
        return self._process.pid if self._process else None

    async def start(self) -> str:
        """Start the process and load; returns the device it chose. Raises ConfigError when it cannot load."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "unfuse.worker.compute", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], env=self._environment(), stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        self._channel = await ParentChannel.open(ours)
        await self._channel.send(self._load)
        while True:
            try:
                message = await self._channel.receive()
            except EOFError:
                raise ConfigError(f"the compute process ended while loading ({await self._last_words()})") from None
            match message:
                case Loaded():
                    log.info("loaded", component=message.component, seconds=message.seconds, bytes=message.bytes)
                case LoadFailed():
                    await self._process.wait()
                    raise ConfigError(message.message)
                case Ready():
                    self.ready = True
                    return message.device

    async def serve(self) -> None:
        """Pass on what the process says, for ever; when it dies, report, and start another."""
        while True:
            try:
                await self._pump()
            except EOFError:
                self.ready = False
                await self._bury()
                log.info("starting compute again")
                await self._report(Ready(await self._start_again()))

    async def _start_again(self) -> str:
        """Start what loaded before: whatever keeps it from loading now is worth waiting for."""
        while True:
            try:
                return await self.start()
            except ConfigError as error:
                log.error("compute did not start", reason=str(error))
                await asyncio.sleep(RESTART_S)

    async def run(self, lease: Lease, peers: Mapping[str, tuple[str, str]]) -> None:
        """Hand a leased task over; its end is reported."""
        self._claims[lease.claim] = False
        if self._channel:
            await self._channel.send(Run(lease, dict(peers)))

    async def cancel(self, claim: Claim) -> None:
        """Have a task dropped at its next step; Stopped is reported unless it ends first."""
        if self._channel and claim in self._claims:
            await self._channel.send(Cancel(claim))

    async def close(self) -> None:
        """End the process now, whatever it runs."""
        self.ready = False
        if self._channel:
            self._channel.close()
        if self._process and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _pump(self) -> None:
        if not self._channel:
            raise EOFError
        while True:
            message: FromCompute = await self._channel.receive()
            match message:
                case Stepped():
                    if message.claim in self._claims:
                        self._claims[message.claim] = True
                        await self._report(message)
                case Stopped() | Done() | Failed():
                    if self._claims.pop(message.claim, None) is not None:
                        await self._report(message)

    async def _bury(self) -> None:
        words = await self._last_words()
        log.error("compute process died", reason=words)
        claims, self._claims = self._claims, {}
        for claim, began in claims.items():
            await self._report(
                Failed(claim, "crash" if began else "hand_back", f"the compute process died: {words}", evidence=words)
            )

    async def _last_words(self) -> str:
        if not self._process:
            return "never started"
        code = await self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _environment(self) -> dict[str, str]:
        """The parent's, with libraries told to keep to our threads and to stay quiet."""
        threads = str(self._load.compute.threads)
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} | quiet
