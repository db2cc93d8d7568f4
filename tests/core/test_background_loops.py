"""Every background loop outside the scheduler: its body raises once what nobody has foreseen, and it goes on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from zmq.utils import z85

from tools.addresses import a_worker, unix_address
from unfuse.arena.extents import MemoryUsage
from unfuse.core import supervisor
from unfuse.core.messages import (
    Accepted,
    Heartbeat,
    HeartbeatReply,
    RequestTasks,
    StepProgress,
    ToScheduler,
    ToWorker,
    Unregister,
)
from unfuse.core.supervisor import Supervisor
from unfuse.core.task import Claim
from unfuse.core.worker_status import WorkerStatus
from unfuse.launch import local
from unfuse.launch.base import WorkerSpec
from unfuse.launch.local import LocalLauncher
from unfuse.service import service
from unfuse.transfer.session import TransferCounters
from unfuse.wire import mailbox
from unfuse.wire.dealer import Dealer
from unfuse.wire.keys import create_keys, read_keys
from unfuse.wire.router import Router
from unfuse.worker import executor as executing
from unfuse.worker.compute_process import ComputeProcess
from unfuse.worker.device_health import DeviceHealth
from unfuse.worker.executor import Executor
from unfuse.worker.heartbeats import Heartbeats
from unfuse.worker.link import TaskSlots
from unfuse.worker.loaded_models import ModelSwapper
from unfuse.worker.worker import Worker

CLAIM = Claim("a", "s", 1, b"t")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.0)
    monkeypatch.setattr(mailbox, "PAUSE_S", 0.0)


def once(whole: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """A function that raises the first time."""
    errors = [error]

    def called(*args: Any, **more: Any) -> Any:
        if errors:
            raise errors.pop()
        return whole(*args, **more)

    return called


class Failing:
    """A socket that fails the first time that something is read."""

    def __init__(self, socket: Any) -> None:
        self._socket, self.recv_multipart = socket, once(socket.recv_multipart, OSError(12, "Cannot allocate memory"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


async def accept(peer: bytes, message: ToScheduler) -> ToWorker:
    return Accepted()


async def undelivered(peer: bytes, reply: ToWorker) -> None:
    return


@asynccontextmanager
async def line(folder: Path) -> AsyncIterator[tuple[Router, Dealer]]:
    create_keys(folder)
    router = Router("tcp://127.0.0.1:0", accept, undelivered, read_keys(str(folder), "scheduler"))
    dealer = Dealer(router.address, read_keys(str(folder), "worker"))
    try:
        yield router, dealer
    finally:
        await dealer.close()
        await router.close()


async def test_router_and_dealer_continue_after_a_receive_error(tmp_path: Path) -> None:
    async with line(tmp_path / "keys") as (router, dealer):
        assert await dealer.call(Unregister(), 30) == Accepted()
        for end in (router, dealer):
            end._mailbox._socket = Failing(end._mailbox._socket)  # type: ignore[assignment]
        with capture_logs() as logs:
            for _ in range(3):
                assert await dealer.call(Unregister(), 30) == Accepted()
    assert {line["doing"] for line in logs} == {"receiving from workers", "receiving from the scheduler"}


async def test_router_authenticates_workers_after_a_failed_key_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfuse.wire.keys.z85.decode", once(z85.decode, ValueError("odd")))
    create_keys(tmp_path / "keys")
    router = Router("tcp://127.0.0.1:0", accept, undelivered, read_keys(str(tmp_path / "keys"), "scheduler"))
    answers = []
    for _ in range(2):
        dealer = Dealer(router.address, read_keys(str(tmp_path / "keys"), "worker"))
        try:
            answers.append(await dealer.call(Unregister(), 3))
        except (TimeoutError, ConnectionError):
            answers.append(None)
        await dealer.close()
    await router.close()
    assert answers[-1] == Accepted()


@pytest.mark.slow
async def test_launcher_retries_after_a_worker_fails_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "RESTART_S", 0.0)
    begin, started = asyncio.create_subprocess_exec, asyncio.Event()

    async def sleeper(*command: str, **options: Any) -> Any:
        started.set()
        return await begin(sys.executable, "-c", "import time; time.sleep(600)", stdin=asyncio.subprocess.DEVNULL)

    monkeypatch.setattr(
        asyncio, "create_subprocess_exec", once(sleeper, OSError(11, "Resource temporarily unavailable"))
    )
    workers = LocalLauncher([WorkerSpec("encoder")])
    with capture_logs() as logs:
        workers.start()
        await started.wait()
        await workers.stop(0)
    assert [line["doing"] for line in logs] == ["starting a worker"]


async def test_cleanup_loops_of_serve_continue_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORGET_S", "REMAINS_S"):
        monkeypatch.setattr(service, name, 0.0)
    forgotten, dropped = asyncio.Event(), asyncio.Event()

    async def forget(before: float) -> list[str]:
        return []

    async def over(requests: tuple[str, ...]) -> list[str]:
        dropped.set()
        return []

    loop = asyncio.get_running_loop()
    results: Any = SimpleNamespace(
        forget=once(lambda before: loop.call_soon_threadsafe(forgotten.set), OSError(5, "io"))
    )
    place: Any = SimpleNamespace(requests=once(dict, OSError(5, "io")), drop=None)
    queue: Any = SimpleNamespace(drop_ended_before=forget)
    background = Supervisor()
    with capture_logs():
        background.start_loop("forgetting", partial(service._forget, queue, results, 60.0))
        background.start_loop("dropping", partial(service._drop_remains, SimpleNamespace(releasable=over), [place]))  # type: ignore[arg-type]
        await asyncio.gather(forgotten.wait(), dropped.wait())
        await background.close()


async def test_worker_heartbeats_and_task_requests_continue_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a worker whose usage, and then what it wants, cannot be worked out once, then it says that it lives, and
    asks for work, the next time."""
    beaten, asked = asyncio.Event(), asyncio.Event()

    class Line:
        async def once(self, message: ToScheduler, timeout: float = 0) -> ToWorker:
            (beaten if isinstance(message, Heartbeat) else asked).set()
            return HeartbeatReply((), ()) if isinstance(message, Heartbeat) else Accepted()

    worker: Any = Worker(a_worker(unix_address()))
    await worker._link.close()
    worker._link = Line()
    worker._next_request = once(lambda *_: RequestTasks(1, None, 0.0), KeyError("x"))
    usage = once(lambda: MemoryUsage(0, 0, 0, 0, 0, 0), RuntimeError("x"))
    worker._objects = SimpleNamespace(
        copies=SimpleNamespace(counters=TransferCounters()), usage=usage, stored_requests=list
    )
    worker._executor = SimpleNamespace(status=WorkerStatus(), ready=False, retracted=0, health=DeviceHealth())
    worker._swapper = ModelSwapper({}, ())
    worker._slots, worker._active, worker._beat_s = TaskSlots(1, {}), {}, 1.0
    worker._heartbeats = Heartbeats(worker._link, worker._executor, worker._objects, {}, 1.0)
    with capture_logs() as logs:
        worker._background.start_loop("beating", worker._send_heartbeat)
        worker._background.start_loop("asking", worker._pull)
        while not (beaten.is_set() and asked.is_set()):
            worker._changed.set()
            await asyncio.sleep(0)
        await worker._background.close()
    assert {line["doing"] for line in logs} == {"beating", "asking"}


