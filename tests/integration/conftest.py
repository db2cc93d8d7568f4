"""One server for all modules that ask it as it comes: starting one costs 20 seconds of a core."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.pictures import PAIR, SHAPES, defaults, undivided
from tests.once import once
from tests.stores.conftest import redis_server, s3_server
from tools.server import Server, serving

__all__ = ["redis_server", "s3_server"]


@pytest.fixture(scope="session")
def expected_pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The pixels of PAIR, undivided."""
    cases = [defaults() | case for case in PAIR]

    def make(folder: Path) -> None:
        undivided(SHAPES, folder, cases)

    folder = once("pair", tmp_path_factory, make)
    return [frames[0] for frames in json.loads((folder / "out.json").read_text())]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), "--arena", "64MiB") as server:
        yield server.ready()


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that starts no workers, with short leases; tests start workers by hand."""
    with serving(tmp_path_factory.mktemp("bare"), "--no-workers", UNFUSE_LEASE__TTL_S="2") as server:
        yield server
