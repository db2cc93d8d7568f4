"""A real server for the stores in S3: SeaweedFS."""

import json
import signal
import subprocess
import time
from pathlib import Path

import obstore
from obstore.store import S3Store

from tools.addresses import free_ports
from tools.programs import program

START_S = 600.0

AWS = {"AWS_ACCESS_KEY_ID": "unfuse", "AWS_SECRET_ACCESS_KEY": "a secret of the tests", "AWS_REGION": "us-east-1"}
IDENTITY = {
    "name": "tests",
    "credentials": [{"accessKey": AWS["AWS_ACCESS_KEY_ID"], "secretKey": AWS["AWS_SECRET_ACCESS_KEY"]}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}


class S3Server:
    """SeaweedFS, with a bucket that is made when something is first put into it; it can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.ports = free_ports(8)
        self.endpoint = f"http://127.0.0.1:{self.ports[0]}"
        self.url = f"s3://tests/unfuse?endpoint={self.endpoint}"
        self._filled = False
        (folder / "s3.json").write_text(json.dumps({"identities": [IDENTITY]}))
        self._folder, self._program = folder, program("weed")
        self.start()

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([self._program, *self._arguments()], stdout=log, stderr=log)
        until = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"{self._program} does not start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _arguments(self) -> list[str]:
        names = ("s3", "master", "volume", "filer")
        ports = [f"-{name}.port={port}" for name, port in zip(names, self.ports[:4], strict=True)]
        ports += [f"-{name}.port.grpc={port}" for name, port in zip(names, self.ports[4:], strict=True)]
        own = [f"-dir={self._folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={self._folder}/s3.json"]
        small = ["-master.volumeSizeLimitMB=64", "-volume.max=50", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        small += ["-master.electionTimeout=1s", "-master.heartbeatInterval=200ms"]
        return ["server", "-s3", *own, *ports, *small]

    def _answers(self) -> bool:
        bucket = S3Store("tests", endpoint=self.endpoint, client_options={"allow_http": True})
        try:
            if not self._filled:
                obstore.put(bucket, "hello", b"hello")
            self._filled = True
            return bytes(obstore.get(bucket, "hello").bytes()) == b"hello"
        except (obstore.exceptions.BaseError, FileNotFoundError):
            return False
