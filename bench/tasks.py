"""Tasks a second, and how long one takes from submit to complete: each queue of ours, and arq, taskiq and Celery.

Ours goes all the way: scheduler, dispatcher and wire in one process, and in another a worker that asks for up to 32
tasks at once and completes them at once; it computes nothing, as the tasks of the others do nothing. All that use
Redis use the same server. Sides are started anew in every round, one at a time, and each is measured twice: with many
clients that wait for their task before they submit the next, and with one. A task is complete for us when the commit
that ends its request is acknowledged, for the others when their worker has stored its result.

The others are installed where `--peers` says, once, each for itself; `--peers none` leaves them out. Their settings are
in `bench/peers/`; with `--defaults` arq is measured as it comes, too.
`python -m bench.tasks [--rounds N] [--seconds S] [--peers FOLDER] [--defaults]`

With `--scaling`: 1, 2 and 4 schedulers, each with clients that watch and a worker of its own, over one Redis, over as
many shards of one queue, each on a Redis of its own, and over a Redis each, which is the most that shards could give.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

import psutil
import uvloop

from bench.hop import control, finish, worker
from bench.peers.loop import PARAMS, obey
from bench.report import quantile, ratio, show
from bench.servers import redis_server
from tools.asking import asking
from tools.redis_server import RedisServer
from unfuse.core.messages import Heartbeat, LeasesGranted, RequestTasks
from unfuse.core.model_spec import ModelSpec
from unfuse.core.plan import Pipeline, StageSpec
from unfuse.core.request import RequestContext, new_request_id
from unfuse.scheduler.observer import Observer
from unfuse.wire.dealer import Dealer

CALLERS = 256
LEASES = 32
ANSWER_S = 60.0
PEER_NAMES = ("arq", "taskiq", "celery")
PEERS = Path.home() / ".cache" / "unfuse-bench"

ONE = (StageSpec("a", "denoise", ("a",)),)
THREE = (
    StageSpec("a", "text_encode", ("a",), (), ("x",)),
    StageSpec("b", "denoise", ("b",), ("x",), ("y",)),
    StageSpec("c", "vae_decode", ("c",), ("y",), ()),
)


def card(stages: int) -> ModelSpec:
    specs = ONE if stages == 1 else THREE
    names = [spec.name for spec in specs]
    weights, dtypes = dict.fromkeys(names, "0" * 12), dict.fromkeys(names, "float32")
    return ModelSpec("bench", "", "", Pipeline(specs), {}, {}, weights, dtypes)


class Ended(Observer):
    """Tells those who wait for their request that it is over."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[None]] = {}

    def on_ended(self, context: RequestContext) -> None:
        if waiter := self.waiting.pop(context.id, None):
            waiter.set_result(None)


async def schedule(url: str, stages: int, watched: bool) -> None:
    """The scheduler's process, with the clients in it; its address is the first line it prints."""
    served = card(stages)
    scheduler, router = await control(url, served)
    told = Ended()
    scheduler.observers.add(told)

    async def one() -> None:
        name = new_request_id()
        if watched:
            await scheduler.submit(*asking(served, PARAMS, id=name))
            async for _ in scheduler.queue.watch(name):
                pass
        else:
            complete = told.waiting[name] = asyncio.get_running_loop().create_future()
            await scheduler.submit(*asking(served, PARAMS, id=name))
            await complete

    print(router.address, flush=True)
    await obey(one)


async def work(address: str, stages: int) -> None:
    """A worker that computes nothing. It asks for more while it reports what it has, as a real one does."""
    served = card(stages)
    dealer = await worker(
        address, f"w{os.getpid()}", served, *(stage.name for stage in served.pipeline.stages), slots=LEASES
    )
    beats = asyncio.create_task(beat(dealer))
    reports: set[asyncio.Task[None]] = set()
    while not beats.done():
        granted = await dealer.call(RequestTasks(LEASES, 1 << 30, 20), 30)
        assert isinstance(granted, LeasesGranted), granted
        await asyncio.gather(*reports)
        reports = {asyncio.create_task(finish(dealer, lease)) for lease in granted.leases}
    await beats


async def beat(dealer: Dealer) -> None:
    while True:
        await dealer.call(Heartbeat(wait=1.0), 10)


@dataclass
class Side:
    """How a side is started. `{address}` is what the client's process prints first."""

    client: Sequence[str]
    worker: Sequence[str]
    has_address: bool = False
    tasks: int = 1
    """Tasks of one request."""


def ours(url: str, stages: int = 1, watched: bool = False) -> Side:
    run = [sys.executable, "-m", "bench.tasks"]
    client = [*run, "schedule", url, str(stages), "watched" if watched else ""]
    return Side(client, [*run, "work", "{address}", str(stages)], True, stages)


