"""Two machines, as docs/guides/two-machines.md has it: its commands are run as they stand there, but for addresses."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netns import ROOT, SecondHost, second_host
from tools.addresses import free_port
from tools.server import Server, all_gone, environment, family_of, until
from tools.snippets import blocks

PAGE = ROOT / "docs" / "guides" / "two-machines.md"
COMMANDS = [line.removeprefix("$ ") for block in blocks(PAGE) for line in block.splitlines()]
PROGRAMS = {
    "unfuse": f'export PYTHONPATH="$BEFORE$PYTHONPATH"; exec {sys.executable} -m unfuse "$@"',
    "ssh": 'shift; cd "$SECOND" && exec "$@"',
    "scp": 'exec cp "$1" "$2" "$SECOND/${3#*:}"',
}
"""What is not installed here, or would leave this machine: the second one's home is a folder of this one's disk."""


class TwoMachines:
    """A machine here and one in namespaces, each with a home of its own, and commands of the page that run on either.

    The second does not see the first one's home, unless they share it.
    """

    def __init__(self, folder: Path, host: SecondHost, shared: bool) -> None:
        self.homes, self.host = [folder / "first", folder / "second"], host
        self.log = folder / "log"
        self._programs = folder / "bin"
        for made in (*self.homes, self._programs):
            made.mkdir()
        for name, line in PROGRAMS.items():
            (self._programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (self._programs / name).chmod(0o755)
        if not shared:
            host.hide(self.homes[0])
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._variables = {
            "UNFUSE_SERVE__PORT": str(port),
            "UNFUSE_SERVER": self.url,
            "UNFUSE_ARENA__BYTES": "64MiB",
        }

    def command(self, beginning: str) -> str:
        """The first command of the page that begins so, with this machine's addresses."""
        found = next(one for one in COMMANDS if one.startswith(beginning))
        return found.replace("10.0.0.1", self.host.near).replace("10.0.0.2", self.host.far)

    def start(self, number: int, beginning: str, stdout: int = 0, **variables: str) -> subprocess.Popen[bytes]:
        """Run a command of the page on the first machine (0) or the second (1)."""
        home = self.homes[number]
        own = environment(home) | self._variables | variables
        del own["UNFUSE_DATA_DIR"]
        own |= {
            "HOME": str(home),
            "SECOND": str(self.homes[1]),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{self._programs}:{os.environ['PATH']}",
        }
        command = ["sh", "-c", f"exec {self.command(beginning)}"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.host.enter(command) if number else command,
                env=own,
                stdout=stdout or log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, number: int, beginning: str, **variables: str) -> str:
        """What a command prints that ends by itself, and well."""
        process = self.start(number, beginning, subprocess.PIPE, **variables)
        printed, _ = process.communicate()
        assert process.returncode == 0, printed.decode() + self.log.read_text()
        return printed.decode()

    def nodes(self) -> dict[str, set[str]]:
        """The roles of healthy workers, by node."""
        found: dict[str, set[str]] = {}
        for worker in (self.get("/v1/workers") or {"data": []})["data"]:
            if worker["healthy"]:
                found.setdefault(worker["node"], set()).add(worker["role"])
        return found

    get = Server.get
    post = Server.post
    submit = Server.submit
    result = Server.result
    events = Server.events
    finished = Server.finished


def ended(process: subprocess.Popen[bytes], sent: signal.Signals = signal.SIGTERM) -> int:
    everyone = family_of(process.pid)
    process.send_signal(sent)
    if sent == signal.SIGKILL:  # the machine is gone: nobody of it has a last word
        for one in everyone:
            one.kill()
    code = process.wait(600)
    until(lambda: all_gone(everyone), "the processes to end")
    return code


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoMachines]:
    with second_host() as host:
        yield TwoMachines(tmp_path, host, shared=getattr(request, "param", False))


def of_node(machines: TwoMachines, view: dict[str, Any]) -> set[str]:
    """The nodes whose workers ran a request."""
    nodes = {worker["id"]: worker["node"] for worker in machines.get("/v1/workers")["data"]}
    return {nodes[stage["worker"]] for stage in view["stages"]}


