"""How large batches become: by what they cost per task, and by what fits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import mode
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings, strategies as st

from tests.worker.test_step_loop import bench
from unfuse.worker.batch_sizes import MAX_KEYS, SAMPLES, BatchSizes, BatchSizesFile

SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Forward:
    """A forward: when it ended, its size, how many waited, and how many times the least possible its tasks took."""

    at: float
    size: int
    waiting: int
    over: float


class Device:
    """A device on which a batch of each size takes so many seconds, more under `load` (by size), and never twice the
    same if there is `noise`; on its own clock.
    """

    def __init__(
        self,
        most: int,
        cost: dict[int, float],
        noise: float = 0.0,
        random: Random | None = None,
        file: Path | None = None,
        scope: str = "",
    ) -> None:
        self.cost, self.noise, self.random = cost, noise, random or Random(0)
        self.load: Callable[[int], float] = lambda size: 1.0
        self.sizes = BatchSizes(most, BatchSizesFile(file, scope))
        self.now = 0.0
        self.forwards: list[Forward] = []

    def forward(self, waiting: int) -> int:
        """Make one forward. Returns its size."""
        size = self.sizes.size("key", waiting)
        seconds = self.cost[size] * self.load(size) * (1 + self.random.uniform(-self.noise, self.noise))
        self.now += seconds
        self.sizes.measured("key", size, seconds)
        least = min(self.cost[other] / other for other in self.cost if other <= waiting)
        self.forwards.append(Forward(self.now, size, waiting, self.cost[size] / size / least))
        return size

    def run(self, times: int = 20, waiting: int = 64, slower: float = 1.0) -> list[int]:
        """The sizes of the next batches, where so many tasks wait; everything takes so many times as long."""
        before, self.load = self.load, lambda size: slower * before(size)
        seen = [self.forward(waiting) for _ in range(times)]
        self.load = before
        return seen

    def work(self, seconds: float, waiting: Callable[[], int] = lambda: 64) -> None:
        """Let this time pass, with so many tasks waiting at each forward."""
        until = self.now + seconds
        while self.now < until:
            self.forward(waiting())

    def over(self, start: float, end: float) -> float:
        """How many times the least possible the tasks of this time took, retries and all."""
        those = [one for one in self.forwards if start <= one.at < end]
        took = sum(self.cost[one.size] for one in those)
        return took / sum(self.cost[one.size] / one.over for one in those)


USUAL = {1: 0.058, 2: 0.075, 3: 0.1, 4: 0.127, 8: 0.2}
"""Each size is worth it."""
DISTURBED = {1: 0.2, 2: 0.5, 3: 0.8, 4: 1.2, 8: 3.0}
"""So they are while others use the device: none is."""


def test_a_batch_doubles_while_each_task_gets_cheaper() -> None:
    assert Device(8, {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}).run(4) == [1, 2, 4, 8]


def test_batch_size_shrinks_if_a_larger_batch_saves_nothing() -> None:
    device = Device(8, {1: 1.0, 2: 1.2, 4: 2.4, 8: 4.8})
    assert device.run(3) == [1, 2, 4]
    assert device.run(100).count(2) >= 75


def test_batch_size_stays_one_if_batching_saves_nothing() -> None:
    device = Device(8, {1: 1.0, 2: 2.0})
    assert device.run(4) == [1, 2, 1, 1]
    assert device.run(100).count(1) >= 85


def test_unused_batch_sizes_are_retried_occasionally() -> None:
    assert 3 <= Device(2, {1: 1.0, 2: 2.2}).run(100).count(2) <= 15
    assert 3 <= Device(2, {1: 1.0, 2: 1.4}).run(100).count(1) <= 15


def test_batch_size_that_became_much_faster_is_retried_at_once() -> None:
    """Else it would be a minute until the next retry, and by its median longer still until it is used."""
    device = Device(2, {1: 1.0, 2: 4.0})
    device.run(200)
    device.cost = {1: 1.0, 2: 1.2}
    while device.run(1) != [2]:
        pass
    assert device.run(10).count(2) >= 7


def test_one_slow_forward_does_not_change_the_batch_size() -> None:
    device = Device(8, USUAL)
    device.run(20)
    for _ in range(SAMPLES):
        device.run(1, slower=20.0)
        seen = device.run(2 * SAMPLES)
        assert seen.count(8) >= len(seen) - 2, "but for one of another size, to see whether that is better by now"


def test_batch_size_recovers_within_ten_seconds_of_foreign_load() -> None:
    device = Device(8, USUAL)
    device.run(10)
    device.cost = DISTURBED
    device.work(60)
    assert device.run(20).count(1) >= 15
    device.cost = USUAL
    device.work(10)
    seen = device.run(20)
    assert seen.count(8) >= 16, "but for retries"


@dataclass(frozen=True)
class Load:
    """Others that compute: for so long a forward takes `slower` times what it takes else, and more the larger it is,
    but no more than two seconds, unless that is what `slower` makes of it.
    """

    seconds: float
    slower: float
    grows: float

    def on(self, cost: dict[int, float]) -> Callable[[int], float]:
        return lambda size: min(self.slower * float(size) ** self.grows, max(self.slower, 2.0 / cost[size]))


def curves(longest: float) -> st.SearchStrategy[dict[int, float]]:
    """Seconds by batch size, 20 ms to `longest` of the slowest: up to the best size doubling makes a task cheaper, from
    there on dearer.
    """

    @st.composite
    def drawn(draw: st.DrawFn) -> dict[int, float]:
        best, each = draw(st.sampled_from(SIZES)), [1.0]
        for size in SIZES[1:]:
            each.append(each[-1] * draw(st.floats(0.5, 0.9) if size <= best else st.floats(1.0, 1.8)))
        took = {size: size * one for size, one in zip(SIZES, each, strict=True)}
        slowest = draw(st.floats(0.02, longest))
        return {size: seconds * slowest / max(took.values()) for size, seconds in took.items()}

    return drawn()


def loads(most: float) -> st.SearchStrategy[list[Load]]:
    """Up to three loads, each beginning as the one before ends: enough to be seen, since it makes half as much again of
    what a forward takes, and then some.
    """
    one = st.builds(Load, st.floats(0.5, 60.0), st.floats(1.6, most), st.sampled_from([0.0, 0.3, 1.0]))
    return st.lists(one, min_size=1, max_size=3)


BUSY = st.sampled_from([(8,), (8, 8, 8, 4, 4, 2, 1), (8, 1)])
"""How many tasks wait, in turn: always as many as can share a forward, or now these, now those."""


def disturbed(device: Device, loads: list[Load], busy: tuple[int, ...]) -> tuple[float, Callable[[], int]]:
    """Work without load, then under each of these. Returns when the last one has ended, and who waits from then on."""
    turns = cycle(busy)
    device.work(5, lambda: next(turns))
    for load in loads:
        device.load = load.on(device.cost)
        device.work(load.seconds, lambda: next(turns))
    device.load = lambda size: 1.0
    return device.now, lambda: next(turns)


def in_use(forwards: list[Forward]) -> int:
    """The size of most forwards, of those for which enough waited."""
    return mode(one.size for one in forwards if one.waiting == max(SIZES))


@settings(deadline=None)
@given(st.tuples(curves(2.0), st.just((8,))) | st.tuples(curves(0.8), BUSY), loads(3.0))
@example(({1: 0.92, 2: 0.92, 4: 0.92, 8: 1.5}, (8,)), [Load(1.0, 2.0, 0.0), Load(1.0, 2.0, 0.0)])
@example(({1: 0.75, 2: 0.75, 4: 0.75, 8: 0.75}, (8, 1)), [Load(1.0, 2.0, 0.0)])
@example(({1: 0.86, 2: 0.86, 4: 0.86, 8: 1.5}, (8,)), [Load(1.0, 2.0, 0.0), Load(1.0, 3.0, 0.0)])
def test_best_batch_size_is_in_use_ten_seconds_after_any_load(
    case: tuple[dict[int, float], tuple[int, ...]], loads: list[Load]
) -> None:
    """Where not always as many wait as can share a forward, forwards are shorter: else there are too few to tell."""
    cost, busy = case
    device = Device(8, cost)
    ended, waiting = disturbed(device, loads, busy)
    device.work(30, waiting)
    size = in_use([one for one in device.forwards if one.at >= ended + 10])
    least = min(cost[other] / other for other in SIZES)
    assert cost[size] / size <= 1.055 * least


@settings(deadline=None)
@given(curves(0.2), loads(6.0), BUSY, st.integers(0, 1 << 32))
def test_timing_noise_costs_little_ten_seconds_after_any_load(
    cost: dict[int, float], loads: list[Load], busy: tuple[int, ...], seed: int
) -> None:
    """Each forward is off by up to 30 %: now and then the wrong size looks better. Retries are counted, too."""
    device = Device(8, cost, 0.3, Random(seed))
    ended, waiting = disturbed(device, loads, busy)
    device.work(30, waiting)
    assert device.over(ended + 10, device.now) <= 1.25


@settings(deadline=None)
@given(curves(2.0), BUSY)
def test_retries_of_unused_batch_sizes_cost_little_without_load(cost: dict[int, float], busy: tuple[int, ...]) -> None:
    """As soon as five forwards of each are known. Two lie beside the best one, and others beside the best of those for
    which enough wait.
    """
    device, turns = Device(8, cost), cycle(busy)
    slowest = max(cost.values())
    device.work(100 * slowest, lambda: next(turns))
    known = device.now
    device.work(400 * slowest, lambda: next(turns))
    assert device.over(known, device.now) <= (1.06 if busy == (8,) else 1.085)


def test_batch_size_is_at_most_the_number_of_waiting_tasks() -> None:
    device = Device(8, USUAL)
    assert device.run(4, waiting=3) == [1, 2, 3, 3]
    assert device.run(2, waiting=1) == [1, 1]


def test_max_batch_size_need_not_be_a_power_of_two() -> None:
    assert Device(6, {1: 1.0, 2: 1.1, 4: 1.3, 6: 1.4}).run(4) == [1, 2, 4, 6]
    assert Device(1, {1: 1.0}).run(3) == [1, 1, 1]


def test_batch_size_that_does_not_fit_is_halved_permanently() -> None:
    device = Device(8, {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})
    device.run(4)
    device.sizes.too_large("key", 8)
    assert max(device.run(20)) == 4
    for _ in range(9):
        device.sizes.too_large("key", device.sizes.size("key", 64))
    assert device.sizes.size("key", 64) == 1


def test_batch_keys_are_independent_and_old_ones_are_evicted() -> None:
    sizes = BatchSizes(4)
    sizes.measured("a", 1, 1.0)
    assert (sizes.size("a", 9), sizes.size("b", 9)) == (2, 1)
    for number in range(MAX_KEYS):
        sizes.size(number, 9)
    assert sizes.size("a", 9) == 1


def test_nothing_is_measured_for_stages_whose_tasks_all_share_a_forward(tmp_path: Path) -> None:
    """A file would be written for nearly every number of texts, between two tokens."""
    loop, count = bench(tmp_path, batch=8)
    count.all_together, all_given = True, threading.Event()
    count.verify = lambda task: None if all_given.wait(20.0) else pytest.fail("waits for all tasks")  # type: ignore[method-assign]
    loop.loop._batches.sizes = sizes = BatchSizes(8, BatchSizesFile(tmp_path / "batch-sizes.json"))
    runs = [loop.run(tag=tag, steps=20 + 5 * tag) for tag in range(4)]
    all_given.set()
    assert all(loop.outcome(run) for run in runs)
    assert {len(batch) for batch in count.batches} == {1, 2, 3, 4}
    assert not (tmp_path / "batch-sizes.json").exists()
    assert not any(entry.samples for entry in sizes._keys.values())


def test_device_is_awaited_only_around_a_forward_unlike_the_last_one(tmp_path: Path) -> None:
    """So that the time of a batch is its own, and that of most steps is waited for by nobody."""
    loop, count = bench(tmp_path)
    made_before: list[int] = []
    loop.loop._batches._synchronize = lambda: made_before.append(len(count.batches))
    for size in ("a", "a", "b"):
        loop.outcome(loop.run(steps=3, size=size))
    assert made_before == [0, 1, 6, 7]


def test_measured_batch_sizes_are_used_from_the_first_request_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "batch-sizes.json"
    before = Device(8, USUAL, file=file)
    before.run(20)
    assert Device(8, USUAL, file=file).run(10).count(8) >= 9
    assert Device(8, USUAL, file=file, scope="another processor").run(4) == [1, 2, 4, 8]
    assert Device(4, USUAL, file=file).run(1) == [4], "of a smaller limit, the largest"


def test_stored_batch_sizes_are_corrected_if_they_are_of_another_load(tmp_path: Path) -> None:
    file = tmp_path / "batch-sizes.json"
    Device(8, USUAL, file=file).run(20)
    device = Device(8, DISTURBED, file=file)
    device.work(60)
    assert device.run(20).count(1) >= 15
    assert Device(8, DISTURBED, file=file).run(20).count(1) >= 15


def test_number_of_stored_batch_sizes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfuse.worker.batch_sizes.MAX_ENTRIES", 3)
    monkeypatch.setattr("unfuse.weights.fingerprints.MAX_ENTRIES", 3)
    stored = BatchSizesFile(tmp_path / "batch-sizes.json")
    for number in (1, 2, 3, 1, 4):
        stored.write(number, {1: 1.0})
    for known in (stored, BatchSizesFile(tmp_path / "batch-sizes.json")):
        assert [bool(known.read(number)) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_processes_keep_the_batch_sizes_of_each_other(tmp_path: Path) -> None:
    file = tmp_path / "batch-sizes.json"
    first, second = BatchSizesFile(file), BatchSizesFile(file)
    first.write(("a", 1), {1: 1.0, 2: 0.6})
    second.write(("b", 1), {1: 1.0, 2: 0.7})
    assert [BatchSizesFile(file).read((name, 1)) for name in "ab"] == [{1: 1.0, 2: 0.6}, {1: 1.0, 2: 0.7}]


@example(b'{"\'key\'": {"seconds": {"0": 1.0}}}')
@example(b'{"\'key\'": {"seconds": {"2": 0.0}}}')
@example(b'{"\'key\'": {"seconds": {"2": 1e999}}}')
@example(b'{"\'key\'": {"seconds": {"1": 0.1, "2": -1.0}}}')
@example(b"{\"'key'\": []}")
@given(st.binary())
def test_damaged_file_of_batch_sizes_only_costs_measurements(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder, "batch-sizes.json")
        file.write_bytes(content)
        assert Device(8, {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}, file=file).run(4) == [1, 2, 4, 8]
        assert Device(8, {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}, file=file).run(1) == [8], "and the file is mended"
