"""One compute process as its worker's parent sees it: how it starts, what it says, why it ended."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec.structs import asdict

from unfuse.arena.limits import readable_bytes
from unfuse.core.errors import ConfigError
from unfuse.supervision.supervisor import Supervisor
from unfuse.worker.compute_messages import (
    FromCompute,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    ParentChannel,
    Ready,
    ToCompute,
)
from unfuse.worker.records import read_record, relog

LOG_CHARS = 4000
"""Of what a compute process wrote to its standard error, the last so many are kept as evidence."""

MAX_LINE = 1 << 16
"""Bytes of a line that it writes; a longer one is cut."""

LOG_END_S = 1.0
"""How long the rest of a dead process's standard error may take to arrive: what it started may hold it open."""

log = structlog.get_logger(__name__)


class ComputeProcess:
    """A compute process, and the next one when that has died."""

    def __init__(self, load: Load, background: Supervisor) -> None:
        self._load, self._background = load, background
        self._process: asyncio.subprocess.Process | None = None
        self._channel: ParentChannel | None = None
        self._logging: asyncio.Task[None] | None = None
        self.killed_for = ""
        """Why it was killed, if it was killed on purpose."""
        self.log = ""
        """The end of what it wrote to its standard error."""

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid if self._process else None

    async def start(self) -> Ready:
        """Start it and have it load; returns what it is then. Raises ConfigError when it cannot load."""
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
        self.killed_for = self.log = ""
        self._logging = asyncio.create_task(self._keep_log(self._process))
        await self._channel.send(self._load)
        while True:
            try:
                message = await self._channel.receive()
            except EOFError:
                raise ConfigError(f"the compute process ended while loading ({await self.last_words()})") from None
            match message:
                case Loading():
                    log.info("loading", **asdict(message))
                case Loaded():
                    log.info("loaded", **asdict(message))
                case LoadFailed():
                    await self._process.wait()
                    raise ConfigError(message.message)
                case Ready():
                    return message

    async def send(self, message: ToCompute) -> None:
        """Tell it something; one that is gone is noticed by `receive`."""
        if self._channel:
            await self._channel.send(message)

    async def receive(self) -> FromCompute:
        """What it says next. Raises EOFError when it is gone, ProtocolError for what makes no sense."""
        if not self._channel:
            raise EOFError
        return await self._channel.receive()

    def kill(self, reason: str) -> None:
        """End it now, for this reason; the first one counts."""
        if self._process and self._process.returncode is None and not self.killed_for:
            self.killed_for = reason
            with suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """Hang up, and end it now, whatever it runs."""
        if self._channel:
            self._channel.close()
        if self._process and self._process.returncode is None:
            self._process.kill()
            await self.last_words()
        if self._logging:
            self._logging.cancel()

    def excess(self, limit: int) -> str:
        """What to say if its own memory exceeds `limit` bytes (0: any); else nothing."""
        taken = _own_memory(self.pid) if limit and self.pid else 0
        if taken <= limit:
            return ""
        took, most = readable_bytes(taken), readable_bytes(limit)
        return f"killed, as it took {took} of memory, and --memory-limit allows {most}"

    async def last_words(self) -> str:
        """How it ended, once it has; what it had written is in `log` then."""
        if not self._process:
            return "never started"
        code = await self._process.wait()
        if self._logging:
            await asyncio.wait({self._logging}, timeout=LOG_END_S)
        return self.killed_for or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")

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
        self.log = (self.log + text)[-LOG_CHARS:]
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
