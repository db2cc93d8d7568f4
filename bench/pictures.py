"""Pictures a second, latency, CPU, memory and time to start: `unfuse serve` beside small servers of one whole pipeline.

All serve the same folder (`bench/peers/flux_folder.py`), one after the other, in rounds of another order each; each has
the machine for itself. Their pixels are compared first. A round is measured again if anything else was computing.
The small servers, as their docs recommend them: `bench/peers/with_fastapi.py`, `with_litserve.py`, `with_rayserve.py`.
`python -m bench.pictures [--rounds N] [--sides NAME,NAME] [--peers FOLDER]`
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil
from PIL import Image

from bench.load import closed_loop
from bench.peers.flux_folder import DEFAULTS, STEPS, build
from bench.report import quantile, show, table
from bench.tasks import PEERS, peer_python
from tools.addresses import free_port
from tools.server import environment, family_of, unfuse

WARM = 192
"""Requests before the first measurement."""

REQUESTS = {1: 10, 4: 24, 16: 48}
"""Requests of a measurement, by the clients that send them."""

CORES = len(os.sched_getaffinity(0))
FOREIGN = 0.1
"""Cores that others may have meanwhile."""

PROMPTS = ("a red circle", "a blue star on black", "a green ring on gray, seen from above", "an orange cross")
Make = Callable[..., bytes]


class Side(msgspec.Struct, frozen=True):
    """A server: its command for a folder and a port, and how a picture is asked for."""

    command: Callable[[Path, int], list[str]]
    ask: Callable[..., bytes]


def post(url: str, body: dict[str, Any], timeout: float) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return bytes(answer.read())


def ask_us(url: str, prompt: str, seed: int, steps: int = STEPS, timeout: float = 600) -> bytes:
    body = {"prompt": prompt, "seed": seed, "num_inference_steps": steps, "response_format": "b64_json"}
    return base64.b64decode(json.loads(post(f"{url}/v1/images/generations", body, timeout))["data"][0]["b64_json"])


def ask_them(url: str, prompt: str, seed: int, steps: int = STEPS, timeout: float = 600) -> bytes:
    call = DEFAULTS | {"num_inference_steps": steps}
    return post(f"{url}/picture", {"prompt": prompt, "seed": seed, "call": call}, timeout)


def ours(*arguments: str) -> Side:
    def command(folder: Path, port: int) -> list[str]:
        return unfuse("serve", str(folder), "--port", str(port), "--encoder-cache", "0", *arguments)

    return Side(command, ask_us)


def fastapi(processes: int, app: str = "bench.peers.with_fastapi:app") -> Side:
    def command(folder: Path, port: int) -> list[str]:
        return [
            sys.executable,
            "-m",
            "uvicorn",
            app,
            "--port",
            str(port),
            "--workers",
            str(processes),
            "--log-level",
            "error",
        ]

    return Side(command, ask_them)


def batching(peers: Path, name: str, batch: int) -> Side:
    """A server with libraries of its own that makes up to so many pictures together."""

    def command(folder: Path, port: int) -> list[str]:
        python = str(peer_python(peers, name, shares=True))
        return [python, "-m", f"bench.peers.with_{name}", str(port), str(CORES), str(batch)]

    return Side(command, ask_them)


def sides(peers: Path) -> dict[str, Side]:
    return {
        "fastapi": fastapi(CORES),
        "litserve": batching(peers, "litserve", 4),
        "ray serve": batching(peers, "rayserve", 4),
        "unfuse": ours(),
        "unfuse, batched": ours("--batching", "batched"),
        "unfuse, split": ours("--workers", "split"),
    }


@contextmanager
def running(side: Side, model: Path) -> Iterator[tuple[Make, psutil.Process, float]]:
    """A server; how it is asked, its process, and the seconds until its first picture."""
    with tempfile.TemporaryDirectory() as folder:
        port, variables = free_port(), environment(Path(folder))
        variables |= {"BENCH_MODEL": str(model), "BENCH_THREADS": "1", "OMP_NUM_THREADS": "1"}
        variables["PYTHONPATH"] = str(Path(__file__).parents[1])
        began = time.perf_counter()
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(
                side.command(model, port), env=variables, stdout=log, stderr=log, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                try:
                    side.ask(url, PROMPTS[0], 0)
                    break
                except OSError:
                    if process.poll() is not None or time.perf_counter() > began + 120:
                        print((Path(folder) / "log").read_text()[-4000:], file=sys.stderr)
                        raise
                    time.sleep(0.02)
            first = time.perf_counter() - began
            yield partial(side.ask, url), psutil.Process(process.pid), first
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def pixels(file: bytes) -> str:
    with Image.open(io.BytesIO(file)) as image:
        return hashlib.sha256(image.tobytes()).hexdigest()[:16]


def cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())


def busy() -> float:
    """Seconds that all cores have computed."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - getattr(times, "steal", 0.0))


