"""How large batches become: by what they cost per task, and by what fits."""

import pytest
import torch

from unfuse.testing import ManualClock
from unfuse.worker.batcher import MAX_KEYS, RETRY_FORWARDS, SAMPLES, BatchSizes, out_of_memory


class Device:
    """A device on which a batch of each size takes so many seconds, on its own clock."""

    def __init__(self, most: int, cost: dict[int, float]) -> None:
        self.clock, self.cost = ManualClock(), cost
        self.sizes = BatchSizes(most, self.clock.now)

    def run(self, times: int = 20, waiting: int = 64, slower: float = 1.0) -> list[int]:
        """The sizes of the next batches, where so many tasks wait; everything takes so many times as long."""
        seen = []
        for _ in range(times):
            seen.append(size := self.sizes.size("key", waiting))
            self.clock.advance(slower * self.cost[size])
            self.sizes.measured("key", size, slower * self.cost[size])
        return seen


USUAL = {1: 0.058, 2: 0.075, 3: 0.1, 4: 0.127, 8: 0.2}
"""Each size is worth it."""
DISTURBED = {1: 0.2, 2: 0.5, 3: 0.8, 4: 1.2, 8: 3.0}
"""So they are while others use the device: none is."""


def test_a_batch_doubles_while_each_task_gets_cheaper() -> None:
    assert Device(8, {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}).run(5) == [1, 2, 4, 8, 8]


def test_a_batch_that_saves_nothing_is_given_up_for_the_smaller_one() -> None:
    assert Device(8, {1: 1.0, 2: 1.2, 4: 2.4, 8: 4.8}).run(6) == [1, 2, 4, 2, 2, 2]


def test_where_nothing_is_gained_tasks_go_one_by_one() -> None:
    assert Device(8, {1: 1.0, 2: 2.0}).run(5) == [1, 2, 1, 1, 1]


def test_what_is_not_used_is_tried_again_some_time() -> None:
    assert 3 <= Device(2, {1: 1.0, 2: 2.0}).run(5 * RETRY_FORWARDS).count(2) <= 5
    assert 3 <= Device(2, {1: 1.0, 2: 1.1}).run(5 * RETRY_FORWARDS).count(1) <= 7


def test_one_disturbed_forward_changes_nothing() -> None:
    device = Device(8, USUAL)
    device.run(20)
    for _ in range(SAMPLES):
        device.run(1, slower=20.0)
        seen = device.run(2 * SAMPLES)
        assert seen.count(8) >= len(seen) - 1, "but for one of another size, to see whether that is better by now"


def test_after_a_minute_of_foreign_load_the_size_is_back_within_ten_seconds() -> None:
    device = Device(8, USUAL)
    device.run(10)
    device.cost = DISTURBED
    until = device.clock.now() + 60
    while device.clock.now() < until:
        found = device.run(1)
    assert found == [1]
    device.cost = USUAL
    until = device.clock.now() + 10
    while device.clock.now() < until:
        device.run(1)
    seen = device.run(20)
    assert seen.count(8) >= 18


def test_no_more_are_taken_than_wait_and_none_is_left_behind() -> None:
    device = Device(8, USUAL)
    assert device.run(4, waiting=3) == [1, 2, 3, 3]
    assert device.run(2, waiting=1) == [1, 1]


def test_the_setting_bounds_the_size_also_when_it_is_no_power_of_two() -> None:
    assert Device(6, {1: 1.0, 2: 1.1, 4: 1.3, 6: 1.4}).run(5) == [1, 2, 4, 6, 6]
    assert Device(1, {1: 1.0}).run(3) == [1, 1, 1]


def test_what_does_not_fit_is_halved_for_good() -> None:
    device = Device(8, {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})
    device.run(4)
    device.sizes.too_large("key", 8)
    assert device.run(5) == [4] * 5
    for _ in range(9):
        device.sizes.too_large("key", device.sizes.size("key", 64))
    assert device.sizes.size("key", 64) == 1


def test_keys_do_not_disturb_each_other_and_old_ones_are_dropped() -> None:
    sizes = BatchSizes(4)
    sizes.measured("a", 1, 1.0)
    assert (sizes.size("a", 9), sizes.size("b", 9)) == (2, 1)
    for number in range(MAX_KEYS):
        sizes.size(number, 9)
    assert sizes.size("a", 9) == 1


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("size mismatch"), False),
    ],
)
def test_running_out_of_memory_is_known_from_other_errors(error: Exception, is_it: bool) -> None:
    assert out_of_memory(error) is is_it
