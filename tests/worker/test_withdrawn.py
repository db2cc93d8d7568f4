"""A worker that can serve no pool any more asks for no work: the scheduler would answer each Ask at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unfuse.core.messages import ChangedFile
from unfuse.worker.holding import WITHDRAW
from unfuse.worker.worker import Worker

FILE = ChangedFile("vae/model.safetensors", compared=True)


@pytest.mark.parametrize(("changed", "asks"), [((), True), (("a",), True), (("a", "b"), False)])
def test_a_worker_asks_as_long_as_it_serves_a_pool(changed: tuple[str, ...], asks: bool) -> None:
    worker: Any = SimpleNamespace(
        _objects=SimpleNamespace(free=1, usage=lambda: SimpleNamespace(used=0)),
        _executor=SimpleNamespace(ready=True),
        _swapping=SimpleNamespace(going="", holds="all"),
        _served=SimpleNamespace(pools=("a", "b")),
        _weights=SimpleNamespace(changed=dict.fromkeys(changed, FILE)),
        _holding=SimpleNamespace(room=lambda *_: {}, ask=lambda *_: "an Ask"),
        _loaded="",
    )
    assert (Worker._wanted(worker) is not WITHDRAW) is asks
