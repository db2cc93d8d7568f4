"""Compute processes of one `serve` are forked from one process, and none needs it once it runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.test_restarts import SLOW, installed
from tools.server import Server, all_gone, computes_of, family_of, serving, until


def forking(server: Server) -> list[psutil.Process]:
    """The processes that fork, and those that they forked."""
    family = family_of(server.process.pid)
    return [process for process in family if "unfuse.worker.fork_server" in process.cmdline()]


def computes(server: Server) -> list[psutil.Process]:
    found = computes_of(*(worker["pid"] for worker in server.get("/v1/workers")["data"]))
    return sorted(found, key=lambda process: process.pid)


def made(server: Server, seed: int) -> bytes:
    request = server.submit(SLOW, seed=seed, num_inference_steps=4)
    assert server.finished(request)["status"] == "completed"
    return server.result(request)


def test_compute_processes_survive_a_fork_server_crash(tmp_path: Path) -> None:
    model, variables = installed(tmp_path)
    with serving(tmp_path, model, "--arena", "16MiB", own_forks=True, **variables) as server:
        server.ready()
        until(lambda: len(server.get("/v1/workers")["data"]) == 2, "both workers", server.process)
        first = made(server, 1)
        (forks,) = {process.ppid() for process in computes(server)}
        assert [process.pid for process in forking(server) if process.ppid() == server.process.pid] == [forks]

        request = server.submit(SLOW, seed=2, num_inference_steps=60)
        for event in server.events(request):
            if event["type"] == "progress":
                os.kill(forks, signal.SIGKILL)
                break
        before = computes(server)
        assert server.finished(request)["attempts"] == 1
        assert computes(server) == before

        for compute in before:
            compute.kill()  # those of the first fork server, by whoever forks now, or by themselves
        until(
            lambda: len(set(computes(server)) - set(before)) == len(before),
            "compute to be started again",
            server.process,
        )
        assert made(server, 1) == first

        everyone = {*family_of(server.process.pid), *computes(server)}
        server.process.kill()
        server.process.wait()
        until(lambda: all_gone([*everyone]), "every process to end")


@pytest.mark.parametrize("ending", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_compute_processes_exit_with_serve_after_a_fork_server_crash(ending: signal.Signals, tmp_path: Path) -> None:
    model, variables = installed(tmp_path)
    with serving(tmp_path, model, "--arena", "16MiB", own_forks=True, **variables) as server:
        server.ready()
        everyone = {*family_of(server.process.pid), *computes(server)}
        os.kill(computes(server)[0].ppid(), signal.SIGKILL)
        server.process.send_signal(ending)
        server.process.wait()
        until(lambda: all_gone([*everyone]), "every process to end")


@pytest.mark.nightly
def test_shared_fork_server_survives_the_crash_of_one_server(server: Server, tmp_path: Path) -> None:
    """Given two servers that inherited one fork server, when one of them is killed, then it takes its own compute
    processes along, and those of the other have new ones from the same fork server."""
    with serving(tmp_path, "--workers", "all=1", "--arena", "64MiB") as other:
        other.ready()
        (shared,) = {process.ppid() for process in (*computes(server), *computes(other))}
        for one in (server, other):
            started = psutil.Process(one.process.pid).children(recursive=True)
            assert started and shared not in {process.pid for process in started}

        everyone = family_of(other.process.pid)
        other.process.kill()
        other.process.wait()
        until(lambda: all_gone(everyone), "every process to end")

        before = computes(server)
        for compute in before:
            compute.kill()
        until(lambda: len(set(computes(server)) - set(before)) == len(before), "new ones", server.process)
        assert {process.ppid() for process in computes(server)} == {shared}
