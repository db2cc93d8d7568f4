"""Under load: requests a second and latency at several concurrencies, against undivided pipelines on the same cores.

All servers and the undivided pipelines are started once and measured in turns, with clients that each wait for their
picture before they ask for the next. Also: how busy denoisers are, how long until the first progress is heard, and what
each process weighs afterwards. `python -m bench.load [ROUNDS]`
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil

from bench.report import NO_CACHE, quantile, ratio, show, spread
from bench.split import Undivided, case, ours
from bench.start import memory
from tools.server import Server, computes_of, family_of, serving

STEPS = 20
REQUESTS = {1: 4, 4: 8, 16: 24, 64: 64}
"""Requests of a measurement, by the clients that send them."""

ROUNDS = 2
PROBES = 5
TWO = "encoder=1,denoiser=2,decoder=1"
SERVERS = {
    "exact": (),
    "batched": ("--batching", "batched"),
    "exact, 2 denoisers": ("--workers", TWO),
    "batched, 2 denoisers": ("--batching", "batched", "--workers", TWO),
}
UNDIVIDED = {"undivided, 1 process of 2 threads": (1, 2), "undivided, 2 processes of 1 thread": (2, 1)}


def closed_loop(work: Callable[[int], object], clients: int, requests: int) -> tuple[float, list[float]]:
    """Seconds in all, and of each request."""

    def timed(seed: int) -> float:
        began = time.perf_counter()
        work(seed)
        return time.perf_counter() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        each = list(pool.map(timed, range(requests)))
    return time.perf_counter() - began, each


def computes(server: Server, role: str) -> list[psutil.Process]:
    """The processes that compute for that role."""
    pids = [worker["pid"] for worker in server.get("/v1/workers")["data"] if worker["role"] == role]
    return computes_of(*pids)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def busy(server: Server, clients: int, requests: int) -> dict[str, Any]:
    """One measurement of a server: with the part of the time that a denoiser computes, and the tasks it has under way.

    Tasks under way: seconds that requests spent in the forwards of the denoise stage, by the seconds of its workers.
    """
    denoisers = computes(server, "denoiser")
    before = cpu_seconds(denoisers)
    wall, each = closed_loop(lambda seed: ours(server, seed, STEPS), clients, requests)
    used = cpu_seconds(denoisers) - before
    newest = server.get(f"/v1/requests?limit={requests}")["data"]
    ran = sum(stage["run_s"] for one in newest for stage in one["stages"] if stage["name"].startswith("denoise"))
    return {"wall": wall, "each": each, "busy": used / wall / len(denoisers), "under_way": ran / wall / len(denoisers)}


def throughput(servers: dict[str, Server], undivided: dict[str, Undivided], rounds: int) -> dict[str, Any]:
    """By clients and side; the ratio is of each round, against the better of the undivided ones in it."""
    table: dict[str, Any] = {}
    for clients, requests in REQUESTS.items():
        runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for _ in range(rounds):
            for name, pipelines in undivided.items():
                if clients > 1 and len(pipelines.processes) == 1:
                    continue  # for several requests two processes are nearly twice as fast: see bench/split.py
                wall, each = closed_loop(lambda seed, to=pipelines: to.next(case(seed, STEPS)), clients, requests)
                runs[name].append({"wall": wall, "each": each})
            for name, server in servers.items():
                runs[name].append(busy(server, clients, requests))
        tried = [[run["wall"] for run in runs[name]] for name in undivided if name in runs]
        best = [min(walls) for walls in zip(*tried, strict=True)]
        table[str(clients)] = {name: row(found, requests, best) for name, found in runs.items()}
    return table


def row(runs: list[dict[str, Any]], requests: int, best: list[float]) -> dict[str, Any]:
    walls = [run["wall"] for run in runs]
    each = [seconds for run in runs for seconds in run["each"]]
    more = {name: round(mean(run[name] for run in runs), 2) for name in ("busy", "under_way") if name in runs[0]}
    return {
        "requests_per_s": round(requests / median(walls), 2),
        "over_best_undivided": ratio(best, walls)["p50"],
        "latency_p50_s": round(median(each), 3),
        "latency_p95_s": round(quantile(each, 0.95), 3),
        **more,
    }


def first_progress(server: Server, seed: int) -> tuple[float, float]:
    """Seconds from the call that submits to the first event of progress, and to that of the first denoising step."""
    began = time.perf_counter()
    request = server.submit("a blue star on black", seed=seed, num_inference_steps=STEPS)
    heard: dict[str, float] = {}
    for event in server.events(request):
        if event["type"] == "progress":
            heard.setdefault(event["stage"].partition(".")[0], time.perf_counter() - began)
    return min(heard.values()), heard["denoise"]


class Clients:
    """Clients that keep a server under load from start to close."""

    def __init__(self, server: Server, number: int) -> None:
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(number)
        seeds = count()
        for _ in range(number):
            self._pool.submit(self._ask, server, seeds)

    def _ask(self, server: Server, seeds: Iterator[int]) -> None:
        while not self._over.is_set():
            ours(server, next(seeds), STEPS)

    def close(self) -> None:
        self._over.set()
        self._pool.shutdown()


def progress(servers: dict[str, Server]) -> dict[str, Any]:
    """Seconds to the first progress, of any stage and of denoising: with nothing else to do, and behind 16 clients."""
    found = {}
    for name, server in servers.items():
        quiet = [first_progress(server, seed) for seed in range(PROBES)]
        clients = Clients(server, 16)
        time.sleep(2)
        loaded = [first_progress(server, seed) for seed in range(PROBES)]
        clients.close()
        found[name] = {
            where: {"any_s": spread([first for first, _ in heard]), "denoising_s": spread([step for _, step in heard])}
            for where, heard in (("quiet", quiet), ("behind_16_clients", loaded))
        }
    return found


def weights(servers: dict[str, Server], fused: Undivided) -> dict[str, Any]:
    """What each process has for itself, after the load."""
    named = {name: [memory(process) for process in family_of(server.process.pid)] for name, server in servers.items()}
    return named | {"undivided": memory(psutil.Process(fused.processes[0].pid)) | {"process": "undivided pipeline"}}


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    undivided = {name: Undivided(*how) for name, how in UNDIVIDED.items()}
    with ExitStack() as stack:
        servers = {}
        for name, options in SERVERS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            common = ("--threads", "1", "--arena", "64MiB")
            servers[name] = stack.enter_context(serving(folder, "--workers", "split", *options, *common, *NO_CACHE))
        for server in servers.values():
            server.ready()
            closed_loop(lambda seed, to=server: ours(to, seed, STEPS), 8, 8)
        for pipelines in undivided.values():
            closed_loop(lambda seed, to=pipelines: to.next(case(seed, STEPS)), 2, 2)
        show(
            "load",
            threads_per_process=1,
            steps=STEPS,
            rounds=rounds,
            throughput=throughput(servers, undivided, rounds),
            first_progress=progress({name: servers[name] for name in ("exact", "batched")}),
            memory=weights(servers, undivided["undivided, 2 processes of 1 thread"]),
        )
    for pipelines in undivided.values():
        pipelines.close()


if __name__ == "__main__":
    main()
