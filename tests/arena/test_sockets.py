"""Sockets of arenas: found by who may, in the folder where they lie, and removed when nobody is there any more."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from unfuse.arena import protocol
from unfuse.arena.protocol import listen, remove_stale, socket_name
from unfuse.core.errors import ConfigError

NAME = "arena-" + "0" * 24


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="run-") as folder:
        yield Path(folder)


def test_socket_names_are_unique_and_of_fixed_length(folder: Path) -> None:
    made = [listen(folder) for _ in range(100)]
    assert len({path for _, path in made}) == 100
    assert {len(path.name) for _, path in made} == {30}, "with a separator it fits the room for names of a run folder"
    assert sorted(folder.iterdir()) == sorted(path for _, path in made)
    for listener, _ in made:
        listener.close()


def test_unusable_socket_folder_raises_config_error_with_its_path(folder: Path) -> None:
    deep = folder / ("x" * 100)
    deep.mkdir()
    for place in (folder / "gone", deep):
        with pytest.raises(ConfigError, match=f"{place}.*UNFUSE_RUN_DIR"):
            listen(place)


@pytest.mark.slow
def test_remove_stale_removes_only_sockets_of_dead_processes(folder: Path) -> None:
    """Also beside what is no socket, what belongs to others, and one that has more callers than it takes."""
    killed = (
        f"import os, pathlib; from unfuse.arena.protocol import listen; listen(pathlib.Path({os.fspath(folder)!r}))"
    )
    subprocess.run([sys.executable, "-c", f"{killed}; os.kill(os.getpid(), 9)"])
    (left,) = folder.iterdir()
    living, busy = listen(folder), listen(folder)
    callers: list[socket.socket] = []
    with pytest.raises(BlockingIOError):
        while True:
            callers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            callers[-1].connect(os.fspath(busy[1]))
    others = [folder / NAME, folder / "machine", folder / "scheduler-1"]
    for path in others[:2]:
        path.write_text("")
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(os.fspath(others[2]))

    assert remove_stale(folder) == [left]

    assert sorted(folder.iterdir()) == sorted([living[1], busy[1], *others])
    for end in (living[0], busy[0], *callers):
        end.close()
    assert set(remove_stale(folder)) == {living[1], busy[1]}


def test_socket_removed_before_listening_is_created_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its name and its first answer a socket looks as the dead do."""
    renamed, removed = os.rename, []

    def late(draft: Path, path: Path) -> None:
        if not removed:
            removed.append(draft)
            draft.unlink()
        renamed(draft, path)

    monkeypatch.setattr(protocol.os, "rename", late)
    listener, path = listen(folder)
    assert removed and list(folder.iterdir()) == [path] and remove_stale(folder) == []
    listener.close()


def test_concurrent_listen_and_remove_stale_lose_no_live_socket(folder: Path) -> None:
    def live(_: int) -> bool:
        listener, path = listen(folder)
        remove_stale(folder)
        with (
            listener,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as caller,
            suppress(BlockingIOError),  # so many look whether it lives, and nobody answers here: it does
        ):
            caller.connect(os.fspath(path))
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(live, range(200)))
    remove_stale(folder)
    assert list(folder.iterdir()) == []


def test_socket_name_replaces_the_folder_of_the_address(folder: Path) -> None:
    assert socket_name(f"unix:/elsewhere/{NAME}", folder) == f"{folder}/{NAME}"
    assert socket_name(f"unix:/elsewhere/{NAME}") == f"/elsewhere/{NAME}"
