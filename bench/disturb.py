"""How soon all is as before: after others had computed for a while, and after processes were killed.

**Load**: sixteen clients ask all the time; for some seconds as many other processes compute as there are cores. How
many tasks shared a forward, and pictures a second: before, meanwhile, and in each WINDOW_S after that. **Kills**
(`kill -9`), with one worker of all stages: of its compute process, and of the worker, which is the last one: seconds
from the kill until a picture that is asked for in that moment is there, beside what one takes otherwise.
`python -m bench.disturb [--seconds S] [--kills N]`
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

from bench.peers.flux_folder import build
from bench.pictures import CORES, PROMPTS, ask_us
from bench.report import NO_CACHE, show, spread, table
from tools.server import Server, computes_of, serving, until

CLIENTS, BEFORE_S, AFTER_S, WINDOW_S = 16, 20.0, 30.0, 5.0
PAGE = 100


def over(server: Server, since: float) -> list[dict[str, Any]]:
    """The requests that were completed since then, the newest first."""
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = server.get(f"/v1/requests?limit={PAGE}{after}")["data"]
        found += [one for one in page if one["status"] == "completed" and one["completed_at"] > since]
        if len(page) < PAGE or page[-1]["created_at"] < since:
            return found
        after = f"&after={page[-1]['id']}"


def load(model: Path, folder: Path, seconds: float) -> dict[str, dict[str, object]]:
    with serving(folder, str(model), *NO_CACHE) as server:
        server.ready()
        seeds, ends = count(), threading.Event()

        def client() -> None:
            while not ends.is_set():
                ask_us(server.url, PROMPTS[0], next(seeds))

        clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for one in clients:
            one.start()
        time.sleep(2 * BEFORE_S)  # the first half is for comparing, and for trying sizes
        began = time.time()
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(CORES)]
        time.sleep(seconds)
        for other in others:
            other.kill()
            other.wait()
        ended = time.time()
        time.sleep(AFTER_S)
        ends.set()
        for one in clients:
            one.join()
        pictures = over(server, began - BEFORE_S)
    spans = {"before": (began - BEFORE_S, began), "meanwhile": (began, ended)}
    spans |= {
        f"{start:.0f} to {start + WINDOW_S:.0f} s after": (ended + start, ended + start + WINDOW_S)
        for start in (number * WINDOW_S for number in range(int(AFTER_S / WINDOW_S)))
    }
    return {name: figures(pictures, *span) for name, span in spans.items()}


def figures(pictures: list[dict[str, Any]], start: float, end: float) -> dict[str, object]:
    """Of what was completed in that time."""
    those = [one for one in pictures if start <= one["completed_at"] < end]
    shared = [stage["batch"] for one in those for stage in one["stages"] if stage["steps"] > 1]
    return {"tasks in a forward": round(mean(shared or [0.0]), 2), "pictures a second": len(those) / (end - start)}


def kills(model: Path, folder: Path, times: int) -> dict[str, dict[str, float]]:
    with serving(folder, str(model), *NO_CACHE, "--workers", "all=1", "--threads", "1") as server:
        server.ready()

        def picture() -> float:
            began = time.perf_counter()
            ask_us(server.url, PROMPTS[0], 1)
            return time.perf_counter() - began

        picture()
        found = {"nothing": [picture() for _ in range(times)]}
        for what in ("compute process", "last worker"):
            for _ in range(times):
                pid = until(lambda: [one["pid"] for one in server.get("/v1/workers")["data"]], "a worker")[0]
                os.kill(computes_of(pid)[0].pid if what == "compute process" else pid, signal.SIGKILL)
                found.setdefault(what, []).append(picture())
                picture()
    return {what: spread(each) for what, each in found.items()}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--kills", type=int, default=5)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("model", "load", "kills"):
            (root / name).mkdir()
        model = build(root / "model")
        loaded, killed = load(model, root / "load", given.seconds), kills(model, root / "kills", given.kills)
    show("disturb", load=loaded, kills=killed)
    table("others compute", loaded)
    table(
        "seconds until a picture",
        {what: {name: one[name] for name in ("min", "p50", "p99")} for what, one in killed.items()},
    )


if __name__ == "__main__":
    main()
