"""What requests cost: whose part of a device is whose, and what prices make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from unfuse.core.clock import SystemClock
from unfuse.core.errors import ConfigError
from unfuse.core.plan import ExecutionPlan
from unfuse.core.request import (
    GenerationRequest,
    RequestContext,
    RunningStage,
    StageState,
    Timings,
    billed_seconds,
    lost_seconds,
)
from unfuse.edge.keys import ApiKeys
from unfuse.queues.memory import MemoryQueue
from unfuse.server.gateway import Gateway
from unfuse.server.request_objects import FREE, Prices
from unfuse.testing.queue_samples import request_context

H100 = "NVIDIA H100 80GB HBM3"


def context(tenant: str = "ada", **timings: Timings) -> RequestContext:
    stages = {name: StageState("done", attempt=1, timings=one) for name, one in timings.items()}
    request = GenerationRequest("req_" + "0" * 32, "m", {})
    return request_context(request, ExecutionPlan(()), stages=stages, tenant=tenant, status="completed")


def test_billed_seconds_are_shared_in_a_batch_and_summed_over_devices() -> None:
    asked = context(
        alone=Timings(run_s=2.0, device="cpu", share_s=2.0),
        shared=Timings(run_s=8.0, batch=4.0, device=H100, share_s=2.0),
        spread=Timings(run_s=3.0, batch=1.0, device=H100, devices=2, share_s=3.0),
        cached=Timings(),
        unnamed=Timings(run_s=1.0, share_s=1.0),
    )
    assert billed_seconds(asked) == {"cpu": 2.0, H100: 8.0, "unknown": 1.0}


def test_running_stages_are_billed_for_at_most_their_elapsed_time() -> None:
    asked = context(first=Timings(device="cpu", share_s=2.0))
    running = [
        RunningStage("second", 1, "w", 100.0, timings=Timings(device="cpu", share_s=0.5)),
        RunningStage("third", 1, "w", 100.0, timings=Timings(device=H100, devices=2, share_s=1e8)),
    ]
    assert billed_seconds(asked, running, wall=104.0) == {"cpu": 2.5, H100: 8.0}
    assert billed_seconds(asked, running[:1], wall=90.0) == {"cpu": 2.5}, "the clock was set back"


def test_lost_attempts_are_not_billed() -> None:
    stages = {"s": StageState("done", attempt=3, timings=Timings(device="cpu", share_s=2.0), lost_s={"cpu": 4.0})}
    asked = msgspec.structs.replace(context(), stages=stages)
    assert (billed_seconds(asked), lost_seconds(asked)) == ({"cpu": 2.0}, {"cpu": 4.0})


def test_prices_are_per_hour_and_devices_without_a_price_are_free() -> None:
    took = {"cpu": 1800.0, H100: 7200.0, "xpu": 3600.0, "unknown": 9.0}
    assert Prices(["cuda=1.20/h", "cpu=0.5/h"]).money(took) == pytest.approx(2.4 + 0.25)
    assert Prices(["xpu=3/h"]).money(took) == pytest.approx(3.0)
    assert Prices(["mps=3/h"]).money(took) == 0.0
    assert FREE.money(took) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cuda", "write KIND=AMOUNT/h, like cuda=1.20/h"),
        ("cuda=1.20", "write KIND=AMOUNT/h"),
        ("cuda=-1/h", "write KIND=AMOUNT/h"),
        ("cuda=nan/h", "write KIND=AMOUNT/h"),
        ("cdua=1/h", "unknown device kind cdua; did you mean cuda"),
        ("quantum=1/h", "kinds are cpu, cuda, xpu, mps"),
    ],
)
def test_invalid_price_or_unknown_device_kind_raises_config_error(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Prices([given])


def test_prices_of_absent_device_kinds_are_reported_as_unused() -> None:
    assert Prices(["cuda=1/h", "cpu=1/h"]).unused_kinds(["cpu"]) == ["cuda"]
    assert Prices(["cuda=1/h"]).unused_kinds(["cpu", "cuda:0", "cuda:1"]) == []


class Nobody:
    """What a gateway asks of a scheduler that has nothing to do."""

    queue = clock = None

    class observers:
        @staticmethod
        def add(*_: Any) -> None:
            return


async def test_device_seconds_and_money_metrics_are_summed_by_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ada k\nbob b\n")
    keys, prices = ApiKeys(files=[str(file)]), Prices(["cpu=3600/h"])
    gateway = Gateway(Nobody(), None, keys=keys, prices=prices)  # type: ignore[arg-type]
    for tenant, seconds in (("ada", 2.0), ("ada", 0.5), ("bob", 4.0), ("gone", 1.0)):
        gateway.on_ended(context(tenant, s=Timings(share_s=seconds, device="cpu")))
    gateway.on_billed(context("ada"), {"cpu": 0.25})  # a worker has reported more since
    gateway.metrics.on_lost_device_time(context("ada"), {"cpu": 8.0})
    page = (await gateway.metrics.render(MemoryQueue(SystemClock()), [], [])).decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    sums = {
        (sample.name, sample.labels["tenant"]): sample.value
        for sample in samples
        if sample.name in ("unfuse_device_seconds_total", "unfuse_money_total")
    }
    (lost,) = [sample for sample in samples if sample.name == "unfuse_lost_device_seconds_total"]
    assert (lost.labels, lost.value) == ({"model": "m", "device": "cpu"}, 8.0)
    by_tenant = {"ada": 2.75, "bob": 4.0, "other": 1.0}
    assert sums == {
        (name, tenant): value
        for name in ("unfuse_device_seconds_total", "unfuse_money_total")
        for tenant, value in by_tenant.items()
    }
