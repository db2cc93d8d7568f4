"""How long a comparison takes, and what it comes to."""

from __future__ import annotations

import pytest

from unfuse.service.comparison import ComparisonFigures, ComparisonProgress, comparison_summary, duration


class Told:
    """A clock that a test moves, and what was said."""

    def __init__(self, predicted_s: float | None = None) -> None:
        self.now, self.said = 100.0, list[str]()
        self.course = ComparisonProgress(
            {"diffusers": 10, "unfuse": 5}, predicted_s, self.said.append, lambda: self.now
        )

    def made(self, seconds: float) -> None:
        self.now += seconds
        self.course.count_finished()


def test_comparison_estimates_its_time_after_the_first_request() -> None:
    told = Told()
    assert told.said == [
        "10 requests with diffusers, then 5 requests with unfuse: an estimate follows after the first request"
    ]
    assert str(told.course) == "starting diffusers"
    told.now += 60.0  # until the pipeline is there
    told.course.start_side("diffusers")
    assert str(told.course) == "measuring diffusers: 0 of 10 requests"
    told.made(2.0)
    assert told.said[1:] == ["estimate: about 28 s, at 2 s a request"]
    assert str(told.course) == "measuring diffusers: 1 of 10 requests, about 28 s left"
    for _ in range(9):
        told.made(1.0)
    assert str(told.course) == "starting unfuse"
    told.now += 60.0
    told.course.start_side("unfuse")
    told.made(9.0)  # the first one also waits until workers have loaded
    assert str(told.course) == "measuring unfuse: 1 of 5 requests, about 4 s left"
    for _ in range(4):
        told.made(0.5)
    assert (str(told.course), len(told.said)) == ("done", 2)


def test_comparison_estimates_its_time_from_earlier_measurements() -> None:
    assert Told(8.0).said[0].endswith(": about 2 min, estimated from earlier measurements on this machine")


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (99.4, "99 s"), (100.0, "2 min"), (5900, "98 min"), (6100, "1 h 42 min")]
)
def test_duration_is_formatted_with_its_unit(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def figures(latency: float, rate: float, memory: int) -> ComparisonFigures:
    return ComparisonFigures(latency, {1: 1 / latency, 16: rate}, memory, memory, 0, [])


@pytest.mark.parametrize(
    ("latency", "rate", "faster", "alone", "at_once"),
    [
        (1.0, 4.0, "unfuse is faster here", "0.5 times the time", "2 times as many"),
        (2.0, 4.0, "unfuse is faster here", "as much time", "2 times as many"),
        (2.0, 2.0, "both are equally fast here", "as much time", "as many"),
        (4.0, 2.0, "diffusers alone is faster here", "2 times the time", "as many"),
        (
            4.0,
            4.0,
            "which is faster here depends on the number of concurrent requests",
            "2 times the time",
            "2 times as many",
        ),
        (
            1.0,
            1.0,
            "which is faster here depends on the number of concurrent requests",
            "0.5 times the time",
            "0.5 times as many",
        ),
    ],
)
def test_comparison_summary_covers_latency_and_throughput(
    latency: float, rate: float, faster: str, alone: str, at_once: str
) -> None:
    assert comparison_summary(figures(2.0, 2.0, 100), figures(latency, rate, 300), 2) == (
        f"{faster}: compared with diffusers, unfuse needs {alone} for one request, completes {at_once} a second with "
        "16 at once, and uses 3 times the memory: 2 workers instead of one process"
    )
