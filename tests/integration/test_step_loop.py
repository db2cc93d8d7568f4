"""Cancelling and stepping aside, as a client sees it: real processes, steps slow enough to come in between."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from tools.server import Server, until

SLOW = {"size": "256x256", "num_inference_steps": 50, "guidance_scale": 4.0}
"""About a tenth of a second a step: more than the 50 ms between two progress messages."""


def steps(events: Iterator[dict[str, Any]]) -> Iterator[int]:
    for event in events:
        if event["type"] == "progress" and event["stage"].startswith("denoise"):
            yield event["step"]


def used(server: Server) -> int:
    return sum(worker["used"] for worker in server.get("/v1/workers")["data"])


def test_cancelled_request_stops_early_and_frees_memory(server: Server) -> None:
    request = server.submit("a red circle on white", **SLOW, n=2)
    events = server.events(request)
    assert any(step >= 3 for step in steps(events))

    # how many steps go by between reading this event and the call being heard is the machine's business;
    # that no more than one runs after it was heard is counted in tests/worker/test_step_loop.py
    cancelled = server.post(f"/v1/requests/{request}/cancel", {})

    assert cancelled["status"] == "cancelled"
    assert max(steps(events), default=3) < SLOW["num_inference_steps"]
    until(lambda: all(worker["leased"] == 0 for worker in server.get("/v1/workers")["data"]), "the leases to end")
    until(lambda: used(server) == 0, "the memory to be free")


def test_urgent_request_preempts_and_preempted_result_is_identical(server: Server) -> None:
    alone = server.finished(server.submit("a blue star on black", **SLOW, seed=7))
    patient = [server.submit("a blue star on black", **SLOW, seed=7), server.submit("a blue ring on gray", **SLOW)]
    assert any(step >= 3 for step in steps(server.events(patient[0])))

    urgent = server.submit("a green cross on white", size="128x128", num_inference_steps=20, priority=10)

    ended = server.finished(urgent)
    assert server.get(f"/v1/requests/{patient[0]}")["status"] == "in_progress"
    after = server.finished(patient[0])
    assert (ended["status"], after["status"], after["attempts"]) == ("completed", "completed", 1)
    assert _bytes(server, after) == _bytes(server, alone)

    # it begins while the other has most of its steps to go (the loop's own tests count them: one)
    began, first = _times(server, urgent)
    between = [at for at, _ in _progress(server, patient[0]) if began < at < first]
    assert len(between) <= 5
    assert server.finished(patient[1])["status"] == "completed"


@pytest.mark.parametrize("steps_asked", [50])
def test_event_stream_lists_every_step_across_reconnect(server: Server, steps_asked: int) -> None:
    request = server.submit("a red circle on white", num_inference_steps=steps_asked)
    seen: list[int] = []
    last = 0
    for event in server.events(request):
        last = event["seq"]
        if event["type"] == "progress" and event["stage"].startswith("denoise"):
            seen.append(event["step"])
        if len(seen) >= 5:
            break
    for event in server.events(request, after=last):
        if event["type"] == "progress" and event["stage"].startswith("denoise"):
            seen.append(event["step"])
    assert seen == list(range(1, steps_asked + 1))


def _bytes(server: Server, request: dict[str, Any]) -> str:
    return hashlib.sha256(server.result(request["id"])).hexdigest()


def _progress(server: Server, request: str) -> list[tuple[float, dict[str, Any]]]:
    return [
        (event["at"], event)
        for event in server.events(request)
        if event["type"] == "progress" and event["stage"].startswith("denoise")
    ]


def _times(server: Server, request: str) -> tuple[float, float]:
    """When the denoiser took a request, and when it reported its first steps."""
    (began,) = [
        event["at"]
        for event in server.events(request)
        if event["type"] == "stage_started" and event["stage"].startswith("denoise")
    ]
    return began, _progress(server, request)[0][0]
