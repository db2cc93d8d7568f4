"""Ranks that are gone while they load, or when they end; and what they have in memory once."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.test_ranks import compute_of_denoiser, picture, ranks
from tools.server import all_gone, until


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rank", "how"),
    [
        pytest.param(1, signal.SIGKILL, id="second killed"),
        pytest.param(0, signal.SIGKILL, id="first killed"),
        pytest.param(0, signal.SIGSTOP, id="first stopped"),
        pytest.param(1, signal.SIGSTOP, id="second stopped"),
    ],
)
def test_request_completes_when_rank_dies_or_hangs_during_load(rank: int, how: signal.Signals, tmp_path: Path) -> None:
    with ranks(tmp_path, "ulysses:2", "--dtype", "transformer=bfloat16") as server:
        calm = picture(server, 5, num_inference_steps=8)
        before = compute_of_denoiser(server)
        request = server.submit("a red circle on white", seed=5, num_inference_steps=8)
        before[1].kill()

        def loading() -> list[psutil.Process]:
            return [one for one in compute_of_denoiser(server) if one not in before]

        until(lambda: len(loading()) == 2, "all ranks to begin again")
        again = loading()
        os.kill(again[rank].pid, how)
        shown = server.finished(request)
        assert shown["status"] == "completed"
        assert server.result(request) == calm
        until(lambda: all_gone([*before, *again]), "the ranks of before to end")
        last = compute_of_denoiser(server)
        last[rank].suspend()
    until(lambda: all_gone(last), "a rank that is stopped when all end")
    assert not [*Path(tmp_path).rglob(".weights.*")]


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_idle_suspended_rank_is_restarted(rank: int, tmp_path: Path) -> None:
    """Nobody waits for the first one in an exchange then: the others wait to be told what to do."""
    with ranks(tmp_path, "ulysses:2") as server:
        calm = picture(server, 5, num_inference_steps=8)
        before = compute_of_denoiser(server)
        before[rank].suspend()
        assert picture(server, 5, num_inference_steps=8) == calm
        until(lambda: all_gone(before), "the ranks of before to end")


def test_converted_weights_are_shared_in_memory_by_all_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path, "ulysses:2", "--dtype", "transformer=bfloat16") as server:
        assert picture(server, 5, num_inference_steps=4)
        first, second = (shared(process.pid) for process in compute_of_denoiser(server))
    assert first
    assert first.keys() == second.keys()
    assert {own for found in (first, second) for own in found.values()} == {0}


def shared(pid: int) -> dict[int, int]:
    """The files of weights that a process maps, and how much of each it has copied for itself."""
    found: dict[int, int] = {}
    inode = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            inode = int(line.split()[4]) if "memfd:weights" in line else None
        elif inode and line.startswith("Anonymous:"):
            found[inode] = found.get(inode, 0) + int(line.split()[1])
    return found
