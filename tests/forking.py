"""Scripts of tests as processes that are forked from one that has imported torch, diffusers and transformers.

These imports take 5 seconds of a core; a forked script begins at once. Isolated scripts can import neither unfuse nor
tests: they say what is right.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SERVER = Path(__file__).with_name("forking_server.py")
LIBRARIES = ["torch", "diffusers:DiffusionPipeline", "diffusers:WanPipeline", "transformers:AutoModelForCausalLM"]
RANKS = [*LIBRARIES, "unfuse.worker.compute", "tests.models.conftest", "tests.parallel.rank"]


class Forking:
    """The process that forks, and what it has told of processes that ended."""

    def __init__(self, isolated: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, *(["-I"] if isolated else []), str(SERVER), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *(LIBRARIES if isolated else RANKS)], pass_fds=[theirs.fileno()], cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | ({} if isolated else PATH),
            )  # fmt: skip
        self._codes: dict[int, int] = {}
        atexit.register(self.close)

    def fork(self, **asked: Any) -> int:
        """Fork a process, and return its process id."""
        self._socket.sendall(json.dumps(asked).encode())
        while "pid" not in (told := self._told(None)):
            pass
        return int(told["pid"])

    def code(self, pid: int, timeout: float | None) -> int | None:
        """The exit code of a process, below 0 the signal that ended it; None if it has not ended in so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while pid not in self._codes:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not self._told(left):
                return None
        return self._codes[pid]

    def close(self) -> None:
        """End it. What it forked goes on."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _told(self, timeout: float | None) -> dict[str, int]:
        self._socket.settimeout(timeout or None)
        try:
            message = self._socket.recv(1024, socket.MSG_DONTWAIT if timeout == 0 else 0)
        except (TimeoutError, BlockingIOError):
            return {}
        told: dict[str, int] = json.loads(message or b"{}")
        assert told, "the process that forks has ended"
        if "code" in told:
            self._codes[told["ended"]] = told["code"]
        return told


PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}


@cache
def forking(isolated: bool) -> Forking:
    """The process that forks scripts of this test process, started when it is first asked for."""
    return Forking(isolated)


class Script:
    """A script that runs, as `subprocess.Popen` shows it. It reads and writes files."""

    def __init__(
        self, script: str, arguments: Sequence[str], *, stdin: Path | None = None, stdout: Path, stderr: Path,
        cwd: Path = ROOT, isolated: bool = False, variables: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._forking = forking(isolated)
        self.pid = self._forking.fork(
            script=script, arguments=[*arguments], cwd=str(cwd), variables={**(variables or {})},
            files=[str(stdin or os.devnull), str(stdout), str(stderr)],
        )  # fmt: skip

    def poll(self) -> int | None:
        return self._forking.code(self.pid, 0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._forking.code(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def isolated(script: Path, *arguments: str, folder: Path, given: str = "") -> str:
    """Run a script that cannot import unfuse, in that folder; returns what it prints. Raises AssertionError."""
    stdin, stdout, stderr = (folder / f"{script.stem}.{name}" for name in ("in", "out", "log"))
    stdin.write_text(given)
    ran = Script(str(script), arguments, stdin=stdin, stdout=stdout, stderr=stderr, cwd=folder, isolated=True)
    assert ran.wait() == 0, stderr.read_text(errors="replace")
    return stdout.read_text()
