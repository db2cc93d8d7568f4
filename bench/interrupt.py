"""How soon a request stops, and how soon an urgent one starts: in milliseconds, and in denoising steps.

Cancel: from the call to the last moment that the denoiser computes, and to when no lease and no tensor of the request
is left; the steps it still made are the processor time the denoiser took after the call. Preemption: an urgent request
of one step, alone and while another is denoised, from the call that submits it to its first step; its cost is the
difference of the two. `python -m bench.interrupt [REPETITIONS]`
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.load import computes
from bench.report import NO_CACHE, show, spread
from tools.server import Server, serving

REPETITIONS = 15
STEPS = 50
BEFORE = 10
"""Steps that a request has made when it is interrupted."""

SLOW = {"size": "256x256", "num_inference_steps": STEPS}
URGENT = {"size": "256x256", "num_inference_steps": 1, "priority": 10}
SILENCE_S = 0.25
"""A compute process that has taken no processor time for this long is idle."""

LOOK_S = 0.001


def steps(events: Iterator[dict[str, Any]]) -> Iterator[int]:
    """Denoising steps, as they are heard of."""
    return (one["step"] for one in events if one["type"] == "progress" and one["stage"].startswith("denoise"))


def computed(process: psutil.Process) -> float:
    """Seconds of processor time of the thread that runs the step loop."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/schedstat").read_text().split()[0]) / 1e9


def under_way(server: Server) -> tuple[str, Iterator[dict[str, Any]]]:
    """A request in the midst of its denoising."""
    request = server.submit("a red circle on white", seed=1, **SLOW)
    events = server.events(request)
    next(step for step in steps(events) if step >= BEFORE)
    return request, events


def idle(server: Server) -> bool:
    workers = server.get("/v1/workers")["data"]
    return not any(worker["leased"] or worker["used"] for worker in workers)


def cancel(server: Server, denoiser: psutil.Process, step: float) -> dict[str, float]:
    """One request that is cancelled."""
    request, _ = under_way(server)
    before, began = computed(denoiser), time.perf_counter()
    server.post(f"/v1/requests/{request}/cancel", {})
    answered = time.perf_counter() - began
    last, stopped = before, 0.0
    while time.perf_counter() - began - stopped < SILENCE_S:
        if (now := computed(denoiser)) != last:
            last, stopped = now, time.perf_counter() - began
        time.sleep(LOOK_S)
    return {"answered_ms": answered * 1e3, "stopped_ms": stopped * 1e3, "further_steps": (last - before) / step}


def cancel_freed(server: Server) -> float:
    """Milliseconds until no lease and no tensor of a cancelled one is left, as a client sees it.

    Workers say what their memory holds with their heartbeats, 20 ms apart.
    """
    request, _ = under_way(server)
    began = time.perf_counter()
    server.post(f"/v1/requests/{request}/cancel", {})
    while not idle(server):
        time.sleep(LOOK_S)
    return (time.perf_counter() - began) * 1e3


def first_step(server: Server) -> float:
    """Milliseconds from submitting an urgent request to the event of its first step."""
    began = time.perf_counter()
    events = server.events(server.submit("a green cross on white", seed=2, **URGENT))
    next(steps(events))
    found = (time.perf_counter() - began) * 1e3
    for _ in events:
        pass
    return found


def preempt(server: Server) -> tuple[float, str]:
    """The same while another request is denoised; and what that one ends with."""
    request, events = under_way(server)
    found = first_step(server)
    for _ in events:
        pass
    return found, digest(server, request)


def digest(server: Server, request: str) -> str:
    return hashlib.sha256(server.result(request)).hexdigest()


def step_seconds(server: Server, denoiser: psutil.Process) -> tuple[float, str]:
    """Processor seconds of a step of a request that nobody disturbs, and what the request ends with."""
    taken = []
    for _ in range(3):
        before = computed(denoiser)
        request = server.submit("a red circle on white", seed=1, **SLOW)
        server.finished(request)
        taken.append((computed(denoiser) - before) / STEPS)
    return median(taken), digest(server, request)


def main() -> None:
    repetitions = int(sys.argv[1]) if sys.argv[1:] else REPETITIONS
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), "--workers", "split", "--threads", "1", "--arena", "64MiB", *NO_CACHE) as server,
    ):
        (denoiser,) = computes(server.ready(), "denoiser")
        step, undisturbed = step_seconds(server, denoiser)
        cancelled = [cancel(server, denoiser, step) for _ in range(repetitions)]
        freed = [cancel_freed(server) for _ in range(repetitions)]
        alone, beside, same = [], [], 0
        for _ in range(repetitions):
            alone.append(first_step(server))
            seconds, made = preempt(server)
            beside.append(seconds)
            same += made == undisturbed
    waits = [(b - a) / (step * 1e3) for a, b in zip(alone, beside, strict=True)]
    show(
        "interrupt",
        step_ms=round(step * 1e3, 2),
        cancel={name: spread([one[name] for one in cancelled]) for name in cancelled[0]} | {"freed_ms": spread(freed)},
        preempt={
            "first_step_alone_ms": spread(alone),
            "first_step_beside_another_ms": spread(beside),
            "difference_in_steps": spread(waits),
            "preempted_with_the_same_bytes": f"{same} of {repetitions}",
        },
    )


if __name__ == "__main__":
    main()
