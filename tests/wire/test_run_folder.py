"""The run folder is one user's alone, or it is not used."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unfuse.core.errors import ConfigError
from unfuse.service.settings import load
from unfuse.wire.run_folder import MAX_PATH, machine_id, open_run_folder


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        yield Path(folder)


def test_run_folder_is_created_with_mode_700_and_reused(place: Path) -> None:
    folder = open_run_folder(place / "inner" / "unfuse")

    assert folder.stat().st_mode & 0o777 == 0o700
    assert open_run_folder(folder) == folder


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o770, 0o777, 0o1777])
def test_run_folder_open_to_others_is_rejected_with_the_chmod_fix(place: Path, mode: int) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(mode)

    with pytest.raises(ConfigError, match=rf"mode {mode:o}.*chmod 700"):
        open_run_folder(place / "open")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_run_folder_of_another_user_is_rejected_with_both_uids(place: Path) -> None:
    (place / "theirs").mkdir(mode=0o700)
    os.chown(place / "theirs", 4321, 4321)

    with pytest.raises(ConfigError, match=rf"belongs to uid 4321.*uid {os.geteuid()}"):
        open_run_folder(place / "theirs")


def test_symlink_or_file_as_run_folder_is_rejected(place: Path) -> None:
    (place / "real").mkdir(mode=0o700)
    (place / "link").symlink_to(place / "real")
    (place / "file").write_text("")

    for path in (place / "link", place / "file"):
        with pytest.raises(ConfigError, match="UNFUSE_RUN_DIR"):
            open_run_folder(path)


def test_run_folder_path_too_long_for_unix_sockets_is_rejected(place: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        open_run_folder(place / ("x" * MAX_PATH))


def test_machine_id_is_the_same_for_concurrent_callers(place: Path) -> None:
    folder = open_run_folder(place / "unfuse")
    with ThreadPoolExecutor(16) as pool:
        ids = set(pool.map(machine_id, [folder] * 64))

    assert len(ids) == 1
    assert [path.name for path in folder.iterdir()] == ["machine"]
    assert machine_id(open_run_folder(place / "other")) not in ids


def test_run_dir_setting_precedes_xdg_runtime_dir_and_temp_folder() -> None:
    home = {"HOME": "/nowhere"}

    assert load(environment=home | {"UNFUSE_RUN_DIR": "/r", "XDG_RUNTIME_DIR": "/x"}).settings.run_dir == "/r"
    assert load(environment=home | {"XDG_RUNTIME_DIR": "/x"}).settings.run_dir == "/x/unfuse"
    assert load(environment=home).settings.run_dir == f"{tempfile.gettempdir()}/unfuse-{os.geteuid()}"
