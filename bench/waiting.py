"""How fast threads of one computation are together, by how they wait for each other, with and without a busy neighbour.

The computation is what decoding of one text is to the CPU: many products of one row with small matrices, which OpenMP
spreads over the threads each time. Each policy runs in a process of its own, interleaved with the others, beside 0 and
1 processes that take a core. `python -m bench.waiting [ROUNDS [SECONDS]]`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bench.report import ratio, show
from unfuse.core.compute_options import WAITING, compute_environment

POLICIES: Mapping[str, Mapping[str, str]] = {
    "default of OpenMP": {"GOMP_SPINCOUNT": "300000"},
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
    "passive": {},
}
"""By name, what a caller has set; the last one is what unfuse sets for a caller that has set nothing."""

LAYERS, WIDTH = 24, 576
ROUNDS, SECONDS = 5, 2.0


def decode(threads: int, seconds: float) -> float:
    """Tokens a second of products of one row with small matrices, as in decoding."""
    import time

    import torch

    torch.set_num_threads(threads)
    weights = [torch.randn(WIDTH, width) for _ in range(LAYERS) for width in (WIDTH, 3 * WIDTH)]
    row = torch.randn(1, WIDTH)
    tokens, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        for weight in weights:
            torch.nn.functional.silu(row @ weight)
        tokens += 1
    return tokens / passed


def measured(threads: int, seconds: float, given: Mapping[str, str]) -> float:
    """`decode` in a process of its own, whose caller's environment is ours and `given`."""
    ours = {name: value for name, value in os.environ.items() if name not in WAITING}
    command = [sys.executable, "-m", "bench.waiting", "--decode", str(threads), str(seconds)]
    environment = compute_environment(threads, {**ours, **given})
    return float(json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout))


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that each take a core."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for count in (0, 1):
        with neighbours(count):
            measure_one = {"one thread": (1, {})} | {name: (2, given) for name, given in POLICIES.items()}
            rates = {name: list[float]() for name in measure_one}
            for _ in range(rounds):
                for name, (threads, given) in measure_one.items():
                    rates[name].append(measured(threads, seconds, given))
        beside = f"beside {count} busy processes"
        found[beside] = {name: ratio(rate, rates["one thread"]) for name, rate in rates.items() if name != "one thread"}
        found[beside] |= {f"tokens/s, {name}": [round(one, 1) for one in rate] for name, rate in rates.items()}
    return found


if __name__ == "__main__":
    if "--decode" in sys.argv:
        print(json.dumps(decode(int(sys.argv[2]), float(sys.argv[3]))))
    else:
        arguments = sys.argv[1:]
        rounds, seconds = int(arguments[0]) if arguments else ROUNDS, float(arguments[1]) if arguments[1:] else SECONDS
        show("waiting", **measure(rounds, seconds))
