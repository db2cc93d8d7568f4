"""Real servers and workers as a person starts them, and what a test needs to see of them."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError

import psutil

from tools.addresses import address_of_server, free_port
from unfuse.core.compute_options import compute_environment

START_S = 600.0
"""Heavy imports on a loaded machine; nothing is asserted about it."""

RUN_DIR = "UNFUSE_RUN_DIR"


class Process(Protocol):
    """What is needed of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


class SharedForkServer:
    """One fork server for all servers and workers that this process starts, instead of one for each.

    Its imports take 5 seconds of a core. It starts when it is first asked for. Servers and workers are started by
    `start`, which takes what `subprocess.Popen` does: tests fork them too, from a process that has imported them.
    """

    def __init__(self, folder: Path, start: Callable[..., Process]) -> None:
        self.start = start
        self._folder = folder
        self._asks, self._asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def asks(self) -> int:
        """The descriptor by which a server or a worker asks it."""
        if self._process is None:
            command = [sys.executable, "-m", "unfuse.worker.fork_server", str(self._asked.fileno()), "unfuse/shapes"]
            with (self._folder / "fork_server.log").open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[self._asked.fileno()],
                    env=compute_environment(1, environment(self._folder)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        return self._asks.fileno()

    def close(self) -> None:
        """End it; what it forked goes on."""
        self._asks.close()
        self._asked.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


shared_fork_server: SharedForkServer | None = None
"""What tests set, and benches do not."""


def changes_imports(variables: Mapping[str, str]) -> bool:
    """Whether a process with these variables may import something else than the shared fork server did."""
    return any(not name.startswith(("UNFUSE_", "OMP_")) for name in variables)


def starter(variables: Mapping[str, str], own_forks: bool) -> Callable[..., Process]:
    """What starts `unfuse` with these variables, called as `subprocess.Popen` is."""
    beyond = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
    if shared_fork_server is None or own_forks or changes_imports(beyond):
        return subprocess.Popen
    return shared_fork_server.start


def environment(folder: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name == RUN_DIR or not name.startswith("UNFUSE_")}
    return clean | {"UNFUSE_DATA_DIR": str(folder), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def own_run_folder(name: str) -> dict[str, str]:
    """The variable with which a worker meets nobody: its tensors are pulled, and it pulls, as if on another machine."""
    return {RUN_DIR: f"{os.environ[RUN_DIR]}/{name}"}


def unfuse(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "unfuse", *arguments]


def until(condition: Callable[[], Any], what: str, process: Process | None = None) -> Any:
    """Wait for a true value; a process that ends meanwhile, or a long time, is a failure that says what was awaited."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if value := condition():
            return value
        if process and process.poll() is not None:
            raise AssertionError(f"process ended with {process.returncode} while waiting for {what}")
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {START_S:.0f} s")


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all that it started, now, and the compute processes of these, whoever forked them."""
    try:
        root = psutil.Process(pid)
        started = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    computes = computes_of(*(process.pid for process in started))
    return [*started, *(process for process in computes if process not in started)]


def computes_of(*workers: int) -> list[psutil.Process]:
    """The compute processes of the workers with these process ids, whoever started them."""
    names = {f"compute {pid}" for pid in workers}
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] in names]


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


