"""One gateway a module, and a plain HTTP client for it."""

from collections.abc import Iterator

import httpx2
import pytest

from tests.server.served import Served, serve


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("results")) as running:
        yield running


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, timeout=30, trust_env=False) as client:
        yield client
