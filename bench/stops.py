"""How long a stop takes amid six requests, and how many steps it costs them, over SQLite and over Redis.

`unfuse serve` with its defaults serves the built-in model. Six requests are submitted; once the first has made some
steps, the server gets SIGTERM, and is started again when it has ended. Clients read the events of all requests until
then: the steps that a request has lost are those between the last one that its client was told of and the one at which
it went on. `python -m bench.stops [REPETITIONS]`
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.report import show, spread
from bench.servers import redis_server
from tools.followed import Followed
from tools.server import Server, all_gone, family_of, serving, until

REPETITIONS, REQUESTS, STEPS, BEGUN = 5, 6, 100, 10
BUDGET_S = 20.0
"""The default of --drain-timeout."""

ASKED = {"size": "256x256", "num_inference_steps": STEPS}


def stop(server: Server) -> float:
    """SIGTERM; returns the seconds until the server, and all that it started, has ended."""
    everyone, began = family_of(server.process.pid), time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait()
    until(lambda: all_gone(everyone), "the processes of the server to end")
    took = time.perf_counter() - began
    assert code == 0, server.log()
    return took


def denoising(shown: dict[str, Any]) -> dict[str, Any]:
    (found,) = (stage for stage in shown["stages"] if stage["name"] == "denoise.0")
    return dict(found)


def amid_requests(server: Server, seed: int) -> dict[str, Any]:
    """One stop amid requests, and one start."""
    requests = [server.submit("a red circle on white", seed=seed + number, **ASKED) for number in range(REQUESTS)]
    until(lambda: server.get(f"/v1/requests/{requests[0]}")["step"] >= BEGUN, "some steps", server.process)
    followed = Followed(server, requests)
    stop_s = stop(server)
    told = followed.steps()
    server.killed_and_started_again().ready()
    shown = {request: server.finished(request) for request in requests}
    assert {one["status"] for one in shown.values()} == {"completed"}
    resumed = {request: denoising(one)["resumed"] for request, one in shown.items()}
    return {
        "stop_s": round(stop_s, 2),
        "told": [told[request] for request in requests],
        "resumed": [resumed[request] for request in requests],
        "lost": [max(0, told[request] - resumed[request]) for request in requests],
    }


@contextmanager
def queues() -> Iterator[dict[str, list[str]]]:
    """What `serve` is told of its queue, by kind."""
    with redis_server() as redis:
        yield {"sqlite": [], "redis": ["--queue", redis.url]}


def measured(repetitions: int, flags: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *flags) as server:
        server.ready()
        rounds = [amid_requests(server, REQUESTS * number) for number in range(repetitions)]
    lost = [steps for one in rounds for steps in one["lost"]]
    return {
        "stop_s": spread([one["stop_s"] for one in rounds]),
        "steps_lost": {"requests": len(lost), "all": sum(lost), "most": max(lost)},
        "rounds": rounds,
    }


if __name__ == "__main__":
    repetitions = int(sys.argv[1]) if sys.argv[1:] else REPETITIONS
    with queues() as kinds:
        found = {kind: measured(repetitions, flags) for kind, flags in kinds.items()}
    show("stops", budget_s=BUDGET_S, steps=STEPS, **found)
