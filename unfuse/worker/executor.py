"""Drives a worker's compute process: starts it, feeds it, hears it, watches it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec.structs import asdict

from unfuse.arena.limits import readable_bytes
from unfuse.core.errors import ConfigError, ProtocolError
from unfuse.core.messages import Done, Failed, FailureKind
from unfuse.core.task import Claim, Lease
from unfuse.supervision.supervisor import Supervisor
from unfuse.worker.channel import (
    Cancel,
    FromCompute,
    Kept,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    ParentChannel,
    Ready,
    Run,
    Stepped,
    Stopped,
    Waits,
)
from unfuse.worker.records import read_record, relog

RESTART_S = 1.0
"""Pause before a compute process that did not start again is tried once more."""

WATCH_S = 0.5
"""How often a compute process that works is looked at."""

LOG_CHARS = 4000
"""Of what a compute process wrote to its standard error, the last so many are kept as evidence."""

MAX_LINE = 1 << 16
"""Bytes of a line that it writes; a longer one is cut."""

LOG_END_S = 1.0
"""How long the rest of a dead process's standard error may take to arrive: what it started may hold it open."""

log = structlog.get_logger(__name__)

Report = Callable[[Ready | Stepped | Kept | Stopped | Done | Failed], Awaitable[None]]


class Executor:
    """One compute process at a time, behind `run` and `cancel`.

    `report` hears of everything that becomes of a task, crashes included, and when a new process is Ready. What a
    dead process had begun is reported as crashed, what merely waited for it as handed back. A process that works and
    says nothing for `stall_s` seconds, or whose own memory exceeds `memory_limit` bytes (0: any), is killed. A task
    that is to run alone waits here until nothing else is in the process, and whatever comes after it waits for its end.
    """

    def __init__(self, load: Load, report: Report, stall_s: float = 600.0, memory_limit: int = 0) -> None:
        self._load, self._report = load, report
        self._stall_s, self._memory_limit = stall_s, memory_limit
        self._process: asyncio.subprocess.Process | None = None
        self._channel: ParentChannel | None = None
        self._waiting: dict[Claim, Run] = {}
        self._given: dict[Claim, Run] = {}
        self._begun: set[Claim] = set()
        self._unwritten: set[Claim] = set()
        self._heard_at = 0.0
        self._killed_for = ""
        self._log = ""
        self._logging: asyncio.Task[None] | None = None
        self._background = Supervisor()
        self.ready = False

    @property
    def pid(self) -> int | None:
        """Process id of the compute process, for people and for tests."""
        return self._process.pid if self._process else None

    @property
    def unwritten(self) -> int:
        """Tasks that wait for the result store."""
        return len(self._unwritten)

    async def start(self) -> str:
        """Start the process and load; returns what it computes on. Raises ConfigError when it cannot load."""
        if self._channel:
            self._channel.close()
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel = await ParentChannel.open(ours)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-X", "faulthandler", "-m", "unfuse.worker.compute", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], env=self._environment(), stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        log.info("importing")
        self._killed_for = self._log = ""
        self._logging = asyncio.create_task(self._keep_log(self._process))
        await self._channel.send(self._load)
        while True:
            try:
                message = await self._channel.receive()
            except EOFError:
                raise ConfigError(f"the compute process ended while loading ({await self._last_words()})") from None
            match message:
                case Loading():
                    log.info("loading", **asdict(message))
                case Loaded():
                    log.info("loaded", **asdict(message))
                case LoadFailed():
                    await self._process.wait()
                    raise ConfigError(message.message)
                case Ready():
                    self.ready = True
                    return message.device

    async def serve(self) -> None:
        """Pass on what the process says, for ever; when it dies, report, and start another."""
        while True:
            watching = self._background.forever("watching compute", self._watch)
            try:
                await self._pump()
            except (EOFError, ProtocolError) as error:
                self.ready = False
                if isinstance(error, ProtocolError):
                    self._kill(f"killed, as what it said made no sense: {error}")
                await self._bury()
                log.info("starting compute again")
                await self._report(Ready(await self._start_again()))
            finally:
                watching.cancel()

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
        self._waiting[lease.claim] = Run(lease, dict(peers))
        await self._feed()

    async def cancel(self, claim: Claim, save: bool = False) -> None:
        """Have a task dropped at its next step; Stopped is reported unless it ends first, and Kept if it is saved."""
        if self._waiting.pop(claim, None):
            await self._report(Stopped(claim))
            await self._feed()
        elif self._channel and claim in self._given:
            await self._channel.send(Cancel(claim, save))

    async def close(self) -> None:
        """End the process now, whatever it runs."""
        self.ready = False
        if self._channel:
            self._channel.close()
        if self._process and self._process.returncode is None:
            self._process.kill()
            await self._last_words()
        if self._logging:
            self._logging.cancel()

    async def _feed(self) -> None:
        """Give the process what may run now, in order of arrival."""
        for claim, run in list(self._waiting.items()):
            alone = run.lease.task.alone or any(given.lease.task.alone for given in self._given.values())
            if not self._channel or (alone and self._given):
                return
            self._heard_at = self._heard_at if self._given else time.monotonic()
            self._given[claim] = self._waiting.pop(claim)
            await self._channel.send(run)

    async def _pump(self) -> None:
        if not self._channel:
            raise EOFError
        while True:
            message: FromCompute = await self._channel.receive()
            self._heard_at = time.monotonic()
            match message:
                case Waits():
                    self._unwritten |= {message.claim} & self._given.keys()
                case Stepped():
                    self._unwritten.discard(message.claim)
                    if message.claim in self._given:
                        self._begun.add(message.claim)
                        await self._report(message)
                case Kept():
                    await self._report(message)
                case Stopped() | Done() | Failed():
                    self._begun.discard(message.claim)
                    self._unwritten.discard(message.claim)
                    if self._given.pop(message.claim, None):
                        await self._report(message)
                        await self._feed()

    async def _watch(self) -> None:
        """Kill a process that makes no progress, or takes more memory than it may."""
        slept = time.monotonic()
        await asyncio.sleep(WATCH_S)
        self._heard_at += max(0.0, time.monotonic() - slept - WATCH_S)  # while we were stopped, we heard nothing
        if self._given and self._process and not self._killed_for and (reason := self._excess(self._process.pid)):
            self._kill(reason)

    def _kill(self, reason: str) -> None:
        self._killed_for = reason
        with suppress(ProcessLookupError):
            if self._process:
                self._process.kill()

    def _excess(self, pid: int) -> str:
        if time.monotonic() - self._heard_at > self._stall_s:
            return f"killed, as it made no progress for {self._stall_s:g} s (--stall-s allows more)"
        taken = _own_memory(pid) if self._memory_limit else 0
        if taken > self._memory_limit:
            took, limit = readable_bytes(taken), readable_bytes(self._memory_limit)
            return f"killed, as it took {took} of memory, and --memory-limit allows {limit}"
        return ""

    async def _bury(self) -> None:
        words = await self._last_words()
        log.error("compute process died", reason=words, begun=len(self._begun))
        claims, begun = [*self._given, *self._waiting], self._begun
        self._given, self._waiting, self._begun, self._unwritten = {}, {}, set(), set()
        message, evidence = f"the compute process died: {words}", f"{words}\n{self._log}".strip()
        for claim in claims:
            crashed = claim in begun
            kind: FailureKind = "crash" if crashed else "hand_back"
            reason = "" if crashed else "compute"
            company = crashed and len(begun) > 1
            await self._report(Failed(claim, kind, message, evidence, company=company, reason=reason))

    async def _last_words(self) -> str:
        """How the process ended; what it had written is in `_log` then."""
        if not self._process:
            return "never started"
        code = await self._process.wait()
        if self._logging:
            await asyncio.wait({self._logging}, timeout=LOG_END_S)
        return self._killed_for or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")

    async def _keep_log(self, process: asyncio.subprocess.Process) -> None:
        """Log what the process logs, pass on whatever else it writes to standard error, and keep the end of it all."""
        rest = b""
        while process.stderr and (data := await process.stderr.read(1 << 16)):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._pass_on(line + b"\n")
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._log = (self._log + text)[-LOG_CHARS:]
        with self._background.besides("passing on what compute wrote"):  # else it would wait for us to read on
            if record := read_record(line):
                relog(record)
            else:
                sys.stderr.write(text)
                sys.stderr.flush()

    def _environment(self) -> dict[str, str]:
        """The parent's, with libraries told to keep to our threads and to stay quiet."""
        threads = str(self._load.compute.threads)
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} | quiet


def _own_memory(pid: int) -> int:
    """Resident bytes that belong to the process alone: neither files nor the arena count."""
    with suppress(OSError):
        if found := re.search(r"^RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return 0
