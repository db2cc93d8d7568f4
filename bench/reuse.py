"""What is saved where work need not be done: equal encodes at one time, equal requests, pictures whose client has left.

A served built-in model; what is compared takes turns in one run. `python -m bench.reuse [ROUNDS]`
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import ratio, show, spread, table
from tools.server import Server, serving

BURST, STEPS = 4, 20
LAYOUT = ("--workers", "encoder=1,denoiser+decoder=1")


def burst(server: Server, prompt: str, cache: bool) -> tuple[float, float]:
    """Pictures of one prompt, all asked for at once: seconds of encoding, and until all are there."""
    start = time.monotonic()
    ids = [server.submit(prompt, seed=seed, num_inference_steps=2, cache=cache) for seed in range(BURST)]
    ended = [server.finished(id) for id in ids]
    took = time.monotonic() - start
    stages = [stage for one in ended for stage in one["stages"] if stage["name"] == "text_encode"]
    assert {one["status"] for one in ended} == {"completed"}
    return sum(stage["run_s"] for stage in stages), took


def bursts(folder: Path, rounds: int) -> dict[str, Any]:
    """Bursts that share their encode, by bursts that do not."""
    arms: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with serving(folder, *LAYOUT) as server:
        server.ready()
        for number in range(rounds + 2):
            for cache in (True, False) if number % 2 else (False, True):
                arms[cache].append(burst(server, f"a red circle on white {number}", cache))
    (shared, each), names = (arms[cache][2:] for cache in (True, False)), ("encoding_s", "burst_s")
    return {
        name: ratio([one[at] for one in shared], [one[at] for one in each])
        | {"shared": spread([one[at] for one in shared]), "each": spread([one[at] for one in each])}
        for at, name in enumerate(names)
    }


def equal(server: Server, seed: int) -> float:
    """Seconds until a picture is there."""
    start = time.monotonic()
    server.post("/v1/images/generations", {"prompt": "a red circle", "seed": seed, "num_inference_steps": STEPS})
    return time.monotonic() - start


def equals(folder: Path, rounds: int) -> dict[str, Any]:
    """Pictures that were asked for before, by pictures of new seeds."""
    with serving(folder, *LAYOUT, "--reuse-results") as server:
        server.ready()
        equal(server, 0)
        pairs = [(equal(server, 0), equal(server, number)) for number in range(1, rounds + 2)][1:]
    again, new = ([pair[at] for pair in pairs] for at in (0, 1))
    return ratio(again, new) | {"again_s": spread(again), "new_s": spread(new)}


def leave(server: Server, leaves: bool) -> float:
    """Seconds from the first step of a picture until its request is over, whose client leaves then or waits."""
    body = json.dumps({"prompt": "a blue star on black", "num_inference_steps": 100})
    head = "POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        before = {one["id"] for one in server.get("/v1/requests")["data"]}
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        while not (new := {one["id"] for one in server.get("/v1/requests")["data"]} - before):
            pass
        (request,) = new
        next(event for event in server.events(request) if event["type"] == "progress")
        start = time.monotonic()
        if leaves:
            client.close()
        server.finished(request)
        return time.monotonic() - start


def leaving(folder: Path, rounds: int) -> dict[str, Any]:
    with serving(folder, *LAYOUT, "--on-disconnect", "cancel") as server:
        server.ready()
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds + 1):
            for leaves in (True, False) if number % 2 else (False, True):
                times[leaves].append(leave(server, leaves))
    left, stayed = times[True][1:], times[False][1:]
    return ratio(left, stayed) | {"left_s": spread(left), "stayed_s": spread(stayed)}


def main(rounds: int) -> None:
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, measure in (("bursts", bursts), ("equals", equals), ("leaving", leaving)):
            Path(folder, name).mkdir()
            found[name] = measure(Path(folder, name), rounds)
    show("reuse", rounds=rounds, burst=BURST, **found)
    rows = {**found.pop("bursts"), **found}
    table("ratio", {name: {"median": one["p50"], "p25": one["p25"], "p75": one["p75"]} for name, one in rows.items()})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
