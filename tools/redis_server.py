"""A Redis, or a Valkey, of one's own."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tools.addresses import free_port
from tools.programs import program

START_S = 600.0
KINDS = ("redis", "valkey")


@dataclass
class Address:
    """Where a server is, and how to come in."""

    url: str
    port: int


class RedisServer(Address):
    """A server that keeps what it holds in its folder, on a port that was free; raises Missing where there is none."""

    def __init__(self, folder: Path, kind: str = "redis", host: str = "127.0.0.1", *options: str) -> None:
        self._program, self._folder, self.name, self._host = program(f"{kind}-server"), folder, kind, host
        self.port, self._options = free_port(), options
        self.url = f"redis://{host}:{self.port}/0"
        self.client = redis.Redis(host, self.port, retry=Retry(NoBackoff(), 0))
        self.start()

    def follow(self, primary: RedisServer | None) -> None:
        """Be a replica that has all that the primary has; or of nobody, and a primary oneself."""
        if primary is None:
            self.client.execute_command("REPLICAOF", "NO", "ONE")
            return
        self.client.execute_command("REPLICAOF", primary._host, primary.port)
        until = time.monotonic() + START_S
        while self.client.info("replication").get("master_link_status") != "up":
            assert time.monotonic() < until, f"{self.port} does not follow {primary.port}"
            time.sleep(0.02)

    def on(self, folder: Path) -> RedisServer:
        """Another server of this kind, on what a folder holds."""
        return RedisServer(folder, self.name, self._host)

    def start(self) -> None:
        where = ["--port", str(self.port), "--bind", self._host, "--protected-mode", "no", "--dir", str(self._folder)]
        log = ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec", "--repl-diskless-sync-delay", "0"]
        self._process = subprocess.Popen([self._program, *where, *log, *self._options], stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while not self._answers():
            assert self.running, f"{self._program} ended with {self._process.returncode}"
            assert time.monotonic() < until, f"{self._program} does not answer"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def used(self) -> int:
        """Bytes of what it holds."""
        return int(self.client.info("memory")["used_memory"])

    def at(self, options: str) -> Address:
        return Address(self.url + options, self.port)

    def as_user(self, name: str, password: str) -> Address:
        return Address(self.url.replace("//", f"//{name}:{password}@"), self.port)

    def sync(self, when: str = "always") -> None:
        """With "always", every change is written down before it is answered: SIGKILL loses nothing acknowledged."""
        self.client.config_set("appendfsync", when)

    def pause(self) -> None:
        """The process stands still: connections stay open, and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self.client.close()
        self.kill()


class Service:
    """A primary with replicas, watched by three Sentinels that make a replica the primary when it is gone for `down_s`.

    A server that was killed comes back as a primary of nobody, with what it had, until the Sentinels see it.
    """

    def __init__(self, folder: Path, servers: int = 3, down_s: float = 1.0) -> None:
        self._sentinels: list[subprocess.Popen[bytes]] = []
        self.servers: list[RedisServer] = []
        for number in range(servers):
            (home := folder / f"redis-{number}").mkdir()
            self.servers.append(RedisServer(home))
        for replica in self.servers[1:]:
            replica.follow(self.servers[0])
        ports = [free_port() for _ in range(3)]
        for port in ports:
            (file := folder / f"sentinel-{port}.conf").write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
                f"sentinel monitor tasks 127.0.0.1 {self.servers[0].port} 2\n"
                f"sentinel down-after-milliseconds tasks {int(1000 * down_s)}\nsentinel failover-timeout tasks 5000\n"
            )
            command = [program("redis-server"), str(file), "--sentinel"]
            self._sentinels.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        self._clients = [redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) for port in ports]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        self.url = f"redis+sentinel://{hosts}/tasks/0"
        self._until(self.settled)

    @property
    def primary(self) -> RedisServer:
        """The one that the Sentinels name."""
        named = {self._named(client) for client in self._clients}
        return next(one for one in self.servers if named == {one.port})

    def settled(self) -> bool:
        """Whether the Sentinels know each other, agree on a primary, and all others follow it."""
        try:
            known = [client.sentinel_master("tasks") for client in self._clients]
            (port,) = {one["port"] for one in known}
            primary = next(one for one in self.servers if one.port == port)
            others = [one.client.info("replication") for one in self.servers if one is not primary]
        except (redis.RedisError, ValueError):
            return False
        peers = len(self._clients) - 1
        return all(
            one["num-other-sentinels"] == peers and one["num-slaves"] >= len(others) and one["flags"] == "master"
            for one in known
        ) and all(one.get("master_port") == port and one.get("master_link_status") == "up" for one in others)

    def fail_over(self, freeze: bool = False) -> None:
        """Kill or stop the primary, wait until another is, have the first go on, and wait until it follows."""
        gone = self.primary
        (gone.pause if freeze else gone.kill)()
        self._until(lambda: gone.port not in {self._named(client) for client in self._clients})
        (gone.go_on if freeze else gone.start)()
        self._until(self.settled)

    def _named(self, sentinel: redis.Redis) -> int:
        found = sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "tasks")
        return int(found[1])

    def _until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < end, "the servers of a service do not settle"
            time.sleep(0.1)

    def stop(self) -> None:
        for client, sentinel in zip(self._clients, self._sentinels, strict=True):
            client.close()
            sentinel.kill()
            sentinel.wait()
        for server in self.servers:
            server.stop()
