"""One server for all modules that ask it as it comes: starting one costs 20 seconds of a core."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.pictures import REFERENCES, SHAPES, called, undivided
from tests.once import once
from tests.stores.conftest import redis_server, s3_server
from tools.server import Server, serving

__all__ = ["redis_server", "s3_server"]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """The frames of each of REFERENCES, undivided."""

    def make(folder: Path) -> None:
        undivided(SHAPES, folder, [called(case) for cases in REFERENCES.values() for case in cases])

    made = iter(json.loads((once("references", tmp_path_factory, make) / "out.json").read_text()))
    return {name: [next(made) for _ in cases] for name, cases in REFERENCES.items()}


@pytest.fixture(scope="session")
def expected_pair(references: dict[str, list[list[str]]]) -> list[str]:
    """The pixels of PAIR, undivided."""
    return [frames[0] for frames in references["pair"]]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), "--arena", "64MiB") as server:
        yield server.ready()


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that starts no workers, with short leases; tests start workers by hand."""
    with serving(tmp_path_factory.mktemp("bare"), "--workers", "none", UNFUSE_LEASE__TTL_S="2") as server:
        yield server