def theirs(peers: Path, defaults: bool = False) -> dict[str, Side]:
    """The others, installed."""
    found = {}
    for name in PEER_NAMES:
        run = [peer_python(peers, name), "-m", f"bench.peers.with_{name}"]
        found[name] = Side([*run, "client"], [*run, "worker"])
    if defaults:
        arq = found["arq"]
        found["arq, as it comes"] = Side(arq.client, [*arq.worker, "defaults"])
    return found


def peer_python(peers: Path, name: str, shares: bool = False) -> str:
    """The Python of a side, made when it is not there. With `shares`, it has all that we have beside."""
    wanted = Path(__file__).parent / "peers" / f"{name}.txt"
    installed, python = peers / name / wanted.name, peers / name / "bin" / "python"
    if not installed.exists() or installed.read_bytes() != wanted.read_bytes():
        print(f"installing {name} in {peers / name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(peers / name)], check=True)
        if shares:
            (site,) = (peers / name).glob("lib/python*/site-packages")
            (site / "shared.pth").write_text(sysconfig.get_path("purelib"))
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(wanted)], check=True)
        installed.write_bytes(wanted.read_bytes())
    return str(python)


@contextmanager
def started(side: Side, url: str, folder: Path) -> Iterator[Running]:
    """A side that runs."""
    pipe = folder / f"pipe-{time.monotonic_ns()}"
    os.mkfifo(pipe)
    environment = os.environ | {"BENCH_URL": url, "BENCH_PIPE": str(pipe)}
    address = ""
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / "log").open("ab") as log:
        try:
            processes.append(_start(side.client, environment, log))
            if side.has_address:
                address = _line(processes[0], log.name)
            command = [part.format(address=address) for part in side.worker]
            processes.append(_start(command, environment, log))
            yield Running(processes, log.name)
        finally:
            for process in processes:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream:
                        stream.close()


def _start(command: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )


def _line(process: subprocess.Popen[bytes], log: str, timeout: float = ANSWER_S) -> str:
    assert process.stdout
    ready = select.select([process.stdout], [], [], timeout)[0]
    line = process.stdout.readline().decode() if ready else ""
    assert line, f"no output within {timeout:.0f} s; the log ends with\n{Path(log).read_text()[-3000:]}"
    return line.strip()


@dataclass
class Running:
    """A side's processes: that of the clients, and the worker's."""

    processes: list[subprocess.Popen[bytes]]
    log: str

    def measure(self, seconds: float, callers: int) -> dict[str, Any]:
        client = self.processes[0]
        assert client.stdin
        client.stdin.write(f"{seconds} {callers}\n".encode())
        client.stdin.flush()
        found: dict[str, Any] = json.loads(_line(client, self.log, seconds + ANSWER_S))
        return found

    def cpu(self, server: RedisServer | None) -> dict[str, float]:
        """CPU seconds that each part has used."""
        parts = {"client": self.processes[0].pid, "worker": self.processes[1].pid}
        parts |= {"redis": server.pid} if server else {}
        return {name: sum(map(_seconds, _family(pid))) for name, pid in parts.items()}


def _family(pid: int) -> list[psutil.Process]:
    return [root := psutil.Process(pid), *root.children(recursive=True)]


def _seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def measured(side: Side, url: str, server: RedisServer | None, seconds: float, folder: Path) -> dict[str, Any]:
    """One round of a side: warm, under load, with one client."""
    with started(side, url, folder) as running:
        running.measure(min(0.5, seconds), 32)
        before = running.cpu(server)
        loaded = running.measure(seconds, CALLERS)
        used = running.cpu(server)
        alone = running.measure(seconds / 3, 1)
    done = len(loaded["each"]) * side.tasks
    return {
        "tasks_per_s": done / loaded["wall"],
        "loaded": loaded["each"],
        "alone": alone["each"],
        "cpu_ms_per_task": {name: (used[name] - before[name]) * 1e3 / done for name in used},
    }


