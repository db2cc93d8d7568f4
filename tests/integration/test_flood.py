"""Floods on the control port while pictures are made: all of them are, by the same workers, and the gateway answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from tests.integration.test_restarts import installed
from tools.server import Server, environment, serving, until
from unfuse.wire.keys import create_keys

ROOT = Path(__file__).parents[2]
PICTURES = 4
ROOM = 768 << 20
"""Bytes that a flood may have the server take: three times of what all unanswered messages may."""


class Watch:
    """Asks for a server's health over and over, and remembers the most memory it took."""

    def __init__(self, server: Server) -> None:
        self._server, self._process = server, psutil.Process(server.process.pid)
        self._over = Event()
        self.asked = self.answered = self.most = 0
        self.least = self._process.memory_info().rss
        self._thread = Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.asked += 1
            self.answered += self._server.get("/health") is not None
            self.most = max(self.most, self._process.memory_info().rss)


@contextmanager
def flooded(server: Server, kind: str, keys: Path | None) -> Iterator[subprocess.Popen[str]]:
    """A flood from a process of its own, at work."""
    command = [sys.executable, "-m", "tests.integration.flood", server.control, kind, *([str(keys)] if keys else [])]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(server.folder), stdout=subprocess.PIPE, text=True
    ) as flood:
        try:
            yield flood
        finally:
            flood.kill()


def crew(server: Server) -> dict[str, Any]:
    """Who works there: processes by id, of those that are healthy."""
    return {worker["id"]: worker["pid"] for worker in server.get("/v1/workers")["data"] if worker["healthy"]}


def weathers(server: Server, kind: str, keys: Path | None = None, dropped: bool = True) -> None:
    """Work goes on under a flood as if there was none."""
    before = crew(server)
    with Watch(server) as watch, flooded(server, kind, keys) as flood:
        if dropped:
            assert flood.stdout
            assert flood.stdout.readline() == "dropped\n"
        requests = [server.submit("a red circle on white", seed=seed) for seed in range(PICTURES)]
        assert [server.finished(request)["status"] for request in requests] == ["completed"] * PICTURES
        assert flood.poll() is None
        asked = watch.asked
        until(lambda: watch.asked > asked + 20, "some more answers")
    assert watch.answered == watch.asked
    assert watch.most < watch.least + ROOM
    assert before.items() <= crew(server).items()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose pictures cost nothing: the floods are of its control port."""
    folder = tmp_path_factory.mktemp("serve")
    model, variables = installed(folder)
    with serving(folder, model, "--arena", "16MiB", **variables) as server:
        yield server.ready()


@pytest.mark.parametrize("kind", ["tiny", "large"])
def test_invalid_message_floods_are_dropped_while_requests_complete(server: Server, kind: str) -> None:
    weathers(server, kind)


def test_flood_of_valid_control_messages_does_not_delay_requests(server: Server) -> None:
    weathers(server, "asked", dropped=False)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys in the folder beside its own."""
    folder = tmp_path_factory.mktemp("keyed")
    create_keys(folder / "keys")
    model, variables = installed(folder)
    keys = ("--keys", str(folder / "keys"))
    with serving(folder, model, "--arena", "16MiB", *keys, at="127.0.0.1", **variables) as server:
        yield server.ready()


@pytest.mark.parametrize("kind", ["tiny", pytest.param("large", marks=pytest.mark.nightly)])
def test_unauthenticated_floods_are_dropped_if_keys_are_required(keyed: Server, kind: str) -> None:
    weathers(keyed, kind)


@pytest.mark.parametrize("kind", ["tiny", pytest.param("large", marks=pytest.mark.nightly)])
def test_floods_with_a_valid_worker_key_are_dropped(keyed: Server, kind: str) -> None:
    weathers(keyed, kind, keyed.folder / "keys")
