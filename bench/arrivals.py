"""One trace of mixed requests, replayed against batching by step, by request, and none: latency and throughput.

Arrivals are Poisson, from a seed: two sizes, four numbers of steps, some without guidance. Each side denoises in two
processes of one thread: a server that steps requests together, one that runs them one by one, and undivided pipelines
behind a dispatcher that gives whichever is free the oldest request and up to seven more that wait and are like it in
size, steps and guidance. The trace is stretched until it brings a given part of what one by one can do.
`python -m bench.arrivals [ROUNDS]`
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.report import NO_CACHE, quantile, show
from bench.split import SHAPES, Case, Undivided, case
from tools.server import Server, serving

SEED = 7
REQUESTS = 64
STEPS = (10, 20, 30, 50)
SIZES = (128, 128, 256)
GUIDANCE = (4.0, 4.0, 1.0)
LOADS = (0.8, 1.6, 3.2)
"""Parts of what two processes can do one by one: a busy server, and two with more to do than it could."""

MOST = 8
ROUNDS = 2
PROCESSES = 2
CALIBRATION = 12


@dataclass(frozen=True)
class Arrival:
    """A request, and when it comes, in units of the mean time between two."""

    at: float
    seed: int
    steps: int
    size: int
    guidance: float

    @property
    def kind(self) -> tuple[int, int, float]:
        """What requests must have in common for one call of a pipeline."""
        return self.steps, self.size, self.guidance

    @property
    def case(self) -> Case:
        return case(self.seed, self.steps) | {
            "height": self.size,
            "width": self.size,
            "guidance_scale": self.guidance,
        }

    @property
    def call(self) -> dict[str, object]:
        size = f"{self.size}x{self.size}"
        given = {"seed": self.seed, "num_inference_steps": self.steps, "guidance_scale": self.guidance, "size": size}
        return {"prompt": "a red circle on white", **given}


def trace(requests: int = REQUESTS) -> list[Arrival]:
    """The trace."""
    drawn, now, found = random.Random(SEED), 0.0, []
    for seed in range(requests):
        now += drawn.expovariate(1.0)
        found.append(Arrival(now, seed, drawn.choice(STEPS), drawn.choice(SIZES), drawn.choice(GUIDANCE)))
    return found


class Dispatcher:
    """Waiting requests, and undivided pipelines that take up to `most` of one kind when they are free."""

    def __init__(self, pipelines: Undivided, most: int) -> None:
        self._pipelines, self._most = pipelines, most
        self._waiting: list[tuple[Arrival, threading.Event]] = []
        self._changed = threading.Condition()
        self._closed = False
        self.batches: Counter[int] = Counter()
        self._threads = [
            threading.Thread(target=self._serve, args=(index,)) for index in range(len(pipelines.processes))
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, arrival: Arrival) -> None:
        """Wait until it is made."""
        made = threading.Event()
        with self._changed:
            self._waiting.append((arrival, made))
            self._changed.notify()
        made.wait()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self, index: int) -> None:
        while batch := self._next():
            self._pipelines.run(index, [arrival.case for arrival, _ in batch])
            for _, made in batch:
                made.set()

    def _next(self) -> list[tuple[Arrival, threading.Event]]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            alike = [entry for entry in self._waiting if entry[0].kind == self._waiting[0][0].kind]
            batch = alike[: self._most]
            self._waiting = [entry for entry in self._waiting if entry not in batch]
            if batch:
                self.batches[len(batch)] += 1
            return batch


def replay(ask: Callable[[Arrival], object], arrivals: list[Arrival], spacing: float) -> dict[str, float]:
    """Latency and throughput when each request comes at its time, whatever became of those before."""
    ends = dict.fromkeys(arrivals, 0.0)
    start = time.perf_counter() - arrivals[0].at * spacing

    def client(arrival: Arrival) -> None:
        time.sleep(max(0.0, start + arrival.at * spacing - time.perf_counter()))
        ask(arrival)
        ends[arrival] = time.perf_counter()

    clients = [threading.Thread(target=client, args=(arrival,)) for arrival in arrivals]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    latencies = [end - start - arrival.at * spacing for arrival, end in ends.items()]
    wall = max(ends.values()) - start - arrivals[0].at * spacing
    return {
        "latency_p50_s": median(latencies),
        "latency_p95_s": quantile(latencies, 0.95),
        "requests_per_s": len(arrivals) / wall,
    }


def service_seconds(pipelines: Undivided, arrivals: list[Arrival]) -> float:
    """Mean seconds of a request that runs while as many others do as there are processes."""
    spent: list[float] = []
    shares = [arrivals[index :: len(pipelines.processes)] for index in range(len(pipelines.processes))]

    def work(index: int) -> None:
        for arrival in shares[index]:
            began = time.perf_counter()
            pipelines.run(index, arrival.case)
            spent.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return mean(spent)


def table(runs: dict[str, list[dict[str, float]]], to: str) -> dict[str, Any]:
    """Medians over the rounds, and of the ratios in each round to one of the sides."""
    return {
        name: {
            figure: {
                "value": round(median(run[figure] for run in found), 3),
                f"over_{to}": round(median(a[figure] / b[figure] for a, b in zip(found, runs[to], strict=True)), 3),
            }
            for figure in found[0]
        }
        for name, found in runs.items()
    }


def post(server: Server) -> Callable[[Arrival], object]:
    return lambda arrival: server.post("/v1/images/generations", arrival.call)


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    arrivals = trace()
    pipelines = Undivided(PROCESSES, 1)
    with ExitStack() as stack:
        sides: dict[str, Callable[[Arrival], object]] = {}
        for name, batching in (("one_by_one", "exact"), ("by_step", "batched")):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            plan = f"encoder=1,denoiser={PROCESSES},decoder=1"
            options = ("--batching", batching, "--workers", plan, "--threads", "1", "--arena", "64MiB")
            sides[name] = post(stack.enter_context(serving(folder, *options, *NO_CACHE)).ready())
        dispatcher = Dispatcher(pipelines, MOST)
        stack.callback(dispatcher.close)
        sides["by_request"] = dispatcher.ask
        for ask in sides.values():
            replay(ask, arrivals[:8], 0.01)
        dispatcher.batches.clear()
        seconds = service_seconds(pipelines, arrivals[:CALIBRATION])
        runs: dict[float, dict[str, list[dict[str, float]]]] = {load: {name: [] for name in sides} for load in LOADS}
        for _ in range(rounds):
            for load, found in runs.items():
                for name, ask in sides.items():
                    found[name].append(replay(ask, arrivals, seconds / PROCESSES / load))
    show(
        "arrivals",
        model=SHAPES.name,
        requests=REQUESTS,
        seed=SEED,
        rounds=rounds,
        service_s=round(seconds, 3),
        kinds=len({arrival.kind for arrival in arrivals}),
        request_batches=dict(sorted(dispatcher.batches.items())),
        by_load={str(load): table(found, "one_by_one") for load, found in runs.items()},
    )
    pipelines.close()


if __name__ == "__main__":
    main()
