"""How long exchanges take, on a GPU whose clock a test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unfuse.parallel import group
from unfuse.parallel.exchange_times import ExchangeTimes
from unfuse.parallel.group import Axis, Group

GPU = torch.device("cuda:0")
HOST = torch.device("cpu")


class Stream:
    """A stream: `enqueued_ms` of work are enqueued, of which the GPU has done `done_ms`."""

    def __init__(self) -> None:
        self.enqueued_ms, self.done_ms = 0.0, 0.0


class Event:
    """An event of a stream, as torch's. It cannot be waited for."""

    def __init__(self, stream: Stream, enable_timing: bool) -> None:
        assert enable_timing
        self._stream = stream

    def record(self) -> None:
        self.at_ms = self._stream.enqueued_ms

    def query(self) -> bool:
        return self._stream.done_ms >= self.at_ms

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "torch raises for an event that is not done"
        return end.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream of a GPU that is not there."""
    stream = Stream()

    def event(enable_timing: bool = False) -> Event:
        return Event(stream, enable_timing)

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=event))
    return stream


def test_exchange_on_a_gpu_takes_the_time_of_the_gpu_and_not_of_enqueuing(stream: Stream) -> None:
    times = ExchangeTimes(GPU)
    for exchange_ms in (5.0, 7.0):
        stream.enqueued_ms += 100.0
        with times.measure(GPU):
            stream.enqueued_ms += exchange_ms

    assert times.seconds == 0.0, "nothing waits for the GPU"
    stream.done_ms = 110.0
    assert times.seconds == pytest.approx(0.005)
    stream.done_ms = stream.enqueued_ms
    assert times.seconds == times.seconds == pytest.approx(0.012)


def test_exchange_of_host_memory_takes_the_time_of_the_host(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [3.0]
    monkeypatch.setattr("unfuse.parallel.exchange_times.time.monotonic", lambda: clock[0])
    times = ExchangeTimes(GPU)
    with times.measure(HOST):
        clock[0] = 5.0
    assert times.seconds == 2.0


def test_ranks_measure_exchanges_on_the_stream_of_their_gpu(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gathered tensors arrive in one buffer, which is not copied once more."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def gather(received: torch.Tensor, sent: torch.Tensor, **options: Any) -> None:
        calls.append((received, sent))
        stream.enqueued_ms += 4.0

    monkeypatch.setattr(group.dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(Group, "__init__", lambda self: None)
    ranks = Group()  # type: ignore[call-arg]
    ranks.device, ranks._has_met, ranks._times = GPU, True, ExchangeTimes(GPU)
    received = Axis(ranks, None, 0, 2).gather(torch.ones(3, 4))  # type: ignore[arg-type]

    assert (received.shape, calls[0][0].data_ptr()) == ((2, 3, 4), received.data_ptr())
    stream.done_ms = 4.0
    assert ranks.waited_s == pytest.approx(0.004)
