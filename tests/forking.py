"""Processes that are forked from one that has imported what they import.

The imports of `unfuse serve` take a second of a core, those of torch, diffusers and transformers 5: a forked process
begins at once. Isolated scripts can import neither unfuse nor tests: they say what is right.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).parents[1]
SERVER = Path(__file__).with_name("forking_server.py")

NOTHING = os.open(os.devnull, os.O_RDONLY)

LIBRARIES = ("torch", "diffusers:DiffusionPipeline", "diffusers:WanPipeline", "transformers:AutoModelForCausalLM")
RANKS = (*LIBRARIES, "unfuse.worker.compute", "tests.models.conftest", "tests.parallel.rank")
COMMANDS = ("unfuse.cli.main", "unfuse.cli.serve", "unfuse.service.options", "unfuse.service.service", "uvloop")
"""What the servers that fork import: the one of isolated scripts, that of ranks, and that of `unfuse`."""


class Forking:
    """A process that forks others."""

    def __init__(self, imports: Sequence[str], isolated: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I" if isolated else "-P", str(SERVER), str(theirs.fileno())]
        paths = [] if isolated else [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *imports],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
            )
        self._lock = Lock()
        atexit.register(self.close)

    def fork(
        self,
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        own_session: bool,
        descriptors: Mapping[int, int],
    ) -> tuple[int, int]:
        """Fork a process that has these `descriptors`, by the numbers that it is to have them by.

        Returns its process id, and a descriptor from which its exit code can be read when it has ended.
        """
        asked = json.dumps(
            {
                "command": [*command],
                "cwd": str(cwd),
                "environment": {**environment},
                "own_session": own_session,
                "numbers": [*descriptors],
            }
        ).encode()
        ended, theirs = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [asked], [theirs, *descriptors.values()])
                answer = self._socket.recv(64)
        finally:
            os.close(theirs)
        assert answer, "the process that forks has ended"
        return int(answer), ended

    def close(self) -> None:
        """End it. What it forked goes on."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.kill()
        self._process.wait()


@cache
def forking(imports: Sequence[str], isolated: bool = False) -> Forking:
    """The process that forks those of this test process, started when it is first asked for."""
    return Forking(imports, isolated)


class Forked:
    """A process that was forked, as `subprocess.Popen` shows it. It reads and writes files.

    `command` is `["-m", MODULE, ARGUMENT...]` or `["", SCRIPT, ARGUMENT...]`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int = NOTHING,
        stdout: int,
        stderr: int,
        env: Mapping[str, str],
        cwd: Path = ROOT,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        imports: Sequence[str] = COMMANDS,
        isolated: bool = False,
    ) -> None:
        standard = {0: stdin, 1: stdout, 2: stderr}
        descriptors = standard | {number: number for number in pass_fds}
        server = forking(imports, isolated)
        self.pid, self._ended = server.fork(command, cwd, env, start_new_session, descriptors)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._code(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _code(self, timeout: float | None) -> int | None:
        """The exit code, below 0 the signal that ended it; None if it has not ended in so many seconds."""
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            code = os.read(self._ended, 64)
            assert code, "the process that forks has ended"
            os.close(self._ended)
            self.returncode = int(code)
        return self.returncode


def script(
    script: str,
    arguments: Sequence[str],
    *,
    stdin: Path | None = None,
    stdout: Path,
    stderr: Path,
    cwd: Path = ROOT,
    isolated: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Forked:
    """Start a script, or a module by its name, that finds torch, diffusers and transformers imported."""
    with ExitStack() as opened:
        read = opened.enter_context((stdin or Path(os.devnull)).open("rb"))
        written, errors = (opened.enter_context(file.open("wb")) for file in (stdout, stderr))
        return Forked(
            ["" if script.endswith(".py") else "-m", script, *arguments],
            stdin=read.fileno(),
            stdout=written.fileno(),
            stderr=errors.fileno(),
            cwd=cwd,
            env={**os.environ, **(variables or {})},
            imports=LIBRARIES if isolated else RANKS,
            isolated=isolated,
        )


def isolated(file: Path, *arguments: str, folder: Path, given: str = "") -> str:
    """Run a script that cannot import unfuse, in that folder; returns what it prints. Raises AssertionError."""
    stdin, stdout, stderr = (folder / f"{file.stem}.{name}" for name in ("in", "out", "log"))
    stdin.write_text(given)
    ran = script(str(file), arguments, stdin=stdin, stdout=stdout, stderr=stderr, cwd=folder, isolated=True)
    assert ran.wait() == 0, stderr.read_text(errors="replace")
    return stdout.read_text()