def measure(make: Make, server: psutil.Process, clients: int, requests: int, seeds: Iterator[int]) -> dict[str, float]:
    """One measurement; again as long as others compute. `busiest` is the part of a core that one process had."""
    own = psutil.Process()
    while True:
        family = [*family_of(server.pid), own]
        before, all_before = cpu(family), busy()
        each_before = [cpu([process]) for process in family[:-1]]
        own_before = cpu([own])
        wall, each = closed_loop(lambda _: make(PROMPTS[(n := next(seeds)) % 4], n), clients, requests)
        took, whole = cpu(family) - before, busy() - all_before
        if whole - took < FOREIGN * wall + 0.1:
            break
        print(f"measured again: other processes used {(whole - took) / wall:.2f} cores", file=sys.stderr)
    server_s = took - (cpu([own]) - own_before)
    return {
        "rate": len(each) / wall,
        "p95": quantile(each, 0.95),
        "cpu": server_s / len(each),
        "client_cpu": (cpu([own]) - own_before) / len(each),
        "busiest": max(cpu([one]) - since for one, since in zip(family[:-1], each_before, strict=True)) / wall,
    }


def warm(make: Make, requests: int = WARM) -> None:
    """Until it runs as it will: batches are compared, sizes tried."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: make(PROMPTS[n % 4], 10_000 + n), range(requests)))


def pss(server: psutil.Process) -> int:
    """MiB of a server's processes; what they share counts once."""
    return sum(int(process.memory_full_info().pss) for process in family_of(server.pid)) >> 20


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--sides", default="")
    options.add_argument("--peers", default=str(PEERS))
    given = options.parse_args()
    everyone = sides(Path(given.peers).expanduser().absolute())
    chosen = given.sides.split(";") if given.sides else [*everyone]
    found: defaultdict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    about: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    seeds = count(1)
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder))
        made: dict[str, list[str]] = {}
        for number in range(given.rounds):
            for name in chosen[number % len(chosen) :] + chosen[: number % len(chosen)]:
                with running(everyone[name], model) as (make, server, first):
                    made[name] = [pixels(make(prompt, 7)) for prompt in PROMPTS]
                    warm(make)
                    for clients, requests in REQUESTS.items():
                        found[name, clients].append(measure(make, server, clients, requests, seeds))
                    about[name].append({"first": first, "pss": pss(server)})
                print(
                    name, {c: round(found[name, c][-1]["rate"], 2) for c in REQUESTS}, about[name][-1], file=sys.stderr
                )
    rows: dict[str, dict[str, object]] = {}
    best = (
        {
            clients: max(median(one["rate"] for one in found[name, clients]) for name in chosen if "unfuse" not in name)
            for clients in REQUESTS
        }
        if any("unfuse" not in name for name in chosen)
        else dict.fromkeys(REQUESTS, 1.0)
    )
    for name in chosen:
        rows[name] = {
            f"{clients}: rate ÷ best": round(median(one["rate"] for one in found[name, clients]) / best[clients], 3)
            for clients in REQUESTS
        }
        rows[name] |= {
            "p95 at 16, s": round(median(one["p95"] for one in found[name, 16]), 2),
            "CPU-s a picture at 16": round(median(one["cpu"] for one in found[name, 16]), 3),
            "first picture, s": round(median(one["first"] for one in about[name]), 1),
            "PSS, MiB": round(median(one["pss"] for one in about[name])),
            "same pixels": made[name] == made[chosen[0]],
        }
    show("pictures", best=best, all={f"{name}, {clients}": figures for (name, clients), figures in found.items()})
    table("pictures", rows)


if __name__ == "__main__":
    main()
