"""Two models that do not fit a device together: in turns on one server, beside a server for each.

The device is one core, which everything here shares. **in turns**: one worker with memory for one of the models
(`--device-memory`), which has one at a time. **half each**: a server for each model with half of that memory, where the
model does not fit: its worker has the encoders, or the transformer and the VAE, at a time. **apart**: a server each
with as much as its model takes, so with twice the device: it is in it all the time.
Clients of each model ask all the time for some seconds, the sides in turns, and as many of both models or far more of
one. Pictures a second, seconds until one is there, how many were lost, how often weights were swapped and the share of
the time that loading took. What else computes meanwhile favours the sides with two servers.
`python -m bench.turns [--rounds N] [--seconds S]`
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers.flux_folder import build
from bench.pictures import PROMPTS, post
from bench.report import NO_CACHE, quantile, show, table
from tools.server import Server, family_of, serving
from unfuse.planning.placement import PROCESS

CLIENTS = {"8 clients each": (8, 8), "8 and 1": (8, 1)}
NAMES = "one", "two"
TURNS, HALF, APART = SIDES = "in turns", "half each", "apart"
COMMON = (*NO_CACHE, "--arena", "128MiB")
ROOM = f"cpu={PROCESS + (128 << 20) + (300 << 20)}"
"""For a worker of one of the models, which have 205 MiB each."""

HALVES = "encoder,denoiser+decoder"
"""Roles of which a worker has one part at a time: 85 and 121 MiB, where half of the 300 are 150."""

WARM_S = 15.0
"""Seconds in which batches are compared, and what stages take is found out."""

SEEDS = count()


def sibling(model: Path, folder: Path) -> Path:
    """The same model with other weights in each component."""
    shutil.copytree(model, folder)
    for file in folder.glob("*/*.safetensors"):
        with file.open("r+b") as weights:
            weights.seek(-4, 2)
            weights.write(bytes(4))
    return folder


def swapped(servers: dict[str, Server]) -> tuple[int, float]:
    """How often, and seconds of loading."""
    pages = []
    for url in {server.url for server in servers.values()}:
        with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
            pages.append(answer.read().decode())
    found = [
        sum(map(float, re.findall(rf"^unfuse_{name}_total{{.*}} (.*)$", "\n".join(pages), re.MULTILINE)))
        for name in ("swaps", "loading_seconds")
    ]
    return int(found[0]), found[1]


def load(servers: dict[str, Server], clients: tuple[int, int], seconds: float) -> dict[str, list[float]]:
    """Seconds until each picture was there, by model, of those that were asked for in so many seconds; inf: lost."""
    took: dict[str, list[float]] = defaultdict(list)
    end = time.perf_counter() + seconds

    def ask(name: str) -> None:
        began = time.perf_counter()
        while True:
            body = {"model": name, "prompt": PROMPTS[0], "seed": next(SEEDS), "response_format": "b64_json"}
            try:
                post(f"{servers[name].url}/v1/images/generations", body, 600)
            except OSError as error:
                print(name, error, file=sys.stderr)
                took[name].append(float("inf"))
                return
            took[name].append((now := time.perf_counter()) - began)
            if (began := now) >= end:
                return

    asking = [
        threading.Thread(target=ask, args=(name,))
        for name, number in zip(NAMES, clients, strict=True)
        for _ in range(number)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    return took


def figures(runs: list[dict[str, Any]]) -> dict[str, object]:
    found: dict[str, object] = {"pictures/s": round(median(run["rate"] for run in runs), 2)}
    for name in NAMES:
        each = [seconds for run in runs for seconds in run["took"].get(name, ())]
        found[f"{name}: pictures"] = len(each)
        found[f"{name}: p50, p95, most s"] = ", ".join(f"{quantile(each, share):.2g}" for share in (0.5, 0.95, 1.0))
    found["lost"] = sum(each == float("inf") for run in runs for took in run["took"].values() for each in took)
    found["swaps"] = sum(run["swaps"] for run in runs)
    found["share of loading"] = round(sum(run["loading"] for run in runs) / sum(run["wall"] for run in runs), 3)
    return found


def measure(sides: dict[str, dict[str, Server]], rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for what, clients in CLIENTS.items():
        runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                before, began = swapped(sides[side]), time.perf_counter()
                took = load(sides[side], clients, seconds)
                wall, after = time.perf_counter() - began, swapped(sides[side])
                runs[side].append(
                    {
                        "took": took,
                        "wall": wall,
                        "rate": sum(map(len, took.values())) / wall,
                        "swaps": after[0] - before[0],
                        "loading": after[1] - before[1],
                    }
                )
        found[what] = {side: figures(made) for side, made in runs.items()}
        for other in (HALF, APART):
            ratios = [ours["rate"] / theirs["rate"] for ours, theirs in zip(runs[TURNS], runs[other], strict=True)]
            found[what][f"{TURNS} ÷ {other}"] = {"pictures/s": ", ".join(f"{one:.2f}" for one in ratios)}
    return found


def memory(servers: dict[str, Server]) -> int:
    """MiB that the processes of these servers hold, what several map by its share."""
    known = {process.pid for server in servers.values() for process in (server.process, *server.workers)}
    return sum(one.memory_full_info().pss for pid in known for one in family_of(pid)) >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the device: what computes at one time shares it
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(6)]
        one = build(folders[0] / NAMES[0])
        models = dict(zip(NAMES, (one, sibling(one, folders[0] / NAMES[1])), strict=True))
        named = [text for name in NAMES for text in ("--served-model-name", name)]
        both = stack.enter_context(
            serving(folders[1], *map(str, models.values()), *named, "--device-memory", ROOM, *COMMON)
        )
        alone = {
            name: stack.enter_context(
                serving(folder, str(model), "--served-model-name", name, "--workers", "all=1", *COMMON)
            )
            for folder, (name, model) in zip(folders[2:4], models.items(), strict=True)
        }
        halves = {
            name: stack.enter_context(
                serving(folder, str(model), "--served-model-name", name, "--workers", "none", *COMMON)
            )
            for folder, (name, model) in zip(folders[4:], models.items(), strict=True)
        }
        for server in halves.values():
            server.worker(HALVES, *COMMON[-2:])
        sides = {TURNS: dict.fromkeys(NAMES, both), HALF: halves, APART: alone}
        for servers in sides.values():
            for server in servers.values():
                server.ready()
            load(servers, (4, 4), WARM_S)
        found = measure(sides, options.rounds, options.seconds)
        weigh = {side: memory(servers) for side, servers in sides.items()}
    show("turns", rounds=options.rounds, seconds=options.seconds, found=found, memory_mib=weigh)
    for what, rows in found.items():
        table(what, rows)


if __name__ == "__main__":
    main()
