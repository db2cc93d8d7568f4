"""Equal requests have equal bytes, and the second one is not made: real workers, after a restart, on a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.disks import fill, small_disk
from tests.integration.test_full_disk import waiting
from tools.server import Server, serving, until


def made(server: Server, **more: Any) -> tuple[dict[str, Any], list[bytes]]:
    request = server.submit("a yellow cross on gray", n=2, num_inference_steps=2, **more)
    ended = server.finished(request)
    assert ended["status"] == "completed", ended
    told = {"id": request, "reused": ended["metadata"].get("reuse_of")}
    return told, [server.result(request, index) for index in range(2)]


@pytest.mark.nightly
def test_equal_request_reuses_results_also_after_restart(tmp_path: Path) -> None:
    """Given a server that was killed and is back with its workers, then it still knows what it made."""
    with serving(tmp_path, "--reuse-results", "--workers", "all=1") as server:
        server.ready()
        first, pictures = made(server, seed=3)
        second, again = made(server, seed=3)
        assert (first["reused"], second["reused"], again) == (None, first["id"], pictures)

        server.killed_and_started_again().ready()
        third, once_more = made(server, seed=3)
        assert (third["reused"], once_more) == (second["id"], pictures)

        alone, anew = made(server, seed=3, cache=False)
        assert (alone["reused"], anew) == (None, pictures)
        assert made(server, seed=4)[1] != pictures


@pytest.mark.nightly
def test_equal_request_is_computed_after_disk_full_prevents_copy(tmp_path: Path) -> None:
    with small_disk(tmp_path, 8192) as disk:
        results = {"UNFUSE_SERVE__RESULTS": f"disk:{disk}"}
        with serving(tmp_path, "--reuse-results", "--workers", "all=1", **results) as server:
            server.ready()
            _, pictures = made(server, seed=3)
            fill(disk)
            request = server.submit("a yellow cross on gray", n=2, num_inference_steps=2, seed=3)
            until(lambda: waiting(server), "a result to wait", server.process)
            (disk / "filler").unlink()
            ended = server.finished(request)
            assert (ended["status"], ended["metadata"]) == ("completed", {})
            assert [server.result(request, index) for index in range(2)] == pictures
            assert not [path for path in disk.rglob(".*") if path.is_file()]
            assert made(server, seed=3)[0]["reused"] == request
