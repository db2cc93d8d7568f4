"""Ranks agree: a step that one cannot make is made by none, and who fails amid one ends."""

from __future__ import annotations

import json
import secrets
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.parallel.conftest import begin_ranks, run_ranks

pytestmark = pytest.mark.slow


def said(folder: Path, rank: int) -> list[object]:
    return [json.loads(line) for line in (folder / f"out{rank}").read_text().splitlines()]


def test_step_that_fails_to_start_on_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    codes = run_ranks("failing", 2, tmp_path, ["", "before", "", "memory", "without", "both", ""])

    assert codes == [0, 0], (tmp_path / "log0").read_text()
    fine = "[0.0, 1.0]"
    first, second = said(tmp_path, 0), said(tmp_path, 1)
    assert first == [
        [0, 1],
        fine,
        "RankError: rank 1: ValueError: no such thing",
        fine,
        "RankOutOfMemory: rank 1: OutOfMemoryError: the device is full",
        "nothing exchanged",
        "ValueError: of rank 0",
        fine,
    ]
    assert second[2:5] == ["ValueError: no such thing", fine, "OutOfMemoryError: the device is full"]


def test_device_error_of_a_rank_names_it_on_the_others_and_does_not_exit(tmp_path: Path) -> None:
    codes = run_ranks("failing", 2, tmp_path, ["device before", "", "device amid"])

    assert codes == [1, 1], (tmp_path / "log0").read_text()
    illegal = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert said(tmp_path, 0)[1:3] == [f"RankDeviceError: {illegal}", "[0.0, 1.0]"]
    assert said(tmp_path, 1)[3] == "RuntimeError: CUDA error: unspecified launch failure"
    assert "rank 1 exits" not in (tmp_path / "log1").read_text()


def test_sum_over_ranks_of_a_batch_equals_the_sum_of_each_row(tmp_path: Path) -> None:
    assert run_ranks("failing", 3, tmp_path, ["sum"]) == [0] * 3, (tmp_path / "log0").read_text()
    assert [said(tmp_path, rank)[1] for rank in range(3)] == ["near: True, alone as together: True"] * 3


def test_tiles_axis_spans_the_ranks_of_another_parallelism(tmp_path: Path) -> None:
    assert run_ranks("failing", 2, tmp_path, ["beside"]) == [0, 0], (tmp_path / "log0").read_text()
    assert [said(tmp_path, rank)[1] for rank in range(2)] == ["[0.0, 1.0]"] * 2


def test_failed_start_of_a_sharded_step_on_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    codes = run_ranks("failing", 2, tmp_path, ["lent", "lent before", "lent"])

    assert codes == [0, 0], (tmp_path / "log0").read_text()
    assert said(tmp_path, 0)[1:] == ["[1, 2]", "RankError: rank 1: ValueError: no such thing", "[1, 2]"]


def test_all_ranks_exit_after_one_fails_during_a_step(tmp_path: Path) -> None:
    codes = run_ranks("failing", 2, tmp_path, ["", "amid", ""])

    assert codes == [1, 1]
    assert "rank 1 exits: it failed during a step: ValueError: too late" in (tmp_path / "log1").read_text()
    assert "rank 0 exits: an exchange with other ranks failed" in (tmp_path / "log0").read_text()
    assert said(tmp_path, 0) == [[0, 1], "[0.0, 1.0]"]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("stop", "an exchange with other ranks failed"),
        ("lent stop", "it failed during a step"),
    ],
)
def test_other_ranks_exit_after_the_timeout_if_one_is_stopped(how: str, says: str, tmp_path: Path) -> None:
    first, second = begin_ranks("failing", 2, tmp_path, ["", how])
    try:
        assert first.wait(60) == 1
        assert psutil.Process(second.pid).status() == psutil.STATUS_STOPPED
        assert f"rank 0 exits: {says}" in (tmp_path / "log0").read_text()
    finally:
        second.kill()
        second.wait()


def test_random_bytes_on_rank_ports_do_not_disturb_the_ranks(tmp_path: Path) -> None:
    """Another user of the machine can reach the ports of ranks on loopback, and does not know what is said there."""
    ranks = begin_ranks("failing", 2, tmp_path, ["", *["linger"] * 3, ""])
    met: set[int] = set()
    while any(rank.poll() is None for rank in ranks):
        for rank in ranks:
            met |= {port for port in ports(rank.pid) if nonsense(port)}
        time.sleep(0.05)
    assert [rank.wait() for rank in ranks] == [0, 0], (tmp_path / "log0").read_text()
    assert met
    assert said(tmp_path, 0) == [[0, 1], *["[0.0, 1.0]"] * 5]


def ports(pid: int) -> list[int]:
    try:
        found = psutil.Process(pid).net_connections()
    except psutil.NoSuchProcess:
        return []
    return [one.laddr.port for one in found if one.status == psutil.CONN_LISTEN]


def nonsense(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(secrets.token_bytes(1 << 16))
    except OSError:
        return False
    return True
