"""What clients feel when others are there: `unfuse serve` beside small servers of one whole pipeline.

The servers and their folder are those of `bench/pictures.py`, each alone on the machine. **Open loop**: pictures are
asked for at random times, at 0.8 of the best rate that any of them has with sixteen clients. **Short behind long**: a
picture of one step, asked for when eight of LONG steps run or wait, by one that has the server for itself. **Leaving**:
eight clients ask for LONG steps and leave after a second; seconds until a picture is there that is asked for then. Ours
is told `--on-disconnect cancel`; the others have no such setting.
`python -m bench.mixed [--times N] [--peers FOLDER]`
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from statistics import median

from bench.load import closed_loop
from bench.peers.flux_folder import build
from bench.pictures import PROMPTS, Make, ours, running, sides, warm
from bench.report import quantile, show, table
from bench.tasks import PEERS

LONG, MANY, LEAVES_S = 40, 8, 1.0
SHARE, ARRIVALS, REQUESTS = 0.8, 80, 48
NAMES = "fastapi", "litserve", "ray serve"


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def open_loop(make: Make, rate: float) -> list[float]:
    """Seconds of each picture, from when it was asked for; the same times of arrival for every server."""
    draw, seeds = random.Random(7), count(1)
    with ThreadPoolExecutor(ARRIVALS) as pool:
        waiting = []
        for _ in range(ARRIVALS):
            time.sleep(draw.expovariate(rate))
            seed = next(seeds)
            waiting.append(pool.submit(timed, lambda seed=seed: make(PROMPTS[seed % 4], seed)))
        return [one.result() for one in waiting]


def behind(make: Make, steps: int, timeout: float) -> float:
    """Seconds of a picture of so many steps when long ones were asked for, whose clients have left or wait."""

    def long(seed: int) -> None:
        with suppress(TimeoutError):
            make(PROMPTS[0], seed, steps=LONG, timeout=timeout)

    others = [threading.Thread(target=long, args=(number,)) for number in range(MANY)]
    for other in others:
        other.start()
    if timeout <= LEAVES_S:
        for other in others:
            other.join()
    else:
        time.sleep(LEAVES_S)
    took = timed(lambda: make(PROMPTS[1], 1, steps=steps))
    for other in others:
        other.join()
    return took


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--times", type=int, default=3)
    options.add_argument("--peers", default=str(PEERS))
    given = options.parse_args()
    everyone = {name: side for name, side in sides(Path(given.peers).expanduser().absolute()).items() if name in NAMES}
    everyone |= {"unfuse": ours("--on-disconnect", "cancel")}
    rates, found, rows = dict[str, float](), dict[str, dict[str, list[float]]](), dict[str, dict[str, object]]()
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder))
        for name, side in everyone.items():
            with running(side, model) as (make, *_):
                warm(make)
                wall, _ = closed_loop(lambda seed, make=make: make(PROMPTS[seed % 4], seed), 16, REQUESTS)
                rates[name] = REQUESTS / wall
                print(name, round(rates[name], 2), "a second", file=sys.stderr)
        rate = SHARE * max(rates.values())
        for name, side in everyone.items():
            with running(side, model) as (make, *_):
                warm(make)
                found[name] = {
                    "open": open_loop(make, rate),
                    "alone": [timed(lambda make=make: make(PROMPTS[1], 1, steps=1)) for _ in range(given.times)],
                    "behind": [behind(make, 1, 600.0) for _ in range(given.times)],
                    "left": [behind(make, 1, LEAVES_S) for _ in range(given.times)],
                }
                print(name, {what: round(median(each), 2) for what, each in found[name].items()}, file=sys.stderr)
    for name, each in found.items():
        rows[name] = {
            "rate ÷ best": round(rates[name] / max(rates.values()), 2),
            "open loop p50, s": round(median(each["open"]), 2),
            "p95, s": round(quantile(each["open"], 0.95), 2),
            "short ÷ alone": round(median(each["behind"]) / median(each["alone"]), 1),
            "after others left, s": round(median(each["left"]), 2),
        }
    show("mixed", rate=rate, rates=rates, all=found)
    table("others are there", rows)


if __name__ == "__main__":
    main()
