"""One server a module: starting one costs seconds of imports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.harness import Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), "--arena", "64MiB") as server:
        yield server.ready()


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that starts no workers, with short leases; tests start workers by hand."""
    with serving(tmp_path_factory.mktemp("bare"), "--no-workers", UNFUSE_LEASE__TTL_S="2") as server:
        yield server
