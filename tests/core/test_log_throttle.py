"""How often a cause is logged, on a clock of the test's."""

from __future__ import annotations

from unfuse.core.supervisor import LogThrottle


def test_a_cause_is_logged_once_a_second_with_how_often_it_came() -> None:
    now = 0.0
    throttle = LogThrottle(lambda: now)
    assert [throttle.count_if_due("flood") for _ in range(1000)] == [1] + [0] * 999
    assert throttle.count_if_due("another") == 1
    now = 1.0
    assert [throttle.count_if_due("flood") for _ in range(3)] == [1000, 0, 0]
    now = 5.0
    assert throttle.count_if_due("flood") == 3
