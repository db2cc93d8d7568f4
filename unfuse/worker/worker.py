"""A worker's parent process: registers, asks for tasks, renews leases, holds memory, and reports how tasks ended.

It computes nothing and does not import torch, so messages never wait for compute.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog

from unfuse.core.errors import UnfuseError
from unfuse.core.growth import Grown
from unfuse.core.messages import (
    Announced,
    Ask,
    Beat,
    Bye,
    Done,
    Failed,
    Granted,
    Hello,
    Keep,
    Progress,
    Pulse,
    Refused,
    Saved,
    Stopped,
    ToScheduler,
    ToWorker,
    WorkerInfo,
    WorkerStatus,
)
from unfuse.core.object_ref import ObjectRef
from unfuse.core.plan import Choice, roles_of
from unfuse.core.pool import declared, manned
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import Claim, Lease
from unfuse.core.time_budget import StopBudget
from unfuse.transfer.base import TransferEngine
from unfuse.worker.borrowing import Borrowing
from unfuse.worker.compute_messages import LeaksFound, Ready
from unfuse.worker.executor import Executor
from unfuse.worker.holding import WITHDRAW, Holding
from unfuse.worker.leaks import WorkerLeakCheck
from unfuse.worker.link import BEAT_S, Link
from unfuse.worker.objects import Objects
from unfuse.worker.options import KEPT_LORAS, WorkerOptions
from unfuse.worker.orphan import free_when_orphaned, until_read
from unfuse.worker.progress import OutputRecorder, ProgressReporter
from unfuse.worker.registration import Served, decide_served, loads_of
from unfuse.worker.saved_states import SavedStates
from unfuse.worker.sets import Swapping, sets_of
from unfuse.worker.task_end import about, log_outcome, unfetched
from unfuse.worker.weight_files import WeightFiles

BEAT_PAUSE_S = 0.02  # the least seconds between two heartbeats
LEAVE_S = 1.0  # seconds that a leaving worker waits for one answer; up to three times that for its last messages
SAVING, LAST = 0.25, 0.1
"""The shares of the drain timeout for saving and handing back tasks that are not finished, and for the end."""

LEAVES = "the worker leaves before it is done"

PAUSE_S = 1.0  # seconds to wait after a message was refused

log = structlog.get_logger(__name__)


class Worker:
    """One worker, from registration to end. Closes its transfer `engines`; `forks` gives a socket to a fork server for
    models in these folders, if there is one, or is to be for who swaps.
    """

    def __init__(
        self,
        options: WorkerOptions,
        engines: Mapping[str, TransferEngine] | None = None,
        forks: Callable[[Sequence[str], bool], socket.socket | None] | None = None,
    ) -> None:
        self._options, self._engines, self._forks = options, engines or {}, forks
        self._id = f"{options.role}-{secrets.token_hex(6)}"
        self._choice = Choice(roles_of(options.role), options.components)
        self._holding = Holding(options.slots, options.resources)
        self._active = self._holding.leases
        self._read_here, self._secret = frozenset[str](), secrets.token_bytes(16)
        self._reporting, self._loaded, self._device = 0, "", ""
        self._outcome: dict[str, str] = {}
        self._changed, self._draining = asyncio.Event(), asyncio.Event()
        self._budget = StopBudget(options.drain_timeout)  # of the stop, from its begin on
        self._scheduler_stops = False
        self._link = Link(options.schedulers, options.trust, self._changed.set)
        self._idle, self._released = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._newest_ask, self._asks_with_outcome, self._beat_s = 0, False, 1.0
        self._swapping = Swapping({}, ())
        self._objects: Objects | None = None
        self._executor: Executor | None = None
        self._served: Served | None = None
        self._weights: WeightFiles | None = None
        self._saved_states: SavedStates | None = None
        self._leaks = WorkerLeakCheck()
        self._background = Supervisor()
        self._progress = ProgressReporter(self._link, self._background, self._cancel)
        self._outputs = OutputRecorder(self._link, self._background, self._cancel)

    async def run(self) -> None:
        """Serve until drained. Raises ConfigError if it cannot start."""
        serving = asyncio.create_task(self._serve())
        drained = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait({drained, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            await self._leave()
        finally:
            for task in (drained, serving):
                task.cancel()
            await asyncio.gather(drained, serving, return_exceptions=True)
            await self._background.close()
            if self._executor:
                await self._executor.close()
            await self._link.close()
            if self._objects:
                await self._objects.close()

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining.is_set()

    @property
    def lacking(self) -> str:
        """Why it takes no tasks now; "" if it does."""
        if self.draining:
            return "the worker is about to leave"
        if not self._link.connected:
            return "no scheduler answers"
        if not (self._executor and self._executor.ready):
            return "compute is not ready: models load"
        return "; ".join(sorted({str(file) for file in self._weights.changed.values()})) if self._weights else ""

    def drain(self) -> None:
        """Take no new tasks, save those that run, or finish them, then let `run` return: within the drain timeout."""
        if not self.draining:
            self._budget = StopBudget(self._options.drain_timeout)
        self._draining.set()

    def hurry(self) -> None:
        """Hand back at once what runs, then let `run` return."""
        self.drain()
        self._budget.hurry.set()

    def _info(self, pools: Sequence[str]) -> WorkerInfo:
        options, objects = self._options, self._objects
        info = WorkerInfo(self._id, options.node, options.role, tuple(pools), self._holding.slots, "", 0, os.getpid())
        if objects is None:
            return info
        changed = self._weights.changed if self._weights else {}
        where = {"arena": objects.store.address, "room": objects.capacity, "engines": objects.copies.served_at}
        about = {"device": self._device, "resources": self._holding.resources, "outcome": self._outcome}
        sets = self._swapping.pools_of_sets(self._outcome, changed)
        return msgspec.structs.replace(info, changed=changed, sets=sets, status=self._status(objects), **where, **about)

    def _status(self, objects: Objects) -> WorkerStatus:
        usage, swapping = objects.usage(), self._swapping
        return msgspec.structs.replace(
            self._executor.status if self._executor else WorkerStatus(),
            arena_used=usage.used,
            arena_high_water=usage.high_water,
            arena_fragmentation=usage.fragmentation,
            waiting_for_inputs=self._holding.arriving,
            loaded=swapping.holds,
            load_s=swapping.load_s,
            target=swapping.going,
        )

    async def _serve(self) -> None:
        executor, objects = await self._join()
        ended: set[Claim] = set()
        self._background.forever("running compute", executor.serve)
        self._background.forever("sending heartbeats", partial(self._beat, objects, ended))
        self._background.forever("watching model files", self._watch_files)
        orphan = partial(free_when_orphaned, self._link, objects, lambda: bool(self._active), self._options.orphan_s)
        self._background.forever("watching for schedulers", orphan)
        await asyncio.gather(self._background.repeat("asking for work", self._pull), executor.lost)

    async def _join(self) -> tuple[Executor, Objects]:
        """Ask the scheduler what to serve, load it, and register with its pools."""
        welcome = await self._link.hello(Hello(self._info(()), secret=self._secret))
        options, places = self._options, welcome.places
        served = await asyncio.to_thread(decide_served, welcome, options, self._choice)
        self._beat_s, self._holding.slots, self._read_here = welcome.beat, served.slots, served.read_here
        objects = self._objects = await asyncio.to_thread(
            Objects, self._id, options.node, options.arena, places, self._engines, options.transfer, options.run_dir
        )
        self._saved_states = SavedStates(objects, self._link)
        self._borrowing = Borrowing(self._link, places.loras, Path(options.data_dir, KEPT_LORAS))
        sets, loads = sets_of(served, options), loads_of(served, self._choice, options, objects.store, places)
        self._served = served
        self._weights = await asyncio.to_thread(
            WeightFiles, served.models, served.cards, self._choice, served.states, in_turns=bool(sets)
        )
        self._swapping = Swapping(sets, loads, served.cards)
        loads, watch = self._swapping.loads(self._swapping.holds), (options.stall_s, options.memory_limit)
        fork_server = self._forks and self._forks([folder for _, folder, _ in served.models], len(sets) > 1)
        executor = self._executor = Executor(loads, self._hear, *watch, fork_server, options.buffer)
        objects.copies.passing = executor.passing
        started = await executor.start()
        self._device = started.device
        self._has_loaded(started)
        for engine in self._engines.values():
            engine.use(executor.pairs, started.device)
        self._outcome = started.outcome
        await asyncio.to_thread(self._weights.look)  # files may have changed while they were loaded
        await self._register(served, self._weights)
        models = [card.name for card in served.cards]
        log.info("ready", role=options.role, worker=self._id, models=models, pulled_at=objects.copies.served_at)
        return executor, objects

    async def _register(self, served: Served, weights: WeightFiles) -> None:
        """Register the pools that the worker serves: all except those whose files have changed."""
        pools = [manned(pool, self._outcome) for pool in served.pools if pool not in weights.changed]
        await self._link.hello(Hello(self._info(pools), served.cards, self._secret))

    async def _watch_files(self) -> None:
        """Check the loaded files once a heartbeat, and withdraw the pools of changed files.

        Pools are served again if the bytes turn out to be the same.
        """
        await asyncio.sleep(self._beat_s)
        await self._withdraw_changed()
        if self._weights and not all(file.compared for file in self._weights.changed.values()):
            await asyncio.to_thread(self._weights.compare)

    async def _withdraw_changed(self) -> None:
        """Register again if changed files alter the set of pools that can be served."""
        served, weights = self._served, self._weights
        if not (served and weights):
            return
        is_new = await asyncio.to_thread(weights.look)
        if is_new:
            await self._register(served, weights)
            self._changed.set()

    async def _go_on(self) -> None:
        """Ask for work again after compute has restarted, except for pools whose files have changed."""
        await self._withdraw_changed()
        self._changed.set()

    def _has_loaded(self, started: Ready) -> None:
        self._swapping.loaded(self._executor)
        if self._weights:
            self._weights.left_out = started.left_out
        self._holding.resources = {**self._options.resources, **started.resources}

    async def _pull(self) -> None:
        """Ask for tasks whenever something has changed: a task began or ended, room was freed, an Ask was answered."""
        await self._changed.wait()
        self._changed.clear()
        if not self._draining.is_set() and not self._asks_with_outcome:
            self._newest_ask += 1
            self._background.once("asking for work", partial(self._ask, self._newest_ask, self._wanted()))

    def _wanted(self, ended: str = "") -> Ask:
        """The next Ask, when a task of that pool has `ended` well; for nothing where nothing can run."""
        after = ended if self._swapping.going else ""
        if not (self._objects and self._executor and self._executor.ready) or self._swapping.going and not after:
            return WITHDRAW
        if self._served and self._weights and self._weights.changed.keys() >= set(self._served.pools):
            return WITHDRAW  # the scheduler would answer an Ask without pools immediately, in a loop
        room = self._holding.room(self._objects.free, self._objects.usage().used)
        return self._holding.ask(room, self._loaded, self._swapping.holds, after)

    async def _ask(self, number: int, ask: Ask) -> None:
        """Send one Ask and take what it brings. A newer Ask makes the scheduler answer an older one with nothing."""
        granted: ToWorker | None = None
        with suppress(OSError):  # the next Ask replaces this one
            granted = await self._link.once(ask)
        if isinstance(granted, Granted):
            await self._take(granted)
        elif isinstance(granted, Refused):
            log.warning("the scheduler refused an Ask", reason=granted.message)
            await asyncio.sleep(PAUSE_S)
        if number == self._newest_ask and ask is not WITHDRAW:
            self._changed.set()

    async def _take(self, granted: Granted) -> None:
        for lease in granted.leases:
            self._holding.take(lease)
            self._loaded = lease.task.affinity if lease.task.derived.lora_id else self._loaded
            self._idle.clear()
            if self._saved_states:
                self._saved_states.begin(lease)
            if self._draining.is_set() or not (self._executor and self._objects):
                await self._end(Failed(lease.claim, "hand_back", "the worker is about to leave", reason="drain"))
            else:
                run = partial(self._run, self._executor, self._objects, lease, granted)
                self._background.once("beginning a task", run)

    async def _run(self, executor: Executor, objects: Objects, lease: Lease, granted: Granted) -> None:
        """Fetch inputs that cannot be mapped, then have compute run the task."""
        try:
            await self._borrowing.bring(lease)
            brought, recorded = await objects.copies.bring(lease, granted), await self._outputs.read(lease)
        except Exception as error:  # any error must end the task, or it would be lost
            await executor.passing.drop(lease.claim)
            await self._end(unfetched(lease.claim, error, executor.ready))
            if not isinstance(error, UnfuseError):
                raise
            return
        self._holding.arrived(lease.claim)
        if brought is None or recorded is None:
            await executor.passing.drop(lease.claim)
            await self._end(Stopped(lease.claim))
        elif not (executor.ready and self._swapping.fits(lease)) or self._is_left_out(lease):
            await executor.passing.drop(lease.claim)
            await self._end(Failed(lease.claim, "hand_back", "the worker cannot run it now", reason="compute"))
        else:
            await executor.run(brought, granted.peers, recorded)

    def _is_left_out(self, lease: Lease) -> bool:
        """Whether compute did not load a task's pool, because its files have changed."""
        return self._weights is not None and declared(lease.task.planned.pool) in self._weights.left_out

    async def _announce(self, news: Announced) -> None:
        """Have an output read while it is written, unless what reads it runs here: there it would gain nothing."""
        lease = self._active.get(news.claim)
        if lease and declared(lease.task.planned.pool) not in self._read_here:
            await self._link.call(news)

    async def _hear(
        self, message: Ready | Progress | Saved | Announced | Grown | Keep | LeaksFound | Stopped | Done | Failed
    ) -> None:
        """Handle a message of compute. The scheduler is not waited for here, so that compute is never held up."""
        if isinstance(message, Ready):
            self._has_loaded(message)
            self._background.once("asking for work", self._go_on)
        elif isinstance(message, Progress):
            if message.step:
                self._progress.add(message)
            else:
                log.debug("task began", **about(message.claim))
        elif isinstance(message, Saved | Keep):
            if self._saved_states:
                self._background.once("recording what a task has so far", partial(self._saved_states.record, message))
        elif isinstance(message, Announced):
            self._holding.placed(message.claim)
            self._background.once("announcing an output", partial(self._announce, message))
        elif isinstance(message, Grown):
            self._outputs.add(message)
        elif isinstance(message, LeaksFound):
            self._leaks.found(message.leaks)
        else:
            self._progress.flush()
            self._background.once("reporting the end of a task", partial(self._end, message))

    async def _cancel(self, claim: Claim, save: bool = False, *, if_saved: bool = False) -> None:
        if self._executor and not (self._objects and self._objects.copies.cancel(claim)):
            await self._executor.cancel(claim, save, if_saved=if_saved)

    async def _end(self, message: Stopped | Done | Failed) -> None:
        """Have all recorded that it grew, free the task's slot, then report its end until that is recorded."""
        self._reporting += 1
        try:
            if isinstance(message, Done):
                message = await self._unless_overwritten(message)
            await self._outputs.wait_until_recorded(message.claim)
            await self._report_end(message, self._holding.end(message.claim))
        finally:
            self._reporting -= 1
            if not self._active and not self._reporting:
                self._idle.set()

    async def _unless_overwritten(self, message: Done) -> Done | Failed:
        """Return the result of a task, or hand the task back if its weights, which may be mapped, changed in place."""
        lease = self._active.get(message.claim)
        while lease and self._weights:
            file = await asyncio.to_thread(self._weights.overwritten, declared(lease.task.planned.pool))
            if file is None:
                break
            if file.compared:
                return Failed(message.claim, "hand_back", str(file), reason="compute", timings=message.timings)
            await asyncio.sleep(self._beat_s)
        return message

    async def _report_end(self, message: Stopped | Done | Failed, lease: Lease | None) -> None:
        if isinstance(message, Stopped) and self._draining.is_set():
            message = Failed(message.claim, "hand_back", LEAVES, reason="drain", timings=message.timings)
        if self._saved_states and isinstance(message, Failed):
            await self._saved_states.wait_until_saved()  # the next attempt resumes from there
        if self._saved_states and isinstance(message, Done) and lease and lease.task.planned.extends:
            await self._saved_states.wait_until_shared(message.claim)  # none is taken any more once the request is over
        if self._objects and lease:
            message = self._objects.end_task(lease, message, declared(lease.task.planned.pool) in self._read_here)
        log_outcome(message)
        if self._executor and not self._executor.ready:
            await self._link.call(WITHDRAW)
        waits = self._draining.is_set() or (self._asks_with_outcome and not self._swapping.going)
        if asks := isinstance(message, Done) and not waits:
            self._asks_with_outcome = True
            self._newest_ask += 1
            with self._background.besides("asking for work"):
                message = msgspec.structs.replace(message, ask=self._wanted(lease.task.planned.pool if lease else ""))
        self._changed.set()
        try:
            recorded = await self._send_end(message)
        finally:
            if asks:
                self._asks_with_outcome = False
                self._changed.set()
        if recorded and self._objects and lease and isinstance(message, Done):
            self._objects.share(lease.task.planned.cache, message.output)
        if self._saved_states:
            await self._saved_states.end(message.claim, recorded and isinstance(message, Done))

    async def _send_end(self, message: Stopped | Done | Failed) -> bool:
        """Send the end of a task until it is recorded (True), or the lease is known to be lost (False).

        A task that was dropped and has used nothing is not reported.
        """
        if isinstance(message, Stopped) and not message.timings.share_s:
            return False
        while isinstance(answer := await self._link.call(message), Refused):
            if answer.lease_lost or isinstance(message, Stopped):
                if isinstance(message, Done) and message.output and self._objects:
                    await self._objects.delete(message.output)
                    self._changed.set()
                return False
            log.warning("the scheduler refused a report", reason=answer.message, **about(message.claim))
            await asyncio.sleep(PAUSE_S)
        if isinstance(answer, Granted):
            await self._take(answer)
        return True

    def _heartbeat(self, objects: Objects, held: Collection[Claim]) -> Beat:
        """The next heartbeat. What it says of the time since the last one is counted anew from here on."""
        retracted = 0
        if self._executor:
            retracted, self._executor.retracted = self._executor.retracted, 0
        return Beat(
            claims=tuple(held),
            holding=tuple(objects.holding()),
            wait=self._beat_s,
            status=self._status(objects),
            moved=objects.copies.counters.take(),
            retracted=retracted,
            leaked=self._leaks.take(),
        )

    async def _beat(self, objects: Objects, ended: set[Claim]) -> None:
        """Send one heartbeat and handle the answer, which comes when there is news or the next one is due."""
        await asyncio.sleep(BEAT_PAUSE_S)
        by = self._executor
        self._leaks.look(objects, idle=self._idle.is_set() and by is not None and by.ready)
        beat = self._heartbeat(objects, self._active.keys() - ended)
        try:
            pulse = await self._link.once(beat, BEAT_S)
        except TimeoutError:
            return  # a scheduler that answers late counts what it was told, and one that is gone counts nothing
        except OSError:
            objects.copies.counters.put_back(beat.moved)
            self._leaks.put_back(beat.leaked)
            if by:
                by.retracted += beat.retracted
            return
        if not isinstance(pulse, Pulse):
            await asyncio.sleep(self._beat_s)
            return
        if pulse.load and by:
            swap = partial(self._swapping.to, pulse.load, by, partial(self._link.call, WITHDRAW), self._idle)
            self._background.once("swapping what is loaded", swap)
        if pulse.soon:
            self._background.once("reading weights ahead", partial(self._swapping.ahead, pulse.soon))
        ended |= set(pulse.ended)
        ended &= self._active.keys()
        for claim in pulse.ended:
            await self._cancel(claim)
        self._scheduler_stops = pulse.stops and len(self._options.schedulers) == 1
        if pulse.over or pulse.stops:
            await objects.release(pulse.over)
            self._changed.set()
            self._released.set()
        if objects.drop(pulse.lost):
            self._changed.set()

    async def _leave(self) -> None:
        """Stop within the budget: hand back what runs, let others read what lies here, and sign off."""
        log.info("draining", running=len(self._active))
        budget = self._budget
        await budget.within(LEAVE_S, self._link.call(WITHDRAW))
        inputs = [(claim.request, ref) for claim, lease in self._active.items() for ref in lease.task.inputs]
        if self._objects and self._objects.outlasts:
            await self._save_all(if_saved=True)
        for reserve in (SAVING * budget.seconds, LAST * budget.seconds):
            await budget.within(budget.left(reserve), self._finish(inputs))
            await self._save_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S / 2):
                while self._reporting:
                    await asyncio.sleep(BEAT_PAUSE_S)
        unfinished = (Failed(claim, "hand_back", LEAVES, reason="drain") for claim in self._active)
        last: list[ToScheduler] = [*unfinished, Bye()]
        most = LEAVE_S if budget.hurry.is_set() else max(LEAVE_S, min(3 * LEAVE_S, budget.left() / 2))
        with suppress(TimeoutError):
            async with asyncio.timeout(most):
                for message in last:
                    await self._link.call(message, LEAVE_S)

    async def _save_all(self, *, if_saved: bool = False) -> None:
        """Have what runs handed back at its next step, from its state then; or, `if_saved`, what can be saved."""
        if self._saved_states:
            self._saved_states.stops = True
        for claim in list(self._active):  # a copy, because tasks end meanwhile
            await self._cancel(claim, save=True, if_saved=if_saved)

    async def _finish(self, inputs: Sequence[tuple[str, ObjectRef]]) -> None:
        """Wait until nothing runs, and nobody needs what lies here alone: copy that where it outlasts this worker."""
        if objects := self._objects:
            await objects.copy_all(inputs)
        await self._idle.wait()
        if objects:
            await objects.durable.wait_until_written()
            await objects.copy_all(())
            await until_read(self._link, objects, self._released, self._beat_s, lambda: self._scheduler_stops)
