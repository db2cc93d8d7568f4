"""What other users of a machine can read of a data folder: nothing, whatever the umask is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from unfuse.queues.sqlite import SqliteQueue
from unfuse.scheduler.costs import _write
from unfuse.stores.results import open_results, store_id
from unfuse.weights.fingerprints import add_entry
from unfuse.wire.keys import create_keys_if_missing
from unfuse.worker.batch_invariance import InvarianceResults
from unfuse.worker.batch_sizes import BatchSizesFile


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """The usual umask, by which all users may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def readable(folder: Path) -> dict[str, str]:
    """The permissions of files and folders that other users have some of, by name."""
    modes = {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    return {path.name: oct(mode) for path, mode in modes.items() if mode & 0o077}


def write_queue(data: Path) -> None:
    asyncio.run(SqliteQueue.open(f"sqlite:{data}/queue.db").close())


def write_costs(data: Path) -> None:
    _write(data / "costs.json", b"{}")


def write_invariance_results(data: Path) -> None:
    InvarianceResults(data / "exactness.json").record(("pool",), 2, "aten::addmm")


def write_batch_sizes(data: Path) -> None:
    BatchSizesFile(data / "batch-sizes.json").write(("pool",), {1: 1.0})


def write_fingerprints(data: Path) -> None:
    add_entry(data / "fingerprints.json", dict, "file", "hash")


def write_result(data: Path) -> None:
    store_id(f"disk:{data}")
    open_results(f"disk:{data}/copies").put(f"req_{'0' * 32}", 0, "image/png", b"pixels")


def write_keys(data: Path) -> None:
    create_keys_if_missing(data / "keys")


@pytest.mark.parametrize(
    "write",
    [
        write_queue,
        write_costs,
        write_invariance_results,
        write_batch_sizes,
        write_fingerprints,
        write_result,
        write_keys,
    ],
)
def test_new_files_and_folders_are_for_their_owner_only(tmp_path: Path, write: object) -> None:
    data = tmp_path / "home" / "share" / "unfuse"
    assert callable(write)
    write(data)
    assert any(path.is_file() for path in data.rglob("*"))
    assert readable(tmp_path / "home") == {}


def test_existing_folder_stays_as_it_is_and_rewritten_files_become_private(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    tmp_path.chmod(0o755)
    costs.write_bytes(b"")
    costs.chmod(0o644)
    write_costs(tmp_path)
    assert readable(tmp_path) == {tmp_path.name: "0o755"}
