"""The fork server before anybody asks it: it begins at once, and goes with who began it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.descriptors import descriptors, settled
from tools.server import environment, family_of, unfuse, until
from unfuse.launch.local import ForkServers, InheritedForks, LocalLauncher

pytestmark = pytest.mark.slow


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_unused_fork_server_ends_on_close() -> None:
    settled()
    before = descriptors()
    forks = ForkServers(["/nowhere"])
    begun = forks._first_server
    assert begun is not None and lives(begun.pid)

    forks.close()
    forks.close()

    assert not psutil.pid_exists(begun.pid)
    assert descriptors() <= before


async def test_fork_servers_exit_0_on_close_and_the_first_is_prestarted() -> None:
    forks = ForkServers(["/nowhere"])
    begun = forks._first_server
    first, second = forks.server(), forks.server()
    assert first is begun and second.pid != first.pid and first.returncode is None
    forks.close()  # nobody holds the socket any more

    codes = [await server.wait() for server in (first, second)]
    assert codes == [server.returncode for server in (first, second)] == [0, 0]
    for server in (first, second):
        os.close(server.output)


async def test_killed_fork_server_returns_its_signal() -> None:
    forks = ForkServers(["/nowhere"])
    server = forks.server()
    server.send_signal(signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    os.close(server.output)
    forks.close()


def test_failed_serve_leaves_no_fork_server_process(tmp_path: Path) -> None:
    """Given a model that is refused once the fork server has begun, then that has ended when the command has."""
    (tmp_path / "model").mkdir()
    command = unfuse("serve", str(tmp_path / "model"), "--port", "0")
    process = subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    everyone: dict[int, psutil.Process] = {}

    def forking() -> bool:
        everyone.update({found.pid: found for found in family_of(process.pid)})
        return len(everyone) > 1

    until(lambda: forking() or process.poll() is not None, "the fork server to begin")
    _, said = process.communicate(timeout=60)

    assert process.returncode not in (0, None) and "model" in said
    assert not any(lives(pid) for pid in everyone)


def test_fork_server_is_prestarted_only_for_local_models_on_cpu(tmp_path: Path) -> None:
    script = (
        "from unfuse.cli.serve import start_fork_server_early; from unfuse.service.settings import load\n"
        "for told in ({'serve.workers': 'none'}, {'serve.place': 'all=cuda:0'}, {'compute.device': 'cuda:1'}, "
        "{'serve.models': ['owner/name']}):\n"
        "    with start_fork_server_early(load(told).settings) as forks: assert forks is None, told\n"
        "with start_fork_server_early(load({}).settings) as forks: assert forks is not None\n"
    )
    subprocess.run([sys.executable, "-c", script], env=environment(tmp_path), check=True)


async def test_launcher_neither_starts_nor_ends_inherited_fork_server() -> None:
    """Given the socket to one, then it closes its own descriptor of it alone."""
    forks = ForkServers(["/nowhere"])
    settled()
    before = descriptors()
    inherited = InheritedForks(os.dup(forks.socket_fd))
    children = {*psutil.Process().children()}
    workers = LocalLauncher([], forks=inherited.copy())
    workers.start()
    assert {*psutil.Process().children()} <= children
    await workers.stop(20)
    inherited.close()
    inherited.close()
    settled()
    assert descriptors() <= before
    assert forks._first_server is not None and forks._first_server.returncode is None
    forks.close()