def row(runs: list[dict[str, Any]], arq: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [run["tasks_per_s"] for run in runs]
    found: dict[str, Any] = {
        "tasks_per_s": round(median(rates), 1),
        "of_each_round": [round(rate, 1) for rate in rates],
    }
    if arq:
        found["over_arq"] = ratio(rates, [run["tasks_per_s"] for run in arq])["p50"]
    for which, callers in (("loaded", CALLERS), ("alone", 1)):
        each = [seconds * 1e3 for run in runs for seconds in run[which]]
        found[f"milliseconds_{callers}_clients"] = {
            "p50": round(quantile(each, 0.5), 2),
            "p99": round(quantile(each, 0.99), 2),
            "n": len(each),
        }
    parts = runs[0]["cpu_ms_per_task"]
    found["cpu_ms_per_task"] = {n: round(median(run["cpu_ms_per_task"][n] for run in runs), 3) for n in parts}
    return found


def sides(url: str, folder: Path) -> dict[str, Side]:
    """Ours, by the name of the queue."""
    return {
        "memory": ours("memory"),
        "sqlite": ours(f"sqlite:{folder}/queue.db"),
        "redis": ours(url),
        "redis, three stages": ours(url, stages=3),
        "redis, clients that watch": ours(url, watched=True),
    }


def measure(rounds: int, seconds: float, others: dict[str, Side], only: Sequence[str] = ()) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with redis_server() as server, tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        all_sides = sides(server.url, folder) | others
        for _ in range(rounds):
            for name, side in all_sides.items():
                if only and name not in only:
                    continue
                server.client.flushall()
                for file in folder.glob("queue.db*"):
                    file.unlink()
                on_redis = None if name in ("memory", "sqlite") else server
                runs[name].append(measured(side, server.url, on_redis, seconds, folder))
    return {name: row(found, runs.get("arq", [])) for name, found in runs.items()}


def scaled(
    schedulers: int, servers: Sequence[RedisServer], sharded: bool, seconds: float, folder: Path
) -> dict[str, Any]:
    """Schedulers at work at one time, spread over these servers, or all over shards of one queue on them: tasks a
    second of all together."""
    with ExitStack() as stack:
        for server in servers:
            server.client.flushall()
        urls = [servers[number % len(servers)].url for number in range(schedulers)]
        members = [(server, "{unfuse}:workers") for server in servers]
        if sharded:
            hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
            urls = [f"redis://{hosts}?shards={len(servers)}"] * schedulers
            members = [(servers[0], "{unfuse:0}:workers")]
        running = [stack.enter_context(started(ours(url, watched=True), url, folder)) for url in urls]
        together = stack.enter_context(ThreadPoolExecutor(schedulers))
        while sum(int(server.client.hlen(key)) for server, key in members) < schedulers:
            time.sleep(0.1)
        list(together.map(lambda one: one.measure(min(0.5, seconds), 32), running))
        pids = [one.pid for one in servers]
        before = [one.cpu(None) for one in running], sum(_seconds(psutil.Process(pid)) for pid in pids)
        found = list(together.map(lambda one: one.measure(seconds, CALLERS // schedulers), running))
        after = [one.cpu(None) for one in running], sum(_seconds(psutil.Process(pid)) for pid in pids)
    done = sum(len(one["each"]) for one in found)
    used = {part: sum(a[part] - b[part] for a, b in zip(after[0], before[0], strict=True)) for part in after[0][0]}
    used["redis"] = after[1] - before[1]
    return {
        "tasks_per_s": done / max(one["wall"] for one in found),
        "cpu_ms_per_task": {part: spent * 1e3 / done for part, spent in used.items()},
        "redis_busy": used["redis"] / len(servers) / max(one["wall"] for one in found),
    }


def scaling(rounds: int, seconds: float, counts: Sequence[int] = (1, 2, 4)) -> dict[str, Any]:
    """For each number of schedulers: over one Redis, over as many shards, and over as many queues."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with ExitStack() as stack:
        servers = [stack.enter_context(redis_server()) for _ in range(max(counts))]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".")))
        for _ in range(rounds):
            for schedulers in counts:
                for number, what in [(1, "Redis"), (schedulers, "shards"), (schedulers, "Redis")][
                    : 3 if schedulers > 1 else 1
                ]:
                    name, used = f"{schedulers} schedulers, {number} {what}", servers[:number]
                    runs[name].append(scaled(schedulers, used, what == "shards", seconds, folder))
    return {
        name: {
            "tasks_per_s": [round(one["tasks_per_s"], 1) for one in found],
            "redis_busy": round(median(one["redis_busy"] for one in found), 2),
            "cpu_ms_per_task": {
                part: round(median(one["cpu_ms_per_task"][part] for one in found), 3)
                for part in found[0]["cpu_ms_per_task"]
            },
        }
        for name, found in runs.items()
    }


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["schedule"]:
        uvloop.run(schedule(words[1], int(words[2]), words[3] == "watched"))
    elif words[:1] == ["work"]:
        uvloop.run(work(words[1], int(words[2])))
    else:
        options = argparse.ArgumentParser()
        options.add_argument("--rounds", type=int, default=3)
        options.add_argument("--seconds", type=float, default=3.0)
        options.add_argument("--peers", default=str(PEERS))
        options.add_argument(
            "--only", action="append", default=[], help="name of a side to measure; repeatable; default: all"
        )
        options.add_argument("--defaults", action="store_true")
        options.add_argument("--scaling", action="store_true")
        given = options.parse_args()
        if given.scaling:
            found = scaling(given.rounds, given.seconds)
            show("tasks, scaling", rounds=given.rounds, seconds=given.seconds, callers=CALLERS, sides=found)
            return
        peers = Path(given.peers).expanduser().absolute()
        others = {} if given.peers == "none" else theirs(peers, given.defaults)
        found = measure(given.rounds, given.seconds, others, given.only)
        show("tasks", rounds=given.rounds, seconds=given.seconds, callers=CALLERS, leases=LEASES, sides=found)


if __name__ == "__main__":
    main()
