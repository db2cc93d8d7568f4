"""How busy a worker says it is: a mean over the last seconds, by time that a test sets."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from unfuse.core.compute import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.core.messages import Failed, Stopped
from unfuse.core.task import Claim
from unfuse.worker.busy import OVER_S, PAGE, BusyShare, resident
from unfuse.worker.compute import _device, telling
from unfuse.worker.compute_messages import DeviceHeld, FromCompute, Ready


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


def test_a_worker_computes_on_what_torch_found_and_its_ranks_on_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are not there: torch's answers are set."""

    def on(ranks: int = 1, rank: int = 0, device: str = "auto") -> str:
        load = SimpleNamespace(
            compute=ComputeOptions(device=device, threads=torch.get_num_threads()), ranks=ranks, rank=rank
        )
        return _device(load, True)  # type: ignore[arg-type]

    assert (on(), on(2, 1), on(device="cpu")) == ("cpu", "cpu", "cpu")
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    assert (on(), on(2, 1)) == ("xpu", "xpu:1")
    with pytest.raises(ConfigError, match="needs 3 GPUs, and there are 2"):
        on(3)
    with pytest.raises(ConfigError, match="--device cuda:1: torch .* has cpu, xpu:0, xpu:1 here"):
        on(device="cuda:1")