class Server:
    """One `unfuse serve` process on a free port; workers come to its unix socket, or to that host `at` with keys.

    With `own_forks`, or variables that may change imports, it has a fork server of its own, as it comes, also where
    tests share one.
    """

    def __init__(self, folder: Path, *arguments: str, at: str = "", own_forks: bool = False, **variables: str) -> None:
        self.folder = folder
        self._forks = None if own_forks or changes_imports(variables) else shared_fork_server
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.control = f"tcp://{at}:{free_port()}" if at else address_of_server(port)
        self._log = (folder / "serve.log").open("wb")
        command = unfuse("serve", *arguments, "--port", str(port), *(("--listen", self.control) if at else ()))
        self._start = partial(
            self._started, starter(variables, own_forks), command, environment(folder) | variables, self._forks
        )
        self.process = self._start()
        self.workers: list[Process] = []

    def _started(
        self,
        start: Callable[..., Process],
        command: list[str],
        variables: Mapping[str, str],
        forks: SharedForkServer | None,
    ) -> Process:
        """Start `unfuse` by `start`, with that fork server or, without one, as it comes."""
        shared, handed = ([], []) if forks is None else (["--fork-server", str(forks.asks)], [forks.asks])
        return start(
            [*command, *shared],
            pass_fds=handed,
            env=variables,
            stdout=self._log.fileno(),
            stderr=self._log.fileno(),
            start_new_session=True,
        )

    def get(self, path: str) -> Any:
        """The JSON at a path; None while the server does not answer it with 200."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return json.loads(answer.read())
        except OSError:
            return None

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        """The JSON that a POST returns; raises HTTPError for a refusal, whose text is here: no socket is left to it."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            data,
            {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()},
        )
        try:
            with urllib.request.urlopen(request, timeout=START_S) as answer:
                return json.loads(answer.read())
        except HTTPError as error:
            with error:
                text = io.BytesIO(error.read())
            raise HTTPError(error.url, error.code, error.msg, error.headers, text) from None

    def ready(self) -> Server:
        until(lambda: self.get("/ready") is not None, "every pool to have a worker", self.process)
        return self

    def killed_and_started_again(self) -> Server:
        """The same server, at the same addresses, after `kill -9`; what it had started is gone."""
        everyone = family_of(self.process.pid)
        self.process.kill()
        self.process.wait()
        until(lambda: all_gone(everyone), "the server's processes to end")
        self.process = self._start()
        return self

    def worker(
        self,
        role: str,
        *arguments: str,
        within: Callable[[list[str]], list[str]] = list,
        own_forks: bool = False,
        **variables: str,
    ) -> Process:
        """Start a worker by hand, by the command that `within` makes of its own."""
        command = unfuse("worker", "--role", role, "--scheduler", self.control, "--arena", "64MiB", *arguments)
        own_start = own_forks or within is not list
        forks = None if own_start or changes_imports(variables) or "cuda" in " ".join(arguments) else self._forks
        start = starter(variables, own_start)
        worker = self._started(start, within(command), environment(self.folder) | variables, forks)
        self.workers.append(worker)
        return worker

    def killed(self, worker: Process) -> None:
        """`kill -9` a worker that was started by hand, and wait until all of it is gone."""
        everyone = family_of(worker.pid)
        worker.kill()
        worker.wait()
        until(lambda: all_gone(everyone), "a worker's processes to end")

    def submit(self, prompt: str, **parameters: Any) -> str:
        """Queue a picture; returns the request's id."""
        request = self.post("/v1/images/generations", {"prompt": prompt, **parameters}, prefer="respond-async")
        return str(request["id"])

    def events(self, request: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """The event stream of a request, as the server writes it."""
        address = f"{self.url}/v1/requests/{request}/events"
        asked = urllib.request.Request(address, headers={"last-event-id": str(after)})
        with urllib.request.urlopen(asked, timeout=START_S) as stream:
            for line in stream:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])

    def finished(self, request: str) -> dict[str, Any]:
        """The request object once it is over."""
        for _ in self.events(request):
            pass
        found: dict[str, Any] = self.get(f"/v1/requests/{request}")
        return found

    def result(self, request: str, index: int = 0) -> bytes:
        with urllib.request.urlopen(f"{self.url}/v1/requests/{request}/result/{index}", timeout=30) as answer:
            return bytes(answer.read())

    def compute_of(self, request: str, stage: str) -> psutil.Process:
        """The compute process of the worker that has that stage of a request, or had it last."""
        (name,) = (one["worker"] for one in self.get(f"/v1/requests/{request}")["stages"] if one["name"] == stage)
        (pid,) = (worker["pid"] for worker in self.get("/v1/workers")["data"] if worker["id"] == name)
        (compute,) = computes_of(pid)
        return compute

    def log(self) -> str:
        return (self.folder / "serve.log").read_text(errors="replace")

    def close(self) -> None:
        for process in (self.process, *self.workers):
            everyone = family_of(process.pid)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            until(lambda everyone=everyone: all_gone(everyone), "the processes to end")
        self._log.close()


@contextmanager
def serving(folder: Path, *arguments: str, at: str = "", own_forks: bool = False, **variables: str) -> Iterator[Server]:
    server = Server(folder, *arguments, at=at, own_forks=own_forks, **variables)
    try:
        yield server
    except BaseException:
        print(server.log()[-20000:])
        raise
    finally:
        server.close()
