"""How far workers are with loading, and why they could not start, by the lines that they write."""

from __future__ import annotations

import json
from typing import Any

from unfuse.server.gateway import JoinProgress
from unfuse.service.load_progress import StartProgress


def said(event: str, **more: Any) -> bytes:
    return json.dumps({"event": event, "level": "info", **more}).encode()


def test_the_earliest_phase_of_all_workers_counts_with_its_bytes() -> None:
    loads = StartProgress(2)
    assert loads.now() == JoinProgress("starting")
    loads.hear(0, said("fetching", done=3, total=10, rate=1.0))
    assert loads.now() == JoinProgress("starting"), "the other one has said nothing yet"
    loads.hear(1, said("fetching", done=4, total=10, rate=1.0))
    assert loads.now() == JoinProgress("fetching", 7, 20)
    for worker in (0, 1):
        loads.hear(worker, said("importing"))
    loads.hear(0, said("loading", done=5, total=8))
    assert loads.now() == JoinProgress("importing")
    loads.hear(1, said("loaded", done=8, total=8))
    assert loads.now() == JoinProgress("loading", 13, 16)
    for worker in (0, 1):
        loads.hear(worker, said("ready"))
    assert loads.now() is None


def test_ranks_are_added_up() -> None:
    loads = StartProgress(1)
    loads.hear(0, said("loading", done=1, total=4, rank=0))
    loads.hear(0, said("loading", done=2, total=4, rank=1))
    assert loads.now() == JoinProgress("loading", 3, 8)


def test_the_last_words_of_a_worker_are_the_reason() -> None:
    loads = StartProgress(1)
    assert loads.reason == ""
    for line in (b"Traceback", b"{", b"\xff", said("fetching", done="1", total=2), said("unknown")):
        loads.hear(0, line)
    assert (loads.reason, loads.now()) == ("", JoinProgress("starting"))
    loads.hear(0, b"unfuse: the weights are \xff damaged\r\n")
    assert loads.reason == "the weights are \ufffd damaged"
    loads.hear(7, said("ready"))
    assert loads.now() == JoinProgress("starting")


def test_without_workers_nothing_loads() -> None:
    assert StartProgress(0).now() is None
