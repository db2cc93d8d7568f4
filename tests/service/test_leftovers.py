"""What dead processes left: it is found and removed, and nothing of a living one is."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from unfuse.service import disk
from unfuse.service.disk import PASSING, passing_folder

OLD = 1_000_000_000


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of its own: data, run and temporary folder."""
    for name, variable in (("data", "UNFUSE_DATA_DIR"), ("run", "UNFUSE_RUN_DIR")):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / name))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(disk, "_is_worker_running", lambda: False)
    yield tmp_path


def left(folder: Path, *, locked: bool = False) -> Path:
    """A temporary folder as a process leaves it that is killed."""
    made = folder / "tmp" / f"{PASSING}x{len(list((folder / 'tmp').iterdir()))}"
    made.mkdir()
    (made / disk.LOCK).touch()
    (made / "picture").write_bytes(b"x" * 1000)
    os.utime(made, (OLD, OLD))
    return made


def removed(unfuse: Run, *flags: str) -> dict[str, str]:
    """What `doctor --clean` says it removed: the place, and why."""
    code, out, _ = unfuse("doctor", "--clean", "--json", *flags)
    assert code == 0
    return {row["path"]: row["what"] for row in json.loads(out)["removed"]}


def test_doctor_clean_reports_nothing_to_clean(unfuse: Run, place: Path) -> None:
    assert unfuse("doctor", "--clean")[1] == "nothing to clean: no dead process left anything here\n"


def test_doctor_clean_removes_sockets_without_a_listener(unfuse: Run, place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place / "run" / "dead.sock"))
        dead.listen()
        dead.close()
        living.bind(str(place / "run" / "living.sock"))
        living.listen()
        assert removed(unfuse) == {str(place / "run" / "dead.sock"): "a socket without a listener"}
        assert (place / "run" / "living.sock").exists()


def test_temporary_folders_of_killed_processes_are_removed(unfuse: Run, place: Path) -> None:
    with passing_folder() as mine:
        (mine / "picture").touch()
        os.utime(mine, (OLD, OLD))
        killed, young = left(place), left(place)
        os.utime(young)
        assert removed(unfuse) == {str(killed): "results of a process that was killed"}
        assert mine.exists()
        assert young.exists()
        assert not killed.exists()
    assert not mine.exists()


def test_folders_of_other_users_and_symlinks_are_not_removed(
    unfuse: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = place / "precious"
    target.mkdir()
    (place / "tmp" / f"{PASSING}link").symlink_to(target)
    foreign = left(place)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert removed(unfuse) == {}
    assert target.exists()
    assert foreign.exists()


def test_lock_files_of_deleted_files_are_removed(unfuse: Run, place: Path) -> None:
    data = place / "data"
    for name in ("queue.db", "queue.db.lock", "gone.db.lock", "held.db.lock"):
        (data / name).touch()
    with (data / "held.db.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert removed(unfuse) == {str(data / "gone.db.lock"): "a lock file whose file was deleted"}


def test_old_partially_written_files_are_removed(unfuse: Run, place: Path) -> None:
    folder = place / "data" / f"req_{'0' * 32}"
    folder.mkdir()
    old, new, whole = folder / f".0.{'a' * 16}", folder / f".1.{'b' * 16}", folder / "2"
    met, meets = (place / "run" / f".ranks.{of * 16}" for of in "cd")
    for path in (old, new, whole, met, meets):
        path.write_bytes(b"half")
    for path in (old, whole, met):
        os.utime(path, (OLD, OLD))
    assert removed(unfuse) == dict.fromkeys((str(old), str(met)), "a partially written file")


@pytest.mark.parametrize("store", ["RESULTS", "STORE", "DURABLE"])
def test_store_whose_path_has_a_plus_is_cleaned(
    unfuse: Run, place: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    old = place / "a+b" / f"req_{'0' * 32}" / f".0.{'a' * 16}"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"half")
    os.utime(old, (OLD, OLD))
    monkeypatch.setenv(f"UNFUSE_SERVE__{store}", f"disk:{place}/a+b")
    assert removed(unfuse) == {str(old): "a partially written file"}


@pytest.mark.parametrize("name", ["spill", "a+b"])
def test_spilled_objects_are_removed_if_no_worker_runs(
    unfuse: Run, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spill, object = place / name, place / name / "objects" / "worker" / "req" / "object"
    (spill / "copies").mkdir(parents=True)
    object.parent.mkdir(parents=True)
    object.write_bytes(b"x" * 5000)
    monkeypatch.setenv("UNFUSE_SERVE__STORE", f"spill:shared_memory+disk:{spill}")
    monkeypatch.setattr(disk, "_is_worker_running", lambda: True)
    assert removed(unfuse) == {}
    monkeypatch.setattr(disk, "_is_worker_running", lambda: False)
    text = unfuse("doctor", "--clean")[1]
    assert "4.9 KiB" in text
    assert not object.exists()
    assert (spill / "copies").exists()
