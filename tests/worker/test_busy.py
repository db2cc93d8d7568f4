"""How busy a worker says it is: a mean over the last seconds, by time that a test sets."""

from __future__ import annotations

import os

import pytest

from unfuse.core.messages import Failed
from unfuse.core.task import Claim
from unfuse.worker.busy import OVER_S, PAGE, BusyShare, resident
from unfuse.worker.compute import telling
from unfuse.worker.compute_messages import DeviceHeld, FromCompute, Ready, Stopped


def test_the_share_nears_what_is_and_forgets_what_was() -> None:
    times = [0.0]
    share = BusyShare(lambda: times[0])
    assert share.share == 0.0
    share.tell(True)
    times[0] = OVER_S
    assert share.share == pytest.approx(0.632, abs=0.001)
    share.tell(True)
    times[0] = 100 * OVER_S
    assert share.share == pytest.approx(1.0)
    share.tell(False)
    times[0] += OVER_S
    assert share.share == pytest.approx(0.368, abs=0.001)


def test_half_of_the_time_is_half() -> None:
    times = [0.0]
    share = BusyShare(lambda: times[0])
    for number in range(2000):
        share.tell(number % 2 == 0)
        times[0] += 0.1
    assert share.share == pytest.approx(0.5, abs=0.01)


def test_memory_is_that_of_processes_that_are_there() -> None:
    own = resident([os.getpid()])
    assert own > PAGE * 100
    assert resident([os.getpid(), 0, 1 << 30]) == pytest.approx(own, rel=0.2)


def test_a_process_on_a_gpu_tells_what_it_holds_when_it_is_ready_and_when_a_task_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU is not there: torch's answer is set."""
    told: list[FromCompute] = []
    assert telling(told.append, "cpu") == told.append
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: {"cuda:1": 5 << 30}[device])
    send, claim = telling(told.append, "cuda:1"), Claim("r", "denoise", 1, b"token")
    messages: list[FromCompute] = [Ready("a GPU", {}, {}), Stopped(claim), Failed(claim, "permanent", "no")]
    for message in messages:
        send(message)
    held = DeviceHeld(5 << 30)
    assert told == [messages[0], held, messages[1], messages[2], held]