@pytest.mark.nightly
def test_documented_two_machine_setup_survives_loss_of_a_machine(machines: TwoMachines) -> None:
    """Given two machines that share no disk, when the page is followed, then both serve; when the second one dies amid
    requests none is lost; and the same command brings it back."""
    first = machines.start(0, "unfuse serve")
    second = None
    try:
        until(lambda: machines.get("/ready"), "the first machine", first)
        (own,) = machines.nodes()
        machines.run(0, "ssh")
        machines.run(0, "scp")
        told = machines.run(1, "unfuse doctor")
        assert re.findall(r"^(\w+) +(\w+)", told, re.MULTILINE) == [
            (what, "ok") for what in ("port", "key", "version", "clock", "models", "results")
        ]
        assert (
            "stages of the roles encoder, denoiser can run here, the others need workers on the scheduler's machine"
            in told
        )

        second = machines.start(1, "unfuse worker --")
        until(lambda: len(machines.nodes()) == 2, "the second machine", second)
        assert {role for node, roles in machines.nodes().items() if node != own for role in roles} == {
            "encoder+denoiser"
        }
        table = machines.run(0, "unfuse workers")
        assert re.search(r"^\d healthy workers on 2 machines$", table, re.MULTILINE)

        asked = [machines.submit("a red circle on white", seed=seed) for seed in range(12)]
        seen = [of_node(machines, machines.finished(request)) for request in asked]
        assert any(len(nodes) == 2 for nodes in seen), "the second machine was given nothing"
        results = [machines.result(request) for request in asked]
        assert len({hashlib.sha256(result).digest() for result in results if result.startswith(b"\x89PNG")}) == 12

        asked = [machines.submit("a green ring on gray", seed=seed, num_inference_steps=50) for seed in range(6)]
        ended(second, signal.SIGKILL)
        assert {machines.finished(request)["status"] for request in asked} == {"completed"}
        until(lambda: {*machines.nodes()} == {own}, "the second machine to be missed")

        second = machines.start(1, "unfuse worker --")
        until(lambda: len(machines.nodes()) == 2, "the second machine to be back", second)
        assert ended(second) == 0
        assert "of this machine work for tcp://" in machines.log.read_text()
    finally:
        for process in filter(None, (second, first)):
            if process.poll() is None:
                ended(process)
    assert first.returncode == 0


@pytest.mark.nightly
@pytest.mark.parametrize("machines", [True], indirect=True)
def test_machine_with_shared_results_runs_all_stages_and_restarts_worker(
    machines: TwoMachines,
) -> None:
    """Given a shared folder, when the second machine comes first and the scheduler after it, then its workers have all
    stages once it answers, serve alone, and one that is killed comes back."""
    first = machines.start(0, "unfuse serve", UNFUSE_SERVE__WORKERS="none")
    second = None
    try:
        until(lambda: machines.get("/health"), "the first machine", first)
        machines.run(0, "ssh")
        machines.run(0, "scp")
        second = machines.start(1, "unfuse worker --")
        until(lambda: machines.get("/ready"), "the second machine", second)
        assert list(machines.nodes().values()) == [{"all"}]
        assert machines.finished(machines.submit("a red circle on white"))["status"] == "completed"

        pids = {worker["pid"] for worker in machines.get("/v1/workers")["data"]}
        os.kill(min(pids), signal.SIGKILL)
        until(lambda: {w["pid"] for w in machines.get("/v1/workers")["data"] if w["healthy"]} - pids, "a new worker")
        assert machines.finished(machines.submit("a red circle on white"))["status"] == "completed"
    finally:
        for process in filter(None, (second, first)):
            ended(process)


AHEAD = """
import time
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + 172_800, lambda: now_ns() + 172_800 * 10**9
"""


@pytest.mark.nightly
def test_doctor_reports_clock_skew_and_skewed_machine_still_serves(machines: TwoMachines) -> None:
    """Given such a second machine, then `doctor` says so, and requests with a timeout are completed by it in time."""
    (machines.homes[1] / "sitecustomize.py").write_text(AHEAD)
    ahead = {"BEFORE": f"{machines.homes[1]}:"}
    first = machines.start(0, "unfuse serve", UNFUSE_SERVE__WORKERS="decoder=1")
    second = None
    try:
        until(lambda: machines.get("/health"), "the first machine", first)
        machines.run(0, "ssh")
        machines.run(0, "scp")
        told = machines.start(1, "unfuse doctor", subprocess.PIPE, **ahead)
        said = told.communicate()[0].decode()
        assert told.returncode == 1 and re.search(
            r"^clock +FAILS +the clock here is 17\d{4} s ahead", said, re.MULTILINE
        )
        second = machines.start(1, "unfuse worker --", **ahead)
        until(lambda: machines.get("/ready"), "the second machine", second)
        asked = [machines.submit("a red circle on white", seed=seed, timeout=3600) for seed in range(4)]
        shown = [machines.finished(request) for request in asked]
        assert {one["status"] for one in shown} == {"completed"}
        assert all(0 < one["completed_at"] - one["created_at"] < 3600 for one in shown)
        assert all(stage["queued_s"] < 3600 for one in shown for stage in one["stages"])
    finally:
        for process in filter(None, (second, first)):
            ended(process)
