"""Sockets in a run folder: one listens at each, nobody takes it from them, and the dead leave none for long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import stranger
from unfuse.core.errors import ConfigError
from unfuse.core.messages import Heartbeat, HeartbeatReply, ToScheduler, ToWorker
from unfuse.wire.dealer import Dealer
from unfuse.wire.router import Router
from unfuse.wire.unix_socket import is_listening, listen_unix, private_socket, running_servers, server_socket


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="run-") as made:
        yield Path(made)


def dead(path: Path) -> Path:
    """A socket as a killed process leaves it."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
    assert path.is_socket()
    return path


async def answer(_: bytes, __: ToScheduler) -> ToWorker:
    return HeartbeatReply((), ())


async def undelivered(_: bytes, __: ToWorker) -> None:
    """Nothing was granted."""


def test_running_servers_are_listed_by_port(folder: Path) -> None:
    dead(server_socket(folder, 8002))
    own = private_socket(folder)
    with listen_unix(server_socket(folder, 8010)), listen_unix(server_socket(folder, 8000)), listen_unix(own):
        assert list(running_servers(folder).items()) == [(port, server_socket(folder, port)) for port in (8000, 8010)]
    assert running_servers(folder) == {}


def test_stale_sockets_are_replaced_and_removed(folder: Path) -> None:
    path = dead(server_socket(folder, 8000))
    others = [dead(server_socket(folder, 8001)), dead(private_socket(folder))]
    note = folder / "serve-8002.sock"
    note.write_text("no socket, somebody's file")

    with listen_unix(path) as listener, socket.socket(socket.AF_UNIX) as caller:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(BlockingIOError):
            listener.accept()
        caller.connect(str(path))
        listener.accept()[0].close()

    assert not any(other.exists() for other in others)
    assert note.exists()


@pytest.mark.parametrize("full", [False, True], ids=["idle", "with a full line"])
def test_socket_with_a_live_listener_is_not_replaced(folder: Path, full: bool) -> None:
    path = server_socket(folder, 8000)
    with ExitStack() as stack:
        listener = stack.enter_context(listen_unix(path))
        if full:
            listener.listen(0)
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        assert is_listening(path)
        before = path.stat().st_ino
        with pytest.raises(ConfigError, match="it is taken"):
            listen_unix(path)
        assert path.stat().st_ino == before


def test_only_one_of_many_processes_replaces_a_stale_socket(folder: Path) -> None:
    path = dead(server_socket(folder, 8000))

    def attempt(_: int) -> socket.socket | None:
        try:
            return listen_unix(path)
        except ConfigError:
            return None

    with ThreadPoolExecutor(16) as pool:
        (won,) = [found for found in pool.map(attempt, range(64)) if found]
    with won, socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
        won.accept()[0].close()


def test_file_or_symlink_at_the_socket_path_is_not_replaced(folder: Path) -> None:
    (folder / "real").write_text("mine")
    (folder / "link.sock").symlink_to("real")
    for name in ("real", "link.sock"):
        with pytest.raises(ConfigError, match="it is taken"):
            listen_unix(folder / name)
    assert (folder / "real").read_text() == "mine"


async def test_closed_router_removes_its_socket_and_frees_its_path(folder: Path) -> None:
    address = f"unix:{server_socket(folder, 8000)}"
    for _ in range(2):
        router = Router(address, answer, undelivered)
        with pytest.raises(ConfigError, match="it is taken"):
            Router(address, answer, undelivered)
        dealer = Dealer(address)
        assert await dealer.call(Heartbeat(), 60) == HeartbeatReply((), ())
        await dealer.close()
        await router.close()
        assert list(folder.iterdir()) == []


async def test_router_and_dealer_reject_an_insecure_socket_folder(folder: Path) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    reasons = {"open": r"mode 777.*chmod 700", "link": "is not a folder"}
    if os.geteuid() == 0:
        (folder / "theirs").mkdir(mode=0o700)
        os.chown(folder / "theirs", 4321, 4321)
        reasons["theirs"] = f"belongs to uid 4321.*uid {os.geteuid()}"
    for name, reason in reasons.items():
        address = f"unix:{folder / name}/serve-8000.sock"
        with pytest.raises(ConfigError, match=reason):
            Router(address, answer, undelivered)
        with pytest.raises(ConfigError, match=reason):
            Dealer(address)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_permission_error_names_the_uid_and_unfuse_run_dir(folder: Path) -> None:
    script = (
        "import os, sys; from unfuse.wire.unix_socket import ConfigError, running_servers; os.setuid(4321)\n"
        "try: running_servers(sys.argv[1])\nexcept ConfigError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", script, folder / "unfuse"], capture_output=True, text=True, check=True)
    assert "cannot be used by uid 4321 (Permission denied): set UNFUSE_RUN_DIR" in said.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_other_user_is_rejected_even_if_folder_permissions_allow_it(folder: Path) -> None:
    heard: list[ToScheduler] = []

    async def hear(_: bytes, message: ToScheduler) -> ToWorker:
        heard.append(message)
        return HeartbeatReply((), ())

    path = server_socket(folder, 8000)
    router = Router(f"unix:{path}", hear, undelivered)
    try:
        folder.chmod(0o777)
        path.chmod(0o777)
        happened = await stranger.says(f"ipc://{path}", uid=4321)
        assert happened[0] == "CONNECTED"
        assert not stranger.HEARD & {*happened}
        assert heard == []
        assert (await stranger.says(f"ipc://{path}"))[-1] == "HeartbeatReply"
    finally:
        await router.close()
