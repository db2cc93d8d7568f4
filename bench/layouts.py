"""What each layout of whole workers gives: requests a second with many at once.

`--workers auto` chooses by models, memory and cores alone. How much a second worker gives depends on memory bandwidth,
caches and what else runs, so it is measured: one worker of all stages, two, and so on, as many as would be planned.
Start the best by its name: `unfuse serve MODEL --workers all=2`.
`python -m bench.layouts [MODEL] [--at-once N] [--rounds N] [--size WxH] [--steps N] [--frames N] [--threads N]`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.report import show, table
from unfuse.client import Client
from unfuse.service.logs import Logs
from unfuse.service.options import plan_service, serve_options
from unfuse.service.service import private_pools
from unfuse.service.settings import load

SHAPES = "unfuse/shapes"


def rate(client: Client, asked: dict[str, Any], at_once: int, rounds: int) -> float:
    """Requests a second with so many at once: the median of rounds after one that finds out what shares a forward."""
    seconds = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        first = number * at_once
        pending = [client.submit(**asked, seed=seed, cache=False) for seed in range(first, first + at_once)]
        for request in pending:
            request.result()
        seconds.append(time.perf_counter() - began)
    return at_once / median(seconds[1:])


def rates(model: str, threads: int, asked: dict[str, Any], at_once: int, rounds: int) -> dict[str, float]:
    """The rate of each layout of whole workers that fits, in the order in which `--workers auto` prefers them."""
    flags = {"serve.models": [model], "compute.threads": threads}
    logs, planned = Logs(), plan_service(serve_options(load(flags)))
    logs.open_log()
    found = {}
    for layout in planned.layouts.layouts if planned.layouts else ():
        if layout.refusal or layout.workers.rpartition("=")[0] != "all":
            continue
        with private_pools(load({**flags, "serve.workers": layout.workers}), logs) as client:
            found[layout.workers] = rate(client, asked, at_once, rounds)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("model", nargs="?", default=SHAPES)
    flags.add_argument("--at-once", type=int, default=16)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--size")
    flags.add_argument("--steps", type=int)
    flags.add_argument("--frames", type=int)
    flags.add_argument("--threads", type=int, default=0)
    given = flags.parse_args(arguments)
    sizes = {"size": given.size, "num_inference_steps": given.steps, "num_frames": given.frames}
    asked = {"prompt": "a red circle on white", **{name: value for name, value in sizes.items() if value is not None}}
    found = rates(given.model, given.threads, asked, given.at_once, given.rounds)
    show("layouts", model=given.model, asked=asked, at_once=given.at_once, requests_a_second=found)
    table("layout", {name: {"requests a second": round(each, 3)} for name, each in found.items()})


if __name__ == "__main__":
    main()
