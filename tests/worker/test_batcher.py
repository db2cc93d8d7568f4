"""How large batches become: by what they cost per task, and by what fits."""

import pytest
import torch

from unfuse.worker.batcher import MAX_KEYS, RETRY, BatchSizes, out_of_memory


def measure(sizes: BatchSizes, cost: dict[int, float], times: int = 20) -> list[int]:
    """Run as many tasks at a time as allowed; each size costs so many seconds."""
    seen = []
    for _ in range(times):
        size = sizes.size("key")
        seen.append(size)
        sizes.measured("key", size, cost[size])
    return seen


def test_a_batch_doubles_while_each_task_gets_cheaper() -> None:
    assert measure(BatchSizes(8), {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0})[:5] == [1, 2, 4, 8, 8]


def test_a_batch_that_saves_nothing_is_given_up_for_the_smaller_one() -> None:
    assert measure(BatchSizes(8), {1: 1.0, 2: 1.2, 4: 2.4, 8: 4.8})[:6] == [1, 2, 4, 2, 2, 2]


def test_where_nothing_is_gained_tasks_go_one_by_one() -> None:
    assert measure(BatchSizes(8), {1: 1.0, 2: 2.0})[:5] == [1, 2, 1, 1, 1]


def test_what_did_not_pay_off_is_tried_again_some_time() -> None:
    seen = measure(BatchSizes(2), {1: 1.0, 2: 2.0}, 2 * RETRY + 5)
    assert seen.count(2) == 3


def test_the_setting_bounds_the_size_also_when_it_is_no_power_of_two() -> None:
    assert measure(BatchSizes(6), {1: 1.0, 2: 1.1, 4: 1.3, 6: 1.4})[:5] == [1, 2, 4, 6, 6]
    assert measure(BatchSizes(1), {1: 1.0}, 3) == [1, 1, 1]


def test_what_does_not_fit_is_halved_for_good() -> None:
    sizes = BatchSizes(8)
    measure(sizes, {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, 4)
    sizes.too_large("key", 8)
    assert measure(sizes, {1: 1.0, 2: 1.0, 4: 1.0}, 5) == [4] * 5
    for _ in range(9):
        sizes.too_large("key", sizes.size("key"))
    assert sizes.size("key") == 1


def test_keys_do_not_disturb_each_other_and_old_ones_are_dropped() -> None:
    sizes = BatchSizes(4)
    sizes.measured("a", 1, 1.0)
    assert (sizes.size("a"), sizes.size("b")) == (2, 1)
    for number in range(MAX_KEYS):
        sizes.size(number)
    assert sizes.size("a") == 1


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
