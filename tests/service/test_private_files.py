"""What other users of a machine can read of a data folder: nothing, whatever the umask is."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.server.composed import composed
from unfuse.queues.sqlite import SqliteQueue
from unfuse.scheduler.costs import _write
from unfuse.service import private_files
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


def warnings_of(data: Path, **serve: object) -> list[str]:
    """What a server with this data folder logs at its start about permissions."""
    with capture_logs() as logs, composed(data, **serve):
        pass
    return [line["do"] for line in logs if line["event"] == "other users of this machine can read private files"]


def test_start_names_each_path_that_others_can_read_and_the_command_for_it(tmp_path: Path) -> None:
    data, results, queue = tmp_path / "data of unfuse", tmp_path / "results", tmp_path / "queues" / "queue.db"
    data.mkdir(0o700)
    assert warnings_of(data, queue=f"sqlite:{queue}", results=f"disk:{results}") == []

    for folder in (data, results, queue.parent):
        folder.chmod(0o750)
    (data / "costs.json").touch(0o644)
    queue.chmod(0o640)
    (warning,) = warnings_of(data, queue=f"sqlite:{queue}", results=f"disk:{results}")
    assert warning == f"chmod 700 '{data}' && chmod 600 {queue} && chmod 700 {results}"

    for _, mode, path in map(shlex.split, warning.split(" && ")):
        Path(path).chmod(int(mode, 8))
    assert warnings_of(data, queue=f"sqlite:{queue}", results=f"disk:{results}") == []


def test_file_in_a_private_folder_needs_no_command(tmp_path: Path) -> None:
    queue = tmp_path / "queues" / "queue.db"
    assert warnings_of(tmp_path / "data", queue=f"sqlite:{queue}") == []
    queue.chmod(0o644)
    assert warnings_of(tmp_path / "data", queue=f"sqlite:{queue}") == []


def test_path_of_another_user_is_left_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(private_files.os, "geteuid", lambda: os.getuid() + 1)
    with capture_logs() as logs:
        private_files.warn_of_wide_permissions(str(tmp_path))
    assert logs == []
