"""A whole system of real processes, each of which can be killed, stopped and started again by its pid."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.forking import Forked
from tools.addresses import address_of_server, free_port
from tools.programs import program
from tools.redis_server import Service
from unfuse.wire.keys import create_keys

START_S = 120.0
"""How long anything may take to come about on a loaded machine; nothing is asserted about it."""

RUN_DIR = "UNFUSE_RUN_DIR"
ROLES = ("encoder", "denoiser", "decoder")
LEASE_S = 2.0


def until(condition: Callable[[], Any], what: str, seconds: float = START_S) -> Any:
    """Wait for a true value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


def install(folder: Path) -> tuple[Path, Path]:
    """Install the chaos family as another package would be, and make a model of it: (site folder, model folder)."""
    site, model = folder / "site", folder / "model"
    info = site / "chaos_family-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("family.py"), site / "chaos_family.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chaos-family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unfuse.families]\nChaosPipeline = chaos_family:FAMILY\n")
    index: dict[str, Any] = {"_class_name": "ChaosPipeline"}
    for number, component in enumerate(("text_encoder", "transformer", "vae")):
        index[component] = ["chaos_family", component]
        (model / component).mkdir(parents=True)
        (model / component / "config.json").write_text("{}")
        described = json.dumps({"salt": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
        weights = len(described).to_bytes(8, "little") + described + number.to_bytes(8, "little")
        (model / component / "model.safetensors").write_bytes(weights)
    (model / "model_index.json").write_text(json.dumps(index))
    return site, model


class Process:
    """A command in a process group of its own, with its log; started again under the same command."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self._command, self._log, self._environment = name, command, log, environment
        self.start()

    def start(self) -> None:
        forks = self._command[0] == sys.executable
        start = partial(Forked, self._command[1:]) if forks else partial(subprocess.Popen, self._command)
        with self._log.open("ab") as log:
            self.popen: Any = start(
                env=self._environment, stdout=log.fileno(), stderr=log.fileno(), start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        """To the process alone."""
        if self.alive:
            os.kill(self.pid, number)

    def send_all(self, number: signal.Signals) -> None:
        """To the process and what it started."""
        for process in (self.pid, *self.children()):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def kill(self) -> None:
        """`kill -9`, and nobody else: what it started has to notice."""
        self.popen.kill()
        self.popen.wait()

    def replace(self) -> None:
        """Kill it, and start another in its place."""
        self.kill()
        self.start()

    def children(self) -> list[int]:
        """Pids of what it started: of a worker, its compute process."""
        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        return []

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """End it and all that it started, whatever state they are in."""
        everyone = [self.pid, *self.children()]
        for pid in everyone:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Gateway(Process):
    """One `unfuse serve` without workers: a gateway and a scheduler."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.port = free_port()
        self.control = address_of_server(self.port)
        command = [sys.executable, "-m", "unfuse", "serve", *arguments]
        super().__init__(name, [*command, "--port", str(self.port)], log, environment)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        """The JSON at a path; None while it does not answer with 200."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return json.loads(answer.read())
        except (OSError, ValueError):
            return None

    def post(self, path: str) -> Any:
        """The JSON that an empty POST is answered with."""
        with urllib.request.urlopen(urllib.request.Request(self.url + path, method="POST"), timeout=600) as answer:
            return json.loads(answer.read())


class Redis(Process):
    """A server that has written down what it acknowledged."""

    def __init__(self, folder: Path, environment: Mapping[str, str], name: str = "redis") -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        command = [
            program("redis-server"),
            *where,
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
        ]
        super().__init__(name, command, folder / "redis.log", environment)
        self.ready()

    def ready(self) -> None:
        until(self._answers, "redis to answer")

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False


class Cluster:
    """`schedulers` gateways and workers that know all of them. The queue is in Redis, in a service of several
    ("sentinel"), in two of them ("shards"), or in SQLite, which has one gateway.

    `workers` is how many of each role; those `apart` have run folders of their own, so that tensors move
    between them as between machines. Results, and a queue in SQLite, are on a `disk` of their own, if there is one.
    """

    def __init__(
        self,
        folder: Path,
        queue: str = "redis",
        schedulers: int = 2,
        workers: int = 2,
        arena: str = "16MiB",
        serve: Sequence[str] = (),
        worker: Sequence[str] = (),
        apart: bool = False,
        disk: Path | None = None,
        **variables: str,
    ) -> None:
        self.folder, self._apart, self.disk = folder, apart, disk
        site, self.model = install(folder)
        clean = {name: value for name, value in os.environ.items() if name == RUN_DIR or not name.startswith("UNFUSE_")}
        paths = os.pathsep.join(filter(None, [str(site), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        self._environment = clean | {
            "PYTHONPATH": paths,
            "UNFUSE_DATA_DIR": str(folder / "data"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "UNFUSE_LEASE__TTL_S": str(LEASE_S),
            **variables,
        }
        self.redis: Redis | None = None
        self.shards: list[Redis] = []
        self.away: list[Process] = []
        """What is not running on purpose."""
        self.service: Service | None = None
        self.gateways: list[Gateway] = []
        self.workers: list[Process] = []
        self._arena, self._worker_arguments, self._numbers = arena, worker, 0
        self._keys: list[str] = []
        if apart:
            create_keys(folder / "keys")
            self._keys = ["--keys", str(folder / "keys")]
        try:
            if queue == "redis":
                self.redis = Redis(folder, self._environment)
            elif queue == "sentinel":
                self.service = Service(folder)
            elif queue == "shards":
                for name in ("shard-0", "shard-1"):
                    (folder / name).mkdir()
                    self.shards.append(Redis(folder / name, self._environment, name))
            arguments = [
                str(self.model),
                "--served-model-name",
                "chaos",
                "--workers",
                "none",
                "--queue",
                self._queue(),
                "--results",
                f"disk:{disk or folder}/results",
                "--device",
                "cpu",
                "--checkpoint",
                "1",
                *self._keys,
                *serve,
            ]
            for number in range(schedulers):
                name = f"serve-{number}"
                self.gateways.append(Gateway(name, arguments, folder / f"{name}.log", self._environment))
            for role in ROLES:
                for _ in range(workers):
                    self.worker(role)
        except BaseException:
            self.close()
            raise

    def _queue(self) -> str:
        """The address of the queue."""
        if self.service:
            return f"{self.service.url}?replicas=1"
        if self.shards:
            servers = ",".join(f"127.0.0.1:{shard.port}" for shard in self.shards)
            return f"redis://{servers}/0?shards={len(self.shards)}"
        return self.redis.url if self.redis else f"sqlite:{self.disk or self.folder}/queue.db"

    def worker(self, role: str, *arguments: str) -> Process:
        """Start one more worker."""
        self._numbers += 1
        name = f"{role}-{self._numbers}"
        addresses = [part for gateway in self.gateways for part in ("--scheduler", gateway.control)]
        command = [
            sys.executable,
            "-m",
            "unfuse",
            "worker",
            "--role",
            role,
            *addresses,
            "--arena",
            self._arena,
            "--device",
            "cpu",
            *self._keys,
            *self._worker_arguments,
            *arguments,
        ]
        own = {RUN_DIR: f"{self._environment[RUN_DIR]}/{name}"} if self._apart else {}
        self.workers.append(Process(name, command, self.folder / f"{name}.log", self._environment | own))
        return self.workers[-1]

    def get(self, path: str) -> Any:
        """The JSON at a path, from the first gateway that answers; None if none does."""
        for gateway in self.gateways:
            if gateway.alive and (found := gateway.get(path)) is not None:
                return found
        return None

    def ready(self) -> Cluster:
        """Every gateway answers, and every worker has been heard of."""
        pids = {worker.pid for worker in self.workers if worker.alive}

        answers = "/ready" if pids else "/health"

        def joined() -> bool:
            self.require_alive()
            return all(gateway.get(answers) for gateway in self.gateways) and pids <= self.members().keys()

        until(joined, "every gateway and worker to be ready")
        return self

    def require_alive(self) -> None:
        """Nothing may have ended by itself."""
        for process in (process for process in self._everyone() if process not in self.away):
            assert process.alive, f"{process.name} ended with {process.popen.returncode}:\n{process.log()[-3000:]}"

    def members(self) -> dict[int, dict[str, Any]]:
        """Workers that were heard of within a second, by pid."""
        found = (self.get("/v1/workers") or {"data": []})["data"]
        return {worker["pid"]: worker for worker in found if worker["seen_s"] < LEASE_S / 2}

    def running(self) -> list[dict[str, Any]]:
        """The requests that have begun, and none while no gateway answers."""
        return self._with_status("in_progress") or []

    def unfinished(self) -> list[dict[str, Any]] | None:
        """The requests that are queued or have begun; None while no gateway answers."""
        queued, begun = self._with_status("queued"), self._with_status("in_progress")
        return None if queued is None or begun is None else queued + begun

    def _with_status(self, status: str) -> list[dict[str, Any]] | None:
        page = self.get(f"/v1/requests?status={status}&limit=1000")
        return None if page is None else list(page["data"])

    def logs(self) -> str:
        return "\n".join(f"== {one.name}\n{one.log()[-4000:]}" for one in self._everyone())

    def said(self, words: str) -> int:
        """How often they are in all logs."""
        return sum(one.log().count(words) for one in self._everyone())

    def _everyone(self) -> list[Process]:
        return [*self.workers, *self.gateways, *([self.redis] if self.redis else []), *self.shards]

    def close(self) -> None:
        for process in self._everyone():
            process.close()
        if self.service:
            self.service.stop()


@contextmanager
def running_cluster(folder: Path, **options: Any) -> Iterator[Cluster]:
    cluster = Cluster(folder, **options)
    try:
        yield cluster.ready()
    except BaseException:
        print(cluster.logs()[-30000:])
        raise
    finally:
        cluster.close()
