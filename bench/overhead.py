"""What a request takes outside of compute, and where: one client, one request at a time, no encoder cache.

In milliseconds, medians: `wall` is what the client sees. `compute` is the time in forwards, of all stages; `queue` from
a stage's task being pushed until a worker has it; `get` and `put` are inputs fetched and outputs stored, results
included; `http` is what the client sees beyond the time from acceptance to completion; `rest` is what is left: messages
within a worker and to the scheduler, and what the step loop does around forwards.
`python -m bench.overhead [--requests N]`
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.report import NO_CACHE, show, table
from tools.server import Server, serving

LAYOUTS = {"all stages in a worker": "all=1", "split": "split"}
STEPS = 20, 100

WARM = 40
"""Requests before any counts: in its first seconds a server still does other things beside them."""


def parts(server: Server, seed: int, steps: int) -> dict[str, float]:
    """Seconds of one request."""
    body = {"prompt": "a red circle on white", "seed": seed, "num_inference_steps": steps}
    began = time.perf_counter()
    server.post("/v1/images/generations", body)
    wall = time.perf_counter() - began
    (made,) = server.get("/v1/requests?limit=1")["data"]
    took = {name: sum(stage[f"{name}_s"] for stage in made["stages"]) for name in ("run", "queued", "get", "put")}
    within = made["completed_at"] - made["created_at"]
    return {
        "wall": wall,
        "compute": took["run"],
        "queue": took["queued"],
        "get": took["get"],
        "put": took["put"],
        "http": wall - within,
        "rest": within - sum(took.values()),
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--requests", type=int, default=25)
    given = options.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for name, layout in LAYOUTS.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(Path(folder), *NO_CACHE, "--workers", layout, "--threads", "1") as server,
        ):
            server.ready()
            for seed in range(WARM):
                parts(server, seed, STEPS[0])
            for steps in STEPS:
                found[f"{name}, {steps} steps"] = [parts(server, seed, steps) for seed in range(given.requests)]
    show("overhead", all=found)
    rows: dict[str, dict[str, object]] = {
        name: {part: round(1000 * median(one[part] for one in each), 1) for part in each[0]}
        | {"outside ÷ wall": round(median(1 - one["compute"] / one["wall"] for one in each), 3)}
        for name, each in found.items()
    }
    table("ms", rows)


if __name__ == "__main__":
    main()
