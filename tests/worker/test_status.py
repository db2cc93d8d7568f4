"""The status of a worker: what compute processes report, and how busy they are by time that a test sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from unfuse.core.compute_options import ComputeOptions
from unfuse.core.errors import ConfigError
from unfuse.core.text import TextStats
from unfuse.core.worker_status import BatchInvarianceStats
from unfuse.worker.compute import _device, compute_device
from unfuse.worker.compute_messages import RankStatus
from unfuse.worker.executor import OVER_S, PAGE, BusyShare, resident
from unfuse.worker.ranks import Ranks
from unfuse.worker.status_reporter import StatusReporter

Reported = tuple[StatusReporter, list[RankStatus]]


def test_utilization_is_an_exponential_moving_average() -> None:
    times = [0.0]
    share = BusyShare(lambda: times[0])
    assert share.utilization == 0.0
    share.set_busy(True)
    times[0] = OVER_S
    assert share.utilization == pytest.approx(0.632, abs=0.001)
    share.set_busy(True)
    times[0] = 100 * OVER_S
    assert share.utilization == pytest.approx(1.0)
    share.set_busy(False)
    times[0] += OVER_S
    assert share.utilization == pytest.approx(0.368, abs=0.001)


def test_utilization_is_half_if_busy_half_of_the_time() -> None:
    times = [0.0]
    share = BusyShare(lambda: times[0])
    for number in range(2000):
        share.set_busy(number % 2 == 0)
        times[0] += 0.1
    assert share.utilization == pytest.approx(0.5, abs=0.01)


def test_resident_memory_ignores_missing_processes() -> None:
    own = resident([os.getpid()])
    assert own > PAGE * 100
    assert resident([os.getpid(), 0, 1 << 30]) == pytest.approx(own, rel=0.2)


def test_device_memory_is_the_memory_reserved_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is not there: torch's answer is set."""
    assert compute_device("cpu").reserved_bytes() == 0
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: {"cuda:1": 5 << 30}[device])
    assert compute_device("cuda:1").reserved_bytes() == 5 << 30


class Texts:
    """Blocks that a test sets."""

    def __init__(self, free: int) -> None:
        self.used, self.free, self.retracted = 0, free, 0

    def load(self) -> TextStats:
        return TextStats(self.used, self.free - self.used, 0)


def reporter(
    *texts: Texts | None, sharing: Mapping[str, BatchInvarianceStats] | None = None, memory: int = 0
) -> Reported:
    """A reporter of stages that have these texts, and what it has sent."""
    sent, stages = list[RankStatus](), [SimpleNamespace(texts=one) for one in texts]
    made = StatusReporter(stages, sharing or {}, Ranks(), lambda: memory, sent.append)  # type: ignore[arg-type]
    return made, sent


def test_kv_cache_shared_by_stages_is_reported_once_and_models_summed() -> None:
    """Given both stages of one model, one of another, and one without texts, then blocks of both models are summed."""
    one, other = Texts(10), Texts(5)
    status, sent = reporter(one, one, other, None)
    status.report(busy=False)
    one.used, other.used, one.retracted = 4, 1, 3
    status.report(busy=False)
    other.retracted = 1
    status.report(busy=False)
    assert sent == [
        RankStatus(texts=TextStats(0, 15)),
        RankStatus(texts=TextStats(5, 10), retracted=3),
        RankStatus(texts=TextStats(5, 10), retracted=4),
    ]


def test_status_is_rate_limited_while_busy_and_flushed_when_idle() -> None:
    texts = Texts(10)
    status, sent = reporter(texts)
    for texts.used in range(1, 4):
        status.report(busy=True)
    assert [one.texts and one.texts.used for one in sent] == [1]
    status.report(busy=False)
    status.report(busy=False)
    assert [one.texts and one.texts.used for one in sent] == [1, 3]


def test_batch_invariance_stats_and_gpu_memory_are_reported() -> None:
    sharing = {"pool": BatchInvarianceStats(4)}
    status, sent = reporter(sharing=sharing, memory=5)
    status.report(busy=False)
    sharing["pool"] = BatchInvarianceStats(8)
    status.report(busy=False)
    assert sent == [
        RankStatus(device_memory=5, batch_invariance={"pool": BatchInvarianceStats(4)}),
        RankStatus(device_memory=5, batch_invariance={"pool": BatchInvarianceStats(8)}),
    ]


def test_nothing_to_report_sends_no_status() -> None:
    status, sent = reporter(None)
    status.report(busy=False)
    assert not sent


def test_auto_device_is_the_accelerator_and_each_rank_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are not there: torch's answers are set."""

    def on(ranks: int = 1, rank: int = 0, device: str = "auto") -> str:
        load = SimpleNamespace(
            compute=ComputeOptions(device=device, threads=torch.get_num_threads()), ranks=ranks, rank=rank
        )
        return _device(load, True)  # type: ignore[arg-type]

    assert (on(), on(2, 1), on(device="cpu")) == ("cpu", "cpu", "cpu")
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setattr("unfuse.parallel.devices.check", lambda device: None)
    assert (on(), on(2, 1)) == ("xpu", "xpu:1")
    with pytest.raises(ConfigError, match="needs 3 GPUs, and there are 2"):
        on(3)
    with pytest.raises(ConfigError, match="--device cuda:1: torch .* has only cpu, xpu:0, xpu:1"):
        on(device="cuda:1")


def test_cuda_build_that_finds_no_gpu_logs_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    load = SimpleNamespace(compute=ComputeOptions(threads=torch.get_num_threads()), ranks=1, rank=0)
    with capture_logs() as records:
        assert _device(load, True) == "cpu"  # type: ignore[arg-type]
    assert [record["event"] for record in records] == ["no GPU can be used"]
    assert records[0]["reason"].startswith("cuda: Torch not compiled with CUDA enabled")
