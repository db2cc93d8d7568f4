"""Real servers for the stores that need one: Redis, and SeaweedFS for S3."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import obstore
import pytest
import redis
from obstore.store import S3Store
from redis.backoff import NoBackoff
from redis.retry import Retry

AWS = {"AWS_ACCESS_KEY_ID": "unfuse", "AWS_SECRET_ACCESS_KEY": "a secret of the tests", "AWS_REGION": "us-east-1"}
IDENTITY = {
    "name": "tests",
    "credentials": [{"accessKey": AWS["AWS_ACCESS_KEY_ID"], "secretKey": AWS["AWS_SECRET_ACCESS_KEY"]}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


class Server:
    """A server in a process of its own, which can be killed and started again over the same folder."""

    binary: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def command(self) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([self.binary, *self.command()], stdout=log, stderr=log)
        until = time.monotonic() + 600
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"{self.binary} does not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class RedisServer(Server):
    """Redis."""

    def __init__(self, binary: str, folder: Path, host: str = "127.0.0.1") -> None:
        self.binary, (self.port,), self.host = binary, free_ports(1), host
        self.url = f"redis://{host}:{self.port}/0"
        self.client = redis.Redis(host, self.port, retry=Retry(NoBackoff(), 0))
        super().__init__(folder)

    def command(self) -> list[str]:
        where = ["--port", str(self.port), "--bind", self.host, "--protected-mode", "no", "--dir", str(self.folder)]
        return [*where, "--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]

    def sync(self) -> None:
        """From now on what it is told is on disk before it says so."""
        self.client.config_set("appendfsync", "always")

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False


class S3Server(Server):
    """SeaweedFS with a bucket that is made when something is first put into it."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.binary, self.ports = binary, free_ports(8)
        self.endpoint = f"http://127.0.0.1:{self.ports[0]}"
        self.url = f"s3://tests/unfuse?endpoint={self.endpoint}"
        self._filled = False
        (folder / "s3.json").write_text(json.dumps({"identities": [IDENTITY]}))
        super().__init__(folder)

    def command(self) -> list[str]:
        names = ("s3", "master", "volume", "filer")
        ports = [f"-{name}.port={port}" for name, port in zip(names, self.ports[:4], strict=True)]
        ports += [f"-{name}.port.grpc={port}" for name, port in zip(names, self.ports[4:], strict=True)]
        own = [f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={self.folder}/s3.json"]
        small = ["-master.volumeSizeLimitMB=64", "-volume.max=50", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        small += ["-master.electionTimeout=1s", "-master.heartbeatInterval=200ms"]
        return ["server", "-s3", *own, *ports, *small]

    def answers(self) -> bool:
        bucket = S3Store("tests", endpoint=self.endpoint, client_options={"allow_http": True})
        try:
            if not self._filled:
                obstore.put(bucket, "hello", b"hello")
            self._filled = True
            return bytes(obstore.get(bucket, "hello").bytes()) == b"hello"
        except (obstore.exceptions.BaseError, FileNotFoundError):
            return False


def binary(name: str, package: str) -> str:
    """Where a server's program is: with this Python, or where programs are."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no {name} here: install {package}")
    return str(found)
