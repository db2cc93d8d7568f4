"""`unfuse disk`, and results that are kept within a limit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from unfuse.cli.main import run
from unfuse.core.errors import NotFound, TransientError, UsageError
from unfuse.queues.memory import MemoryQueue
from unfuse.service import service
from unfuse.service.disk import disk_use
from unfuse.service.settings import load
from unfuse.stores.results import DiskResults, open_results
from unfuse.testing import ManualClock
from unfuse.testing.queue_samples import LIMITS, change, request, task


def by_what(settings: dict[str, Any], **environment: str) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in disk_use(load(settings, None, environment).settings)}


def id_of(number: int) -> str:
    return f"req_{number:032x}"


def test_disk_use_counts_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    data, hub = tmp_path / "data", tmp_path / "hub" / "models--a--b"
    results = open_results(f"disk:{data}")
    results.put(id_of(1), 0, "image/png", bytes(1000))
    results.attach(id_of(2), "image", bytes(200))
    open_results(f"disk:{data}/copies").put(id_of(1), 0, "image/png", bytes(50))
    (data / "queue.db").write_bytes(bytes(30))
    (data / "queue.db-wal").write_bytes(bytes(7))
    (data / "costs.json").write_bytes(bytes(5))
    (hub / "blobs").mkdir(parents=True)
    (hub / "blobs" / "x").write_bytes(bytes(9000))
    (hub / "link").symlink_to(hub / "blobs" / "x")
    rows = by_what({"data_dir": str(data), "serve.durable": "disk:DATA_DIR/copies"})
    counted = {what: (row["bytes"], row["files"]) for what, row in rows.items()}
    assert counted == {
        "results": (1200, 2),
        "queue": (37, 2),
        "copies of outputs": (50, 1),
        "other data": (5, 1),
        "models of the hub": (9000, 1),
    }


def test_disk_use_lists_objects_saved_at_shutdown_separately(tmp_path: Path) -> None:
    """Given results on a disk, then what workers save there when they stop is neither results nor other data."""
    open_results(f"disk:{tmp_path}/copies").put(id_of(1), 0, "image/png", bytes(50))
    rows = by_what({"data_dir": str(tmp_path)})
    assert rows["saved by the last stop"]["bytes"] == 50
    assert rows["results"]["bytes"] == rows["other data"]["bytes"] == 0


def test_disk_use_of_remote_stores_is_null_and_hides_passwords(tmp_path: Path) -> None:
    there = {"serve.queue": "redis://user:secret@h/0", "serve.results": "s3://bucket/x", "data_dir": str(tmp_path)}
    rows = by_what(there | {"serve.store": f"spill:shared_memory+disk:{tmp_path}/spill"})
    assert rows["queue"]["bytes"] is None and rows["results"]["bytes"] is None
    assert rows["spilled tensors"]["bytes"] == 0
    assert "secret" not in json.dumps(rows)


def test_disk_command_prints_a_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("UNFUSE_DATA_DIR", str(tmp_path))
    for arguments in (["disk"], ["disk", "--json"]):
        with pytest.raises(SystemExit) as ended:
            run(arguments)
        assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "results" in said and "--retention" in said
    assert {row["what"] for row in json.loads(said[said.index("\n[") :])} >= {"results", "queue", "other data"}


@pytest.mark.parametrize(("said", "seconds"), [("90", 90.0), ("90min", 5400.0), ("24h", 86400.0), ("1.5d", 129600.0)])
def test_retention_accepts_time_units(said: str, seconds: float) -> None:
    assert load({"serve.retention_s": said}, None, {}).settings.serve.retention_s == seconds
    assert load({}, None, {"UNFUSE_SERVE__RETENTION_S": said}).settings.serve.retention_s == seconds


@pytest.mark.parametrize("said", ["soon", "-1h", "0", "3 weeks", "1e999"])
def test_invalid_retention_raises_usage_error(said: str) -> None:
    with pytest.raises(UsageError, match="retention"):
        load({"serve.retention_s": said}, None, {})


async def kept(folder: Path, queue: MemoryQueue, limit: int) -> list[int]:
    """Which results are left once the limit was looked at."""
    results = open_results(f"disk:{folder}")
    await service._bound(queue, results, limit)
    left = []
    for number in range(4):
        try:
            left += [number] if results.path(id_of(number), 0) else []
        except NotFound:
            continue
    return left


async def test_oldest_results_are_evicted_and_open_files_stay_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given four results, the oldest of a request that is not over, then the next oldest go, as many as have to."""
    monkeypatch.setattr(service, "BOUND_S", 0.0)
    queue, results = MemoryQueue(ManualClock()), open_results(f"disk:{tmp_path}")
    assert isinstance(results, DiskResults)
    for number in range(4):
        record = await queue.submit(request(id_of(number)), [task(id_of(number))], [], LIMITS)
        results.put(id_of(number), 0, "image/png", bytes([number]) * 1000)
        os.utime(results.path(id_of(number), 0), (number, number))
        if number:
            await queue.commit(change(record, status="completed", completed_at=float(number)))
    assert await kept(tmp_path, queue, 4000) == [0, 1, 2, 3]
    with results.path(id_of(1), 0).open("rb") as reading:
        assert reading.read(1) == b"\x01"
        assert await kept(tmp_path, queue, 2999) == [0, 3]
        assert len(reading.read()) == 999, "who was reading has all of it"
    with pytest.raises(NotFound):
        await queue.load(id_of(1))
    assert await kept(tmp_path, queue, 1) == [0], "what is not over stays"
    assert (await queue.load(id_of(0))).context.id == id_of(0)
    await queue.close()


async def test_results_are_evicted_even_if_the_queue_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a disk that is full, so that the queue can forget nothing, then results go all the same."""
    monkeypatch.setattr(service, "BOUND_S", 0.0)
    queue, results = MemoryQueue(ManualClock()), open_results(f"disk:{tmp_path}")
    for number in range(4):
        record = await queue.submit(request(id_of(number)), [task(id_of(number))], [], LIMITS)
        results.put(id_of(number), 0, "image/png", bytes(1000))
        await queue.commit(change(record, status="completed", completed_at=float(number)))

    async def full(_: str) -> None:
        raise TransientError("the disk is full")

    monkeypatch.setattr(queue, "drop", full)
    assert await kept(tmp_path, queue, 500) == []
    assert (await queue.load(id_of(0))).context.id == id_of(0)
    await queue.close()
