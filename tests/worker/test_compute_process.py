"""Compute processes that are forked: what holds them alive, what they keep open, and what if the forking one dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.worker.forking import forking
from tools.server import until
from unfuse.core.codec import encode
from unfuse.worker import compute_process
from unfuse.worker.compute_process import StartedProcess, start_process
from unfuse.worker.fork_server import Fork, ForkServer, import_for

pytestmark = pytest.mark.slow

Forking = tuple[socket.socket, "subprocess.Popen[str]"]


@pytest.fixture
def server() -> Iterator[Forking]:
    """One that has imported no model, which is soon done."""
    with forking([]) as found:
        yield found


async def end(begun: StartedProcess) -> int | None:
    """How it ends now that its channel is closed."""
    begun.channel.close()
    async with asyncio.timeout(60):
        code = await begun.child.wait()
    os.close(begun.log)
    return code


async def test_forked_process_has_its_own_session_and_no_sibling_descriptors(server: Forking) -> None:
    first = await start_process({"MARK": "1"}, server[0])
    second = await start_process({"MARK": "2"}, server[0])
    child = psutil.Process(second.child.pid)
    until(lambda: child.name() == f"compute {os.getpid()}", "compute to begin")
    assert child.ppid() == server[1].pid
    assert os.getsid(child.pid) == child.pid
    opened = {name: os.readlink(f"/proc/{child.pid}/fd/{name}") for name in os.listdir(f"/proc/{child.pid}/fd")}
    assert opened["1"] == opened["2"] == os.readlink(f"/proc/self/fd/{second.log}")
    assert opened["0"] == "/dev/null"
    assert len(opened) == 4  # and the channel
    # its sibling lives, and holds nothing of it
    assert await end(second) == 0
    assert first.child.returncode is None
    assert await end(first) == 0


async def test_exit_status_of_a_forked_process_is_reported(server: Forking) -> None:
    for number in (signal.SIGKILL, signal.SIGSEGV):
        begun = await start_process({}, server[0])
        os.kill(begun.child.pid, number)
        assert await end(begun) == -number
        begun.child.kill()  # has no effect on whoever has that number now
        assert begun.child.returncode is not None
    broken = await start_process({}, server[0])
    broken.channel.sendall(struct.pack("<I", 4) + b"\xff\xff\xff\xff")  # no message
    async with asyncio.timeout(60):
        assert await broken.child.wait() == 1
    assert b"Traceback" in os.read(broken.log, 1 << 16)
    os.close(broken.log)
    broken.channel.close()


async def test_forked_processes_survive_the_death_of_the_fork_server(server: Forking) -> None:
    begun = await start_process({}, server[0])
    server[1].kill()
    server[1].wait()
    assert begun.child.returncode is None
    begun.child.kill()
    assert await end(begun) == compute_process.UNKNOWN

    alone = await start_process(os.environ, server[0])  # nobody forks, so it imports by itself
    assert psutil.Process(alone.child.pid).ppid() == os.getpid()
    assert await end(alone) == 0
    server[1].returncode = 0  # as the fixture will have it


async def test_process_is_spawned_if_the_fork_server_does_not_answer(
    server: Forking, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoSuchPipeline"}')
    with forking([str(tmp_path)]) as (refusing, _):
        begun = await start_process(os.environ, refusing)
        assert psutil.Process(begun.child.pid).ppid() == os.getpid()
        assert await end(begun) == 0

    too_long = os.environ | {"MARK": "x" * (1 << 20)}  # more than a message of that socket, and than exec takes
    with pytest.raises(OSError, match="too long"):
        await start_process(too_long, server[0])

    server[1].send_signal(signal.SIGSTOP)
    monkeypatch.setattr(compute_process, "FORK_S", 0.05)
    begun = await start_process(os.environ, server[0])
    assert psutil.Process(begun.child.pid).ppid() == os.getpid()
    server[1].send_signal(signal.SIGCONT)  # forks now, for nobody: that one ends by itself
    assert await end(begun) == 0


async def test_invalid_requests_do_not_harm_the_fork_server(server: Forking) -> None:
    asked, process = server
    null = os.open(os.devnull, os.O_RDONLY)
    assert await end(await start_process({}, asked)) == 0
    opened = set(os.listdir(f"/proc/{process.pid}/fd"))
    asked.send(b"\xff garbage")
    asked.send(encode(Fork({})))
    socket.send_fds(asked, [b"\xff garbage"], [null] * 3)
    socket.send_fds(asked, [encode(Fork({}))], [null] * 3)  # not to be answered
    socket.send_fds(asked, [encode(Fork({"MARK": "x" * 150_000}))], [null] * 9)
    os.close(null)
    begun = await start_process({}, asked)
    assert psutil.Process(begun.child.pid).ppid() == process.pid
    assert await end(begun) == 0
    until(lambda: set(os.listdir(f"/proc/{process.pid}/fd")) <= opened, "it closes what came with requests")


def test_a_process_with_threads_does_not_fork() -> None:
    """They would be missing in the child, with whatever locks they hold."""
    goes_on = threading.Event()
    other = threading.Thread(target=goes_on.wait)
    other.start()
    assert "threads running" in import_for([])
    goes_on.set()
    other.join()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        mine = os.dup(theirs.fileno())
        socket.send_fds(ours, [encode(Fork({}))], [mine] * 3)
        os.close(mine)
        assert ForkServer(theirs, "why not")._serve_request()
        assert b"why not" in ours.recv(4096)
