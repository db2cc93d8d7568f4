"""Drills: real processes are killed, stopped and started again under load, and nothing that was accepted is lost.

CHAOS_SEED repeats a drill's choices (not its timing); each prints its seed. CHAOS_SCALE is the share of faults and
requests: a tenth of them by day, half of them by night.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.chaos.checker import check
from tests.chaos.cluster import ROLES, START_S, running_cluster, until
from tests.chaos.drill import CLIENTS, Record, drill, observed, say, unhurried
from tests.chaos.history import Asked, History, Load, healthy
from tests.chaos.monkey import QUIETLY
from tests.disks import small_disk
from unfuse.stores.results import ID_FILE

SCALE = float(os.environ.get("CHAOS_SCALE", "0.1"))
DISK_KIB = 64 << 10


def scaled(faults: dict[str, int]) -> dict[str, int]:
    return {name: math.ceil(SCALE * count) for name, count in faults.items()}


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))


def test_kills_of_workers_schedulers_and_redis_lose_no_request(
    tmp_path: Path, seed: int, record_property: Record
) -> None:
    """Given two gateways over Redis and two workers of each role, when any of them, and Redis, are killed or stopped
    again and again, then every accepted request is completed once, with the right bytes."""
    quiet = scaled({QUIETLY: 8})
    workers = scaled({"kill compute": 45, "kill worker": 20, "freeze worker": 3})
    everything = scaled(
        {"kill compute": 30, "kill worker": 20, "freeze worker": 3, "kill scheduler": 16, "kill redis": 8}
    )
    with running_cluster(tmp_path) as cluster:
        verdict = drill("redis", cluster, int(SCALE * 1200), seed, quiet, workers, everything)
        say(verdict, record_property)
    # a tenth of the faults, as by day, may all miss the tasks that have a checkpoint
    assert verdict.resumed > 0 or SCALE < 0.5
    assert verdict.faults == Counter(quiet) + Counter(workers) + Counter(everything)


@pytest.mark.nightly
def test_rolling_restart_under_load_loses_no_request(tmp_path: Path, seed: int, record_property: Record) -> None:
    """Given two schedulers over Redis and two workers of each role under load, when each of them is told to end and
    started again, one after the other, each when the one before is back, then nothing is lost or made twice, every
    byte is right, and nothing runs into the end of a lease."""
    with running_cluster(tmp_path, worker=["--drain-timeout", "10"]) as cluster:
        at_it, ended = Event(), dict[str, int]()

        def work() -> Iterator[Any]:
            for one in unhurried(sys.maxsize, "rolling", seed):
                if at_it.is_set():
                    return
                yield one

        with Load([gateway.port for gateway in cluster.gateways], work(), CLIENTS, seed, History()) as load:
            for process in (*cluster.gateways, *cluster.workers):
                until(lambda: load.busy, "clients to wait for something")
                process.send(signal.SIGTERM)
                ended[process.name] = process.popen.wait(START_S)
                process.start()
                cluster.ready()
            at_it.set()
            history = load.finish()
        verdict = check(f"rolling restart (seed {seed})", history.operations, observed(cluster))
        say(verdict, record_property)
        assert ended == dict.fromkeys(ended, 0) and len(ended) == 2 + 2 * len(ROLES)
        assert "lease expired" not in cluster.logs()
    assert verdict.completed == verdict.operations >= len(ended), "each process ended while somebody waited"


@pytest.mark.nightly
def test_kills_of_a_sqlite_server_and_workers_lose_no_request(
    tmp_path: Path, seed: int, record_property: Record
) -> None:
    """Given a server with a SQLite queue, and workers on nodes of their own whose transfers fail now and then, when it
    is killed and started again, with workers dying beside it, then it goes on where it was, and no copy is left."""
    copies = tmp_path / "copies"
    bad = {
        "UNFUSE_TRANSFER__ENGINE": ",".join(f"unfuse.testing.transfer_faults:Faulty{name}" for name in ("Tcp", "Zmq"))
    }
    faults = {"kill compute": 30, "kill worker": 14, "kill scheduler": 12, "freeze worker": 3}
    durable = ["--durable", f"disk:{copies}"]
    with running_cluster(tmp_path, queue="sqlite", schedulers=1, apart=True, serve=durable, **bad) as cluster:
        verdict = drill("sqlite", cluster, 400, seed, faults)
        say(verdict, record_property)
        until(
            lambda: not [path for path in copies.rglob("*") if path.is_file()], "copies of dead workers to be dropped"
        )
    assert verdict.resumed > 0
    assert verdict.faults == faults


@pytest.mark.nightly
def test_redis_sentinel_failover_loses_no_request(tmp_path: Path, seed: int, record_property: Record) -> None:
    """Given a Redis of three servers that Sentinels watch, and a queue that waits for one replica, when its primary is
    killed or stopped, workers and schedulers beside it, then nothing that was accepted is lost or done twice."""
    faults = {"kill primary": 3, "freeze primary": 2, "kill compute": 5, "kill worker": 5, "kill scheduler": 2}
    with running_cluster(tmp_path, queue="sentinel") as cluster:
        verdict = drill("failover", cluster, 200, seed, faults)
        say(verdict, record_property)
    assert verdict.faults == faults


TOGETHER = {"kill compute": 6, "kill worker": 6, "restart worker": 4, "kill scheduler": 4, "restart scheduler": 3}
"""Faults that are made beside a full disk and a shard that is away."""


@pytest.mark.nightly
@pytest.mark.parametrize("queue", ["shards", "sqlite"])
def test_kills_during_a_full_disk_lose_no_request(
    queue: str, tmp_path: Path, seed: int, record_property: Record
) -> None:
    """Given a queue of two Redis, or of SQLite, and a disk that fills up again and again under the results and SQLite's
    file, when workers, servers and one of the Redis are killed or told to end meanwhile, then nothing is lost, made
    twice, wrong or left over."""
    faults = {**TOGETHER, "fill disk": 6} | ({"kill shard": 5} if queue == "shards" else {})
    flags, schedulers = ["--drain-timeout", "6"], 2 if queue == "shards" else 1
    with (
        small_disk(tmp_path, DISK_KIB) as disk,
        running_cluster(tmp_path, queue=queue, schedulers=schedulers, disk=disk, serve=flags, worker=flags) as cluster,
    ):
        verdict = drill(f"{queue}, full disk", cluster, 200, seed, faults)
        say(verdict, record_property)
        results = disk / "results"
        until(lambda: not unfinished(results), "files of no result to be dropped")
    assert verdict.faults == faults
    assert verdict.beside["fill disk"] and (queue == "sqlite" or verdict.beside["kill shard"])


def unfinished(results: Path) -> list[Path]:
    """Files that are no result of a request."""
    files = [path for path in results.rglob("*") if path.is_file() and path.name != ID_FILE]
    return [path for path in files if path.parent.parent != results or not path.name.isdecimal()]


POISON = {
    "crash@text_encode": "SIGKILL",
    "crash@denoise": "SIGKILL",
    "crash@vae_decode": "SIGKILL",
    "hang@denoise": "no progress",
    "eat@vae_decode": "of memory",
    "fail@denoise": "wants to be tried again",
}
"""Requests that are bad for whoever runs them, by the evidence that each must leave."""

HOPELESS = ("refuse@denoise", "nan@denoise")
"""Requests that fail the same way anywhere: nobody has to look into those."""


@pytest.mark.nightly
def test_poison_requests_become_dead_letters_and_others_complete(
    tmp_path: Path, seed: int, record_property: Record
) -> None:
    """Given requests that crash, hang, eat memory or fail wherever they run, then healthy ones beside them are all
    completed, and each bad one ends among the dead with its evidence; what cannot succeed ends without."""
    work = list(unhurried(int(SCALE * 400), "p", seed))
    for number, order in enumerate((*POISON, *HOPELESS)):
        work.insert(4 * number, (order, Asked(f"bad [{order}]", 1, healthy=False), "poll"))
    limits = ["--memory-limit", "192MiB"]
    with running_cluster(tmp_path, worker=limits, UNFUSE_LEASE__STALL_S="3") as cluster:
        with Load([gateway.port for gateway in cluster.gateways], work, CLIENTS, seed, History()) as load:
            history = load.finish()
        final = observed(cluster)
        verdict = check(f"poison (seed {seed})", history.operations, final)
        say(verdict, record_property)
    dead = {final.requests[id].view["metadata"]["operation"]: evidence for id, evidence in final.dead.items()}
    assert dead.keys() == POISON.keys()
    assert [order for order, evidence in POISON.items() if evidence not in dead[order]] == []
    over = {final.requests[id].view["status"] for one in history.operations if not one.asked.healthy for id in one.ids}
    assert over == {"failed"}


def test_tenfold_overload_is_rejected_by_admission_control(tmp_path: Path, seed: int, record_property: Record) -> None:
    """Given ten times as many clients as requests may be active, then some are told when to come back and nothing is
    kept of them, and what was accepted is completed."""
    active = 4
    patient = healthy(int(SCALE * 200), "o", seed, ["wait", "poll", "events"])
    impatient = healthy(int(SCALE * 1000), "i", seed, ["once"])
    work = [one for six in zip(patient, *[impatient] * 5, strict=True) for one in six]
    with running_cluster(tmp_path, workers=1, serve=["--max-active", str(active)]) as cluster:
        with Load([gateway.port for gateway in cluster.gateways], work, 10 * active, seed, History()) as load:
            history = load.finish()
        verdict = check(f"overload (seed {seed})", history.operations, observed(cluster))
        say(verdict, record_property)
    assert verdict.refused > 0
    turned_away = sum(operation.turned_away for operation in history.operations)
    assert verdict.completed == verdict.operations - turned_away
