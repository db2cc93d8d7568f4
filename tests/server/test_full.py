"""A gateway whose result store has no room says so, and says nothing of where that is."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path

import httpx2
import pytest
from msgspec.structs import replace

from tests.disks import fill, small_disk
from tests.server.served import MOVING, PICTURES, WORKER, Served, picture, serve, until
from unfuse.core.messages import Heartbeat, Register, StorageLocations, TaskFailed
from unfuse.core.worker_status import WorkerStatus
from unfuse.scheduler.dispatcher import Dispatcher
from unfuse.service import service
from unfuse.testing.queue_samples import lease_request

EDITS, MADE = "/v1/images/edits", "/v1/images/generations"
ASYNC = {"prefer": "respond-async"}


def client(served: Served) -> httpx2.Client:
    return httpx2.Client(base_url=served.url, timeout=30, trust_env=False)


def gauges(http: httpx2.Client) -> dict[str, float]:
    lines = [line.split() for line in http.get("/metrics").text.splitlines() if line.startswith("unfuse_results_")]
    return {name.removeprefix("unfuse_results_"): float(value) for name, value in lines}


@pytest.mark.slow
def test_full_disk_returns_503_for_readiness_and_uploads(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path, 4096) as disk,
        serve(disk, idle=False, cards=(PICTURES, MOVING)) as served,
        client(served) as http,
    ):
        assert http.get("/ready").status_code == 200
        assert gauges(http) == {"writable": 1.0, "waiting": 0.0}
        fill(disk)
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "not_ready")
        assert ready.headers["retry-after"]
        assert "results cannot be stored" in ready.json()["error"]["message"]
        assert gauges(http) == {"writable": 0.0, "waiting": 0.0}
        upload = {"image": ("a.png", io.BytesIO(picture(1)), "image/png")}
        refused = http.post(EDITS, data={"prompt": "a", "model": MOVING.name}, files=upload)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
        assert refused.headers["retry-after"]
        assert not http.get("/v1/requests").json()["data"]
        assert str(disk) not in ready.text + refused.text
        (disk / "filler").unlink()
        assert http.get("/ready").status_code == 200
        assert http.get("/health").status_code == 200


def test_ready_returns_503_while_workers_cannot_write_results(tmp_path: Path) -> None:
    """Given a worker that cannot keep what it made, which the gateway cannot know by itself, then its word counts."""
    with serve(tmp_path, idle=False, works=False) as served, client(served) as http:
        dispatcher = Dispatcher(served.scheduler, [], StorageLocations(""))
        served.run(dispatcher.answer(b"w", Register(replace(WORKER, arena_bytes=4096), (PICTURES,))))
        assert http.get("/ready").status_code == 200
        served.run(dispatcher.answer(b"w", Heartbeat(status=WorkerStatus(waiting_for_results=3))))
        assert http.get("/ready").status_code == 503
        assert gauges(http) == {"writable": 0.0, "waiting": 3.0}
        assert http.get("/v1/workers").json()["data"][0]["unwritten"] == 3
        served.run(dispatcher.answer(b"w", Heartbeat()))
        assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("kind", ["permanent", "transient"])
def test_paths_are_removed_from_worker_error_messages(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a failure whose words and log are full of paths, then no answer and no event holds one."""
    monkeypatch.setattr("unfuse.scheduler.lifecycle.BACKOFF_S", 0.01)
    with serve(tmp_path, idle=False, works=False) as served, client(served) as http:
        served.run(served.queue.register(WORKER, (PICTURES,)))
        id = http.post(MADE, json={"prompt": "a"}, headers=ASYNC).json()["id"]
        said = "[Errno 2] No such file: '/srv/models/wan/vae.bin'; make room under /var/unfuse"
        evidence = 'Traceback\n  File "/opt/venv/lib/x.py", line 3, in run\n/srv/models/wan is gone'
        while http.get(f"/v1/requests/{id}").json()["status"] != "failed":
            for lease in served.run(served.queue.lease(WORKER.id, lease_request(*WORKER.pools), 60.0, wait=5.0)):
                failed = TaskFailed(lease.claim, kind, said, evidence)  # type: ignore[arg-type]
                served.run(served.scheduler.fail(failed, WORKER.id))
        paths = (f"/v1/requests/{id}", "/v1/requests", "/v1/dead", f"/v1/requests/{id}/events")
        answers = "".join(http.get(path).text for path in paths)
        assert "vae.bin" in answers and "line 3" in answers
        assert not [place for place in ("/srv", "/var", "/opt") if place in answers]


def finished(http: httpx2.Client, seed: int) -> str:
    """The id of a picture that is made."""
    asked = http.post(MADE, json={"prompt": "a circle", "seed": seed}, headers=ASYNC).json()["id"]
    until(lambda: http.get(f"/v1/requests/{asked}").json()["status"] == "completed")
    return str(asked)


def test_result_evicted_during_download_is_sent_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given two pictures and a limit that one of them fits, when the older one is being sent, then it goes and comes
    whole all the same; whoever asks for it later is told that it is gone, and the newer one is there."""
    monkeypatch.setattr(service, "BOUND_S", 0.0)
    large = random.Random(0).randbytes(16 << 20)  # more than sockets hold
    with serve(tmp_path, idle=False) as served, client(served) as http:
        old, new = (finished(http, seed) for seed in (1, 2))
        served.results.put(old, 0, "image/png", large)
        os.utime(tmp_path / old / "0", (1, 1))
        with http.stream("GET", f"/v1/requests/{old}/result/0") as answer:
            parts = answer.iter_bytes()
            came = [next(parts)]
            served.run(service._bound(served.queue, served.results, 1 << 20))
            assert not (tmp_path / old).exists(), "it is gone while it is sent"
            came += parts
        assert b"".join(came) == large
        assert (
            http.get(f"/v1/requests/{old}/result/0").status_code == http.get(f"/v1/requests/{old}").status_code == 404
        )
        assert http.get(f"/v1/requests/{new}/result/0").content == picture(2, 64)


@pytest.mark.slow
def test_full_disk_recovers_after_expired_results_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given queue and results on a disk that fills up before the round that forgets them, then results go though the
    queue cannot say so, the next round has it forget them, and pictures are made again."""
    monkeypatch.setattr(service, "FORGET_S", 0.0)
    with (
        small_disk(tmp_path, 8192) as disk,
        serve(disk, idle=False, queue=f"sqlite:{disk}/queue.db") as served,
        client(served) as http,
    ):
        old = [finished(http, seed) for seed in range(3)]
        for request in old:
            served.results.put(request, 0, "image/png", bytes(1 << 20))
        fill(disk)
        assert http.get("/ready").status_code == 503
        served.run(service._forget(served.queue, served.results, 0.0))
        assert [http.get(f"/v1/requests/{request}/result/0").status_code for request in old] == [404] * 3
        until(lambda: http.get("/ready").status_code == 200)
        served.run(service._forget(served.queue, served.results, 0.0))
        assert [http.get(f"/v1/requests/{request}").status_code for request in old] == [404] * 3
        made = finished(http, 9)
        assert http.get(f"/v1/requests/{made}/result/0").content == picture(9, 64)
