"""The wire is tested in the event loop that `serve` runs in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    del config, item
    return {"uvloop": uvloop.new_event_loop}
