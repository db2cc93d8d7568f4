"""Drives a worker's compute processes: starts, feeds, hears and watches them, and starts them again when one dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from unfuse.core.errors import ConfigError, ProtocolError
from unfuse.core.messages import Done, Failed, FailureKind
from unfuse.core.task import Claim, Lease
from unfuse.supervision.supervisor import Supervisor
from unfuse.worker.compute_messages import (
    Cancel,
    FromCompute,
    Load,
    Ready,
    Run,
    StateSaved,
    Stepped,
    Stopped,
    ToCompute,
    Waits,
)
from unfuse.worker.compute_process import ComputeProcess

RESTART_S = 1.0
"""Pause before compute processes that did not start again are tried once more."""

WATCH_S = 0.5
"""How often compute processes that work are looked at."""

log = structlog.get_logger(__name__)

Report = Callable[[Ready | Stepped | StateSaved | Stopped | Done | Failed], Awaitable[None]]


class Executor:
    """The compute processes that hold a worker's stages together, behind `run` and `cancel`.

    All are told the same; the first one decides and speaks for all, and when one dies all end and are started again.
    `report` hears of everything that becomes of a task, crashes included, and when new processes are Ready. What dead
    ones had begun is reported as crashed, what merely waited for them as handed back. Where the first works and says
    nothing for `stall_s` seconds, or the own memory of any exceeds `memory_limit` bytes (0: any), it is killed. A task
    that is to run alone waits here until nothing else runs, and whatever comes after it waits for its end.
    """

    def __init__(self, loads: Sequence[Load], report: Report, stall_s: float = 600.0, memory_limit: int = 0) -> None:
        self._report, self._stall_s, self._memory_limit = report, stall_s, memory_limit
        self._background = Supervisor()
        self._processes = [ComputeProcess(load, self._background) for load in loads]
        self._waiting: dict[Claim, Run] = {}
        self._given: dict[Claim, Run] = {}
        self._begun: set[Claim] = set()
        self._unwritten: set[Claim] = set()
        self._heard_at = 0.0
        self.ready = False

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._processes if process.pid]

    @property
    def unwritten(self) -> int:
        """Tasks that wait for the result store."""
        return len(self._unwritten)

    async def start(self) -> Ready:
        """Start them and load; returns what the first says of itself. Raises ConfigError when one cannot load."""
        starting = [asyncio.create_task(process.start()) for process in self._processes]
        try:
            found = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self._end()
            raise
        self.ready = True
        return found[0]

    async def serve(self) -> None:
        """Pass on what the first says, for ever; when one dies, report, and start all again."""
        while True:
            watching = self._background.forever("watching compute", self._watch)
            try:
                dead = await self._pump()
                self.ready = False
                await self._restart_after(dead)
                log.info("starting compute again")
                await self._report(await self._start_again())
            finally:
                watching.cancel()

    async def _start_again(self) -> Ready:
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
        """Have a task dropped at its next step; Stopped is reported unless it ends first, StateSaved if it is saved."""
        if self._waiting.pop(claim, None):
            await self._report(Stopped(claim))
            await self._feed()
        elif claim in self._given:
            await self._tell(Cancel(claim, save))

    async def close(self) -> None:
        """End the processes now, whatever they run."""
        self.ready = False
        await self._end()

    async def _end(self) -> None:
        await asyncio.gather(*(process.close() for process in self._processes))

    async def _tell(self, message: ToCompute) -> None:
        for process in self._processes:
            await process.send(message)

    async def _feed(self) -> None:
        """Give them what may run now, in order of arrival."""
        for claim, run in list(self._waiting.items()):
            alone = run.lease.task.alone or any(given.lease.task.alone for given in self._given.values())
            if not self.pids or (alone and self._given):
                return
            self._heard_at = self._heard_at if self._given else time.monotonic()
            self._given[claim] = self._waiting.pop(claim)
            await self._tell(run)

    async def _pump(self) -> ComputeProcess:
        """Take in what is said until one is gone: that one."""
        first, *others = self._processes
        listening = [asyncio.create_task(self._listen(first, self._take))]
        listening += [asyncio.create_task(self._listen(process, _nothing)) for process in others]
        try:
            done, _ = await asyncio.wait(listening, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    async def _listen(self, process: ComputeProcess, take: Callable[[FromCompute], Awaitable[None]]) -> ComputeProcess:
        while True:
            try:
                message = await process.receive()
            except EOFError:
                return process
            except ProtocolError as error:
                process.kill(f"killed, as what it said made no sense: {error}")
                return process
            await take(message)

    async def _take(self, message: FromCompute) -> None:
        self._heard_at = time.monotonic()
        match message:
            case Waits():
                self._unwritten |= {message.claim} & self._given.keys()
            case Stepped():
                self._unwritten.discard(message.claim)
                if message.claim in self._given:
                    self._begun.add(message.claim)
                    await self._report(message)
            case StateSaved():
                await self._report(message)
            case Stopped() | Done() | Failed():
                self._begun.discard(message.claim)
                self._unwritten.discard(message.claim)
                if self._given.pop(message.claim, None):
                    await self._report(message)
                    await self._feed()

    async def _watch(self) -> None:
        """Kill those that make no progress, and one that takes more memory than it may."""
        slept = time.monotonic()
        await asyncio.sleep(WATCH_S)
        self._heard_at += max(0.0, time.monotonic() - slept - WATCH_S)  # while we were stopped, we heard nothing
        for process in self._processes if self._given else ():
            if reason := self._stalled() or process.excess(self._memory_limit):
                process.kill(reason)

    def _stalled(self) -> str:
        if time.monotonic() - self._heard_at <= self._stall_s:
            return ""
        return f"killed, as it made no progress for {self._stall_s:g} s (--stall-s allows more)"

    async def _restart_after(self, dead: ComputeProcess) -> None:
        """Report what died with a process; the others end with it."""
        words = await dead.last_words()
        await self._end()
        log.error("compute process died", reason=words, begun=len(self._begun))
        claims, begun = [*self._given, *self._waiting], self._begun
        self._given, self._waiting, self._begun, self._unwritten = {}, {}, set(), set()
        message, evidence = f"the compute process died: {words}", f"{words}\n{dead.log}".strip()
        for claim in claims:
            crashed = claim in begun
            kind: FailureKind = "crash" if crashed else "hand_back"
            reason = "" if crashed else "compute"
            company = crashed and len(begun) > 1
            await self._report(Failed(claim, kind, message, evidence, company=company, reason=reason))


async def _nothing(message: FromCompute) -> None:
    """The first speaks for all."""
