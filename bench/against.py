"""CPU time of a task, a picture and a token: two checkouts in interleaved pairs, by the parts of three benches.

A task is a hop of `bench.hop`: scheduler, the ends of two workers, and Redis; each checkout runs its own. A picture and
a token of a chat are what `serve` and all its processes spend: one server of each checkout, both up at once and asked
in turns, the first of which changes from pair to pair. How fast a server is varies from start to start, so every few
pairs have new servers. The model of pictures is that of `bench.pictures`, the one of chats that of
`bench.chat`, with one thread a worker. The processor that is spent is judged, not the time on the wall.
Ends with 1 if something costs more than `--limit` times as much, as a median of pairs.
`python -m bench.against OLD [NEW] [--pairs N] [--part hop|pictures|chat] [--limit RATIO]`
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

QUEUES = ("memory", "sqlite", "redis")
HOPS = (100, 1300)
"""Hops of two measurements, whose difference has neither start nor end."""

PAIRS_OF_SERVERS = 3
"""How many pairs are measured with the same two servers."""

WARM = 2
"""Pairs before them that are not counted."""

PICTURES, CLIENTS = 12, 4
CHATS, TOKENS = 4, 64
Measure = Callable[[], dict[str, float]]
"""CPU seconds and seconds on the wall of one unit."""

ROOT = Path(__file__).parents[1]


def of_checkout(checkout: Path) -> dict[str, str]:
    """Variables with which Python finds `unfuse` and `bench` there, and nowhere else."""
    return {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}


def checked(checkout: Path) -> Path:
    """Fails unless that folder's `unfuse` is what would be measured."""
    command = [sys.executable, "-c", "import unfuse; print(unfuse.__file__)"]
    found = subprocess.run(command, env=os.environ | of_checkout(checkout), capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_relative_to(checkout):
        raise SystemExit(f"{checkout} is not a checkout of unfuse: unfuse is imported from {found.stdout.strip()}")
    return checkout


def spent() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def hops_here(queue: str) -> None:
    """What a hop costs over a queue, with the modules of the checkout this runs in: a line of JSON."""
    import psutil
    import uvloop

    from bench.hop import measure
    from bench.servers import redis_server

    with redis_server() as server, tempfile.TemporaryDirectory(dir=".") as folder:
        redis = psutil.Process(server.pid)
        took = []
        for number in HOPS:
            place = {"sqlite": f"sqlite:{folder}/{number}.db", "redis": f"{server.url}?prefix=of-{number}"}
            began, cpu = time.perf_counter(), spent() + sum(redis.cpu_times()[:2])
            uvloop.run(measure(place.get(queue, queue), number, warm=20))
            took.append((spent() + sum(redis.cpu_times()[:2]) - cpu, time.perf_counter() - began))
    hops = HOPS[1] - HOPS[0]
    print(json.dumps({"cpu": (took[1][0] - took[0][0]) / hops, "wall": (took[1][1] - took[0][1]) / hops}))


def hops(checkout: Path, queue: str, folder: Path) -> Measure:
    """Hops of a process of its own."""
    command = [sys.executable, "-P", str(Path(__file__).absolute()), "hops", queue]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("UNFUSE_")}

    def measure() -> dict[str, float]:
        ran = subprocess.run(
            command,
            cwd=folder,
            env=variables | of_checkout(checkout),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
        return found

    return measure


@contextmanager
def both_serve(checkouts: Mapping[str, Path], *arguments: str) -> Iterator[dict[str, Any]]:
    """A server of each checkout, with the same arguments."""
    from tools.server import serving

    with ExitStack() as stack:
        servers = {}
        for name, checkout in checkouts.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            flags = ("--workers", "all=1", "--threads", "1", "--encoder-cache", "0")
            run = stack.enter_context(tempfile.TemporaryDirectory(prefix="run-"))
            variables = {"UNFUSE_RUN_DIR": run, **of_checkout(checkout)}
            servers[name] = stack.enter_context(serving(folder, *arguments, *flags, **variables)).ready()
        yield servers


def pictures(server: Any, seeds: Iterator[int]) -> Measure:
    """Pictures that some clients ask for."""
    from bench.chat import cpu
    from bench.load import closed_loop
    from bench.pictures import PROMPTS, ask_us

    def measure() -> dict[str, float]:
        before = cpu(server)
        wall, _ = closed_loop(lambda n: ask_us(server.url, PROMPTS[n % 4], next(seeds)), CLIENTS, PICTURES)
        return {"cpu": (cpu(server) - before) / PICTURES, "wall": wall / PICTURES}

    return measure


def chats(server: Any, asked: Any) -> Measure:
    """Chats that are read at one time, by what a token of them costs."""
    from bench.chat import served

    def measure() -> dict[str, float]:
        one = served(server, [asked.messages(20) for _ in range(CHATS)], TOKENS)
        return {"cpu": one["cpu"] / one["tokens"], "wall": one["seconds"] / one["tokens"]}

    return measure


Pairs = dict[str, list[dict[str, float]]]
"""The measurements of each side, in order."""


def in_turns(sides: Mapping[str, Measure], pairs: int, warm: int = 0) -> Pairs:
    """A measurement of each in every pair, who is first by turns; some pairs before are not counted."""
    found: Pairs = defaultdict(list)
    for number in range(warm + pairs):
        for name in [*sides][:: 1 if number % 2 else -1]:
            one = sides[name]()
            if number >= warm:
                found[name].append(one)
        print(f"pair {number + 1 - warm} of {pairs}", file=sys.stderr)
    return found


def of_servers(
    checkouts: Mapping[str, Path], pairs: int, arguments: Sequence[str], measured: Callable[[Any], Measure]
) -> Pairs:
    """Measure that many pairs. Every PAIRS_OF_SERVERS have new servers; the sides take turns in starting first."""
    found: Pairs = defaultdict(list)
    for number, begun in enumerate(range(0, pairs, PAIRS_OF_SERVERS)):
        order = [*checkouts][:: 1 if number % 2 else -1]
        with both_serve({name: checkouts[name] for name in order}, *arguments) as servers:
            sides = {name: measured(server) for name, server in servers.items()}
            for name, rows in in_turns(sides, min(PAIRS_OF_SERVERS, pairs - begun), WARM).items():
                found[name] += rows
    return found


def compared(checkouts: Mapping[str, Path], part: str | None, pairs: int) -> Iterator[tuple[str, Pairs]]:
    """The measurements of a part or of all parts, each with the name of what was measured, as soon as it is."""
    from bench.chat import KV, Chats
    from bench.peers.flux_folder import build
    from tools.tiny_language import make_language_model

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for queue in QUEUES if part in (None, "hop") else ():
            each = {name: hops(checkout, queue, folder) for name, checkout in checkouts.items()}
            yield f"hop, {queue}", in_turns(each, pairs)
        if part in (None, "pictures"):
            model, seeds = build(folder / "pictures"), count(1)
            yield "picture", of_servers(checkouts, pairs, [str(model)], lambda server: pictures(server, seeds))
        if part in (None, "chat"):
            model = make_language_model(folder / "narrow", positions=4096, width=256, layers=4)
            asked, arguments = Chats(model), [str(model), "--kv", KV, "--arena", "256MiB"]
            yield "token of a chat", of_servers(checkouts, pairs, arguments, lambda server: chats(server, asked))


def row(of: Pairs) -> dict[str, object]:
    """Medians of both, and of the ratios of pairs, with their quartiles."""
    from bench.report import ratio

    found: dict[str, object] = {}
    for what in ("cpu", "wall"):
        old, new = ([one[what] for one in of[name]] for name in ("old", "new"))
        spread = ratio(new, old)
        found |= {
            f"{what}, old, ms": round(1e3 * median(old), 3),
            f"{what}, new, ms": round(1e3 * median(new), 3),
            f"{what}, new ÷ old": round(spread["p50"], 3),
            f"{what}, quartiles": f"{spread['p25']:.3f} to {spread['p75']:.3f}",
        }
    return found


def main() -> None:
    if sys.argv[1:2] == ["hops"]:
        hops_here(sys.argv[2])
        return
    from bench.report import show, table

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("old", type=Path, help="folder of another checkout, such as one from `git worktree add`")
    options.add_argument("new", type=Path, nargs="?", default=ROOT)
    options.add_argument("--pairs", type=int, default=15)
    options.add_argument("--part", choices=["hop", "pictures", "chat"])
    options.add_argument("--limit", type=float, default=1.03)
    given = options.parse_args()
    checkouts = {name: checked(getattr(given, name).absolute()) for name in ("old", "new")}
    found = dict[str, Pairs]()
    rows = dict[str, dict[str, object]]()
    for what, measurements in compared(checkouts, given.part, given.pairs):
        found[what] = measurements
        rows[what] = row(measurements)
        print(what, rows[what], file=sys.stderr)  # what is interrupted has shown this much
    table("new beside old", rows)
    show("against", pairs=given.pairs, limit=given.limit, all=found)
    worse = [what for what, one in rows.items() if float(str(one["cpu, new ÷ old"])) > given.limit]
    if worse:
        raise SystemExit(f"costs more than {given.limit} times as much: {', '.join(worse)}")


if __name__ == "__main__":
    main()
