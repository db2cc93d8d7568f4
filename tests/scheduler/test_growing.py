"""Who hears how fast outputs grow: of each piece once, whichever attempt made it, and when it came."""

from __future__ import annotations

import pytest
from typing_extensions import override

from tests.scheduler.model import CARD, DENOISE, ENCODE, params
from tests.scheduler.test_scheduler import scheduling, take
from tools.asking import asking
from unfuse.core.messages import TaskFailed
from unfuse.core.supervisor import Observers, Supervisor
from unfuse.core.task import Lease, OutputDeltas
from unfuse.scheduler import output_rates
from unfuse.scheduler.observer import Observer
from unfuse.scheduler.output_rates import OutputRates
from unfuse.scheduler.scheduler import Scheduler


class Ear(Observer):
    """What was heard: of first pieces their number and seconds, of others too."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, float | None]] = []

    @override
    def on_first_delta(self, model: str, pieces: int, seconds: float) -> None:
        self.heard.append((f"first of {model}", pieces, seconds))

    @override
    def on_deltas(self, model: str, pieces: int, seconds: float | None) -> None:
        self.heard.append(("more", pieces, seconds))


async def begun(scheduler: Scheduler) -> tuple[str, Lease]:
    """A request, and its first task, which a worker has."""
    submitted = await scheduler.submit(*asking(CARD, params()))
    (lease,) = await take(scheduler, ENCODE, DENOISE)
    return submitted.context.id, lease


def pieces(lease: Lease, offset: int, number: int) -> OutputDeltas:
    return OutputDeltas(lease.claim, offset, tuple(b"%d" % at for at in range(offset, offset + number)))


async def test_observers_receive_each_output_delta_once_with_its_latency() -> None:
    """Given two pieces half a second after a request, three 0.3 s later, and two of these said again with one more,
    then the first are told since acceptance, the others since those before, and none twice."""
    async with scheduling() as (scheduler, clock):
        scheduler.observers.add(ear := Ear())
        _, lease = await begun(scheduler)
        for pause, offset, number in ((0.5, 0, 2), (0.3, 2, 3), (0.0, 3, 2), (0.25, 3, 3)):
            clock.advance(pause)
            assert await scheduler.output_rates.append([pieces(lease, offset, number)]) == {lease.claim}
        assert [(what, count, round(seconds or 0, 6)) for what, count, seconds in ear.heard] == [
            ("first of test/model", 2, 0.5),
            ("more", 3, 0.3),
            ("more", 1, 0.25),
        ]


async def test_observers_receive_only_recorded_deltas_across_attempts() -> None:
    """Given an attempt that was handed back after a piece, when the next goes on half a second later, then that is
    between two pieces; what the first still says, and what has a gap before it, is neither recorded nor told."""
    async with scheduling() as (scheduler, clock):
        scheduler.observers.add(ear := Ear())
        _, first = await begun(scheduler)
        await scheduler.output_rates.append([pieces(first, 0, 1)])
        await scheduler.fail(TaskFailed(first.claim, "hand_back", "no", reason="full"), "worker-1")
        (again,) = await take(scheduler, ENCODE, DENOISE)
        clock.advance(0.5)
        assert await scheduler.output_rates.append([pieces(first, 1, 1)]) == set()
        assert await scheduler.output_rates.append([pieces(again, 9, 1)]) == set()
        assert await scheduler.output_rates.append([pieces(again, 1, 1)]) == {again.claim}
        assert ear.heard == [("first of test/model", 1, 0.0), ("more", 1, 0.5)]


async def test_deltas_after_an_unseen_delta_are_reported_without_latency() -> None:
    """Given a text that another scheduler saw begin, then its next piece is counted without a time, and the one after
    with."""
    async with scheduling() as (scheduler, clock):
        _, lease = await begun(scheduler)
        await scheduler.output_rates.append([pieces(lease, 0, 4)])
        heard, ear = Observers[Observer](Supervisor()), Ear()
        heard.add(ear)
        other = OutputRates(scheduler.queue, clock, heard)
        await other.append([pieces(lease, 4, 2)])
        clock.advance(0.2)
        await other.append([pieces(lease, 6, 1)])
        assert [(what, count, seconds and round(seconds, 6)) for what, count, seconds in ear.heard] == [
            ("more", 2, None),
            ("more", 1, 0.2),
        ]


async def test_output_rates_are_bounded_and_removed_with_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_rates, "MAX_RATES", 2)
    async with scheduling() as (scheduler, _):
        begun_ones = [await begun(scheduler) for _ in range(4)]
        ids = [id for id, _ in begun_ones]
        for _, lease in begun_ones[:3]:
            await scheduler.output_rates.append([pieces(lease, 0, 1)])
        assert [request for request, _ in scheduler.output_rates._outputs] == ids[1:3]
        await scheduler.cancel(ids[1])
        assert [request for request, _ in scheduler.output_rates._outputs] == ids[2:3]
