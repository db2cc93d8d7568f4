"""Where a device holds one component at a time: `unfuse serve`, which takes the model apart, beside servers that swap.

All serve the same folder (`bench/peers/flux_folder.py`) on all cores, one after the other, in rounds. Ours is told how
much a worker may take, which is less than the whole, and chooses the layout; once more it is told a layout with one
denoiser, whose share of a core is `busiest`. The others are a process for each core, which holds one component at a
time: see `bench/peers/with_swapping.py`. `whole` are such processes that hold all, for what is computing and what is
loading: at one client, the CPU of `reload` by that of `whole` is 1 + loading ÷ computing.
`python -m bench.memory [--rounds N] [--steps 1,6] [--clients 1,8]`
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from bench.peers.flux_folder import build
from bench.pictures import CORES, PROMPTS, Side, ask_them, ask_us, fastapi, measure, ours, pixels, pss, running, warm
from bench.report import show, table

LIMIT = "480MiB"
"""A process with the largest of the three components fits, one with the whole does not."""

CLIENTS, REQUESTS = (1, 8), 24
WAYS = "reload", "queued", "copied", "streamed"


def sides(steps: int) -> dict[str, Side]:
    """The servers, asked for so many steps."""
    told = ours("--memory-limit", LIMIT), ours("--memory-limit", LIMIT, "--workers", "encoder+decoder=1,denoiser=1")
    own = {
        name: replace(side, ask=partial(ask_us, steps=steps))
        for name, side in zip(("unfuse", "unfuse, one denoiser"), told, strict=True)
    }
    others = {"whole": fastapi(CORES)} | {way: fastapi(CORES, f"bench.peers.with_swapping:{way}") for way in WAYS}
    return own | {name: replace(side, ask=partial(ask_them, steps=steps)) for name, side in others.items()}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", default="1,6")
    given = options.parse_args()
    rows: dict[str, dict[str, object]] = {}
    seeds, everything = count(1), dict[str, object]()
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder))
        for steps in map(int, given.steps.split(",")):
            everyone, found = sides(steps), defaultdict[tuple[str, int], list[dict[str, float]]](list)
            memory, made = defaultdict[str, list[int]](list), dict[str, list[str]]()
            for number in range(given.rounds):
                names = [*everyone]
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    with running(everyone[name], model) as (make, server, _):
                        made[name] = [pixels(make(prompt, 7)) for prompt in PROMPTS]
                        warm(make, REQUESTS)
                        for clients in CLIENTS:
                            found[name, clients].append(measure(make, server, clients, REQUESTS, seeds))
                        memory[name].append(pss(server))
                    print(steps, name, [found[name, clients][-1] for clients in CLIENTS], file=sys.stderr)
            middle = {
                (name, clients, figure): median(one[figure] for one in ones)
                for (name, clients), ones in found.items()
                for figure in ("cpu", "rate", "busiest")
            }
            for name in everyone:
                rows[f"{steps} steps, {name}"] = {
                    f"{figure} at {clients}": round(
                        middle[name, clients, figure] / middle["unfuse", clients, figure], 2
                    )
                    for figure in ("cpu", "rate")
                    for clients in CLIENTS
                } | {
                    "1 + loading ÷ computing": round(middle[name, 1, "cpu"] / middle["whole", 1, "cpu"], 2),
                    "busiest": round(middle[name, CLIENTS[-1], "busiest"], 2),
                    "PSS, MiB": round(median(memory[name])),
                    "same pixels": made[name] == made["unfuse"],
                }
            everything |= {f"{steps} steps, {name}, {clients}": ones for (name, clients), ones in found.items()}
    show("memory", all=everything)
    table("memory", rows)


if __name__ == "__main__":
    main()