async def test_executor_reads_and_watches_compute_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an executor whose report fails once, and whose look at the process does, then it hears the next message,
    and looks again."""
    monkeypatch.setattr(executing, "WATCH_S", 0.0)
    heard, looked = asyncio.Event(), asyncio.Event()
    step = StepProgress(CLAIM, 1, 2, 1)

    async def note(message: object) -> None:
        heard.set()

    async def receive() -> StepProgress:
        await asyncio.sleep(0)
        return step

    look = once(lambda limit: looked.set() or "", OSError(5, "io"))
    process = SimpleNamespace(pid=1, receive=receive, memory_excess=look, halted=lambda seconds: "")
    executor: Any = Executor([], once(note, KeyError("x")))
    executor._sent, executor._processes = {CLAIM: None}, [process]
    background = Supervisor()
    with capture_logs() as logs:
        background.start_loop("running the compute processes", executor.serve)
        background.start_loop("watching the compute processes", executor._watch)
        await asyncio.gather(heard.wait(), looked.wait())
        await background.close()
        await executor._background.close()
    assert {line["doing"] for line in logs} == {"running the compute processes", "watching the compute processes"}


async def test_compute_log_is_read_to_the_end_if_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a standard error of ours that is closed, then compute's is read to its end all the same: else it waits."""
    background = Supervisor()
    process: Any = ComputeProcess(None, background)  # type: ignore[arg-type]
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo\n")
    os.close(writing)

    def full(text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=full, flush=lambda: None))
    with capture_logs():
        await process._read_log(reading)
    assert process.log == "one\ntwo\n"
