"""One gateway a module, and a plain HTTP client for it."""

from collections.abc import Iterator

import httpx2
import pytest

from tests.server.served import Served, serve
from tools.cards import MOVING, PICTURES, STILL


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("results")) as running:
        yield running


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, timeout=600, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway of models for pictures, for videos, and for videos and pictures that start from a picture."""
    with serve(tmp_path_factory.mktemp("studio"), cards=(PICTURES, MOVING, STILL)) as running:
        yield running


@pytest.fixture
def film_set(studio: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=studio.url, timeout=600, trust_env=False) as client:
        yield client
