"""What doing nothing costs: CPU of a server's processes and of its workers', once they are ready and nobody asks.

A server for each queue, all at the same time, each with a worker for each role. `python -m bench.idle [SECONDS]`
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from bench.report import show
from bench.servers import redis_server
from bench.start import memory
from tools.server import Server, family_of, serving

SECONDS = 60.0
SETTLE_S = 5.0
"""After the last server is ready: what starting has left to do."""


def cpu(process: psutil.Process) -> float:
    """CPU seconds it has used, from /proc."""
    user, system, *_ = process.cpu_times()
    return float(user + system)


def idle(servers: dict[str, Server], seconds: float) -> dict[str, list[dict[str, Any]]]:
    """By queue and process: the part of a core that it used, in per cent, and MiB it has for itself."""
    families = {queue: family_of(server.process.pid) for queue, server in servers.items()}
    before = {process: cpu(process) for family in families.values() for process in family}
    began = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    return {
        queue: [
            memory(process) | {"percent_of_a_core": round((cpu(process) - before[process]) / passed * 100, 3)}
            for process in family
        ]
        for queue, family in families.items()
    }


def busiest(processes: list[dict[str, Any]]) -> float:
    """The worker that uses most: its parent, which talks to the scheduler, and compute, which waits for the parent."""
    workers: Counter[str] = Counter()
    for process in processes:
        workers[process["process"].removeprefix("compute of ")] += process["percent_of_a_core"]
    return round(max(used for name, used in workers.items() if name != "serve"), 3)


def measure(seconds: float, settle: float = SETTLE_S, only: str = "") -> dict[str, Any]:
    with redis_server() as redis, ExitStack() as stack:
        servers = {}
        for queue in ("memory", "sqlite", "redis"):
            if only not in ("", queue):
                continue
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".")))
            url = {"memory": "memory", "sqlite": f"sqlite:{folder.absolute()}/queue.db", "redis": redis.url}[queue]
            options = ("--queue", url, "--threads", "1", "--arena", "64MiB")
            servers[queue] = stack.enter_context(serving(folder, *options))
            servers[queue].ready()
        time.sleep(settle)
        found = idle(servers, seconds)
        return {
            queue: {"worker_percent_of_a_core": busiest(processes), "processes": processes}
            for queue, processes in found.items()
        }


def main() -> None:
    seconds = float(sys.argv[1]) if sys.argv[1:] else SECONDS
    show("idle", seconds=seconds, queues=measure(seconds))


if __name__ == "__main__":
    main()
