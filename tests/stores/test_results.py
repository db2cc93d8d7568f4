"""Results on disk: whole or not at all, found by request and index only."""

import errno
import gc
import hashlib
import os
import secrets
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.disks import fill, small_disk
from tests.stores.servers import S3Server
from tools.redis_server import RedisServer
from unfuse.core.errors import ConfigError, NotFound, ResultsUnavailable, TransientError
from unfuse.core.modalities import VIDEO
from unfuse.core.request import new_request_id
from unfuse.stores.results import REQUEST_ID, ResultStore, is_same_store, open_results, store_id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "results"


@pytest.fixture
def results(folder: Path) -> ResultStore:
    return open_results(f"disk:{folder}")


@pytest.fixture(
    params=["disk", pytest.param("redis", marks=pytest.mark.slow), pytest.param("s3", marks=pytest.mark.slow)]
)
def place(request: pytest.FixtureRequest, folder: Path) -> str:
    """A place that is empty."""
    if request.param == "disk":
        return f"disk:{folder}"
    if request.param == "redis":
        redis: RedisServer = request.getfixturevalue("redis_server")
        return f"{redis.url}?prefix=results-{secrets.token_hex(4)}"
    server: S3Server = request.getfixturevalue("s3_server")
    return server.url.replace("/unfuse", f"/results-{secrets.token_hex(4)}")


@pytest.fixture
def kept(place: str) -> ResultStore:
    """The result store at every kind of place."""
    return open_results(place)


def test_result_is_returned_by_request_and_index(kept: ResultStore) -> None:
    request = new_request_id()
    file = kept.put(request, 1, "image/png", b"picture")
    assert (file.index, file.content_type, file.bytes) == (1, "image/png", 7)
    assert file.sha256 == hashlib.sha256(b"picture").hexdigest()
    assert kept.read(request, 1) == kept.path(request, 1).read_bytes() == b"picture"


def test_later_attempt_replaces_the_result(kept: ResultStore) -> None:
    request = new_request_id()
    for data in (b"first", b"second"):
        kept.put(request, 0, "image/png", data)
        assert kept.path(request, 0).read_bytes() == data
    assert kept.read(request, 0) == b"second"
    assert os.listdir(kept.path(request, 0).parent) == ["0"]


def test_result_files_are_readable_only_by_their_user(results: ResultStore, folder: Path) -> None:
    request = new_request_id(VIDEO)
    results.put(request, 0, "video/mp4", b"x")
    file = results.path(request, 0)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, file.parent, file)]
    assert modes == [0o700, 0o700, 0o600]


def test_reopened_result_store_has_earlier_results(kept: ResultStore, place: str) -> None:
    request = new_request_id()
    kept.put(request, 0, "image/png", b"x")
    assert open_results(place).read(request, 0) == b"x"


def test_missing_results_raise_not_found(kept: ResultStore) -> None:
    request = new_request_id()
    kept.put(request, 0, "image/png", b"x")
    for missing, index in ((request, 1), (new_request_id(), 0)):
        with pytest.raises(NotFound, match=missing):
            kept.read(missing, index)
        with pytest.raises(NotFound, match=missing):
            kept.path(missing, index)


@pytest.mark.parametrize(
    "request_id",
    [
        "",
        "..",
        "../x",
        "req_",
        "req_" + "a" * 31,
        "req_" + "a" * 33,
        "req_" + "A" * 32,
        "req_" + "a" * 32 + "\n",
        "req_" + "a" * 32 + "/..",
        "/etc",
        "video_" + "g" * 32,
        "x" * 10_000,
    ],
)
def test_invalid_request_ids_raise_not_found_and_touch_no_files(
    results: ResultStore, folder: Path, request_id: str
) -> None:
    for attempt in (
        lambda: results.put(request_id, 0, "image/png", b"x"),
        lambda: results.path(request_id, 0),
        lambda: results.read(request_id, 0),
        lambda: results.delete(request_id),
    ):
        with pytest.raises(NotFound, match="is not a request ID"):
            attempt()
    assert os.listdir(folder) == []


@given(st.text())
def test_request_id_pattern_matches_only_generated_ids(text: str) -> None:
    assert not REQUEST_ID.fullmatch(text) or text.startswith(("req_", "video_"))


def test_delete_is_idempotent_and_does_not_affect_other_requests(kept: ResultStore) -> None:
    mine, other = new_request_id(), new_request_id()
    for request in (mine, other):
        kept.put(request, 0, "image/png", b"x")
    kept.delete(mine)
    kept.delete(mine)
    with pytest.raises(NotFound):
        kept.path(mine, 0)
    assert kept.read(other, 0) == b"x"


def test_forget_deletes_expired_results_and_returns_their_ids(results: ResultStore, folder: Path) -> None:
    old, new = new_request_id(), new_request_id()
    for request, age in ((old, 1000), (new, 3000)):
        results.put(request, 0, "image/png", b"x")
        os.utime(folder / request / "0", (age, age))
    (folder / "notes of somebody").mkdir()
    os.utime(folder / "notes of somebody", (0, 0))
    assert results.forget(2000) == [old]
    assert results.forget(2000) == []
    assert sorted(os.listdir(folder)) == sorted([new, "notes of somebody"])


def test_forget_uses_the_time_of_the_last_result_in_all_stores(kept: ResultStore) -> None:
    first, second = new_request_id(), new_request_id()
    for request in (first, second):
        kept.put(request, 0, "image/png", b"x")
        kept.attach(request, "image", b"upload")
    assert kept.forget(0.0) == []
    assert sorted(kept.forget(time.time() + 3600)) == sorted([first, second])
    assert kept.forget(time.time() + 3600) == []
    with pytest.raises(NotFound):
        kept.read(first, 0)


def test_local_cache_of_s3_results_expires_after_an_hour(s3_server: S3Server) -> None:
    results = open_results(s3_server.url)
    old, new = new_request_id(), new_request_id()
    for request in (old, new):
        results.put(request, 0, "video/mp4", b"film")
    path = results.path(old, 0)
    long_ago = time.time() - 4000
    os.utime(path, (long_ago, long_ago))
    results.path(new, 0)
    assert not path.exists()
    assert results.path(old, 0).read_bytes() == b"film"
    del results
    gc.collect()
    assert not path.parent.parent.exists()


def test_unreachable_s3_raises_transient_error_until_the_server_is_back(s3_server: S3Server) -> None:
    results, request = open_results(s3_server.url), new_request_id()
    results.put(request, 0, "image/png", b"picture")
    s3_server.kill()
    for attempt in (
        lambda: results.put(request, 1, "image/png", b"x"),
        lambda: results.read(request, 0),
        lambda: results.path(request, 0),
        lambda: results.delete(request),
        lambda: results.forget(0.0),
    ):
        with pytest.raises(TransientError):
            attempt()
    s3_server.start()
    assert results.read(request, 0) == b"picture"


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_failed_write_raises_results_unavailable_and_old_result_remains(
    results: ResultStore, folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    request = new_request_id()
    results.put(request, 0, "image/png", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if broken == "fsync" else (Path, "replace")), full)
        with pytest.raises(ResultsUnavailable) as caught:
            results.put(request, 0, "image/png", b"new")
        assert "(3 bytes) cannot be written: No space left on device; check the folder" in str(caught.value.__cause__)
    assert os.listdir(folder / request) == ["0"] and results.read(request, 0) == b"old"
    results.put(request, 0, "image/png", b"new")
    assert results.read(request, 0) == b"new"


@pytest.mark.slow
def test_file_size_limit_raises_transient_error_and_leaves_no_file(folder: Path) -> None:
    script = """
import os, resource, sys
from unfuse.core.errors import TransientError
from unfuse.stores.results import open_results
results, request = open_results(sys.argv[1]), "req_" + "a" * 32
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    results.put(request, 0, "video/mp4", bytes(200_000))
except TransientError as error:
    told = f"{error.__cause__} {os.listdir(sys.argv[2] + '/' + request)}"
try:
    results.check()
except TransientError:
    sys.exit(told)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", script, f"disk:{folder}", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert "File too large; check the folder" in done.stderr and done.stderr.strip().endswith("[]")


def test_put_fsyncs_the_file_and_its_folder_before_returning(
    results: ResultStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, synced, fsync = new_request_id(), [], os.fsync
    results.put(request, 0, "image/png", b"x")

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    results.put(request, 1, "image/png", b"y")
    temporary, parent = synced
    assert Path(temporary).parent == Path(parent) == folder / request


@pytest.mark.parametrize("url", ["", "disk:", "s3:bucket", "redis://host/name", "nonsense:x", "/plain/path"])
def test_invalid_result_store_url_raises_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="use disk:PATH|use s3://BUCKET/PREFIX|the Redis URL is not valid"):
        open_results(url)


def test_result_folder_that_cannot_be_created_raises_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another folder"):
        open_results(f"disk:{tmp_path}/file/results")


def test_attachments_are_readable_until_detached_and_results_remain(kept: ResultStore) -> None:
    store, request = kept, new_request_id()
    store.put(request, 0, "image/png", b"picture")
    store.attach(request, "image", b"upload")
    store.attach(request, "preview-denoise.0-3", b"sketch")
    assert store.attached(request, "image") == b"upload"
    assert store.attached(request, "preview-denoise.0-3") == b"sketch"

    store.detach(request)
    store.detach(request)

    for name in ("image", "preview-denoise.0-3"):
        with pytest.raises(NotFound, match=name):
            store.attached(request, name)
    assert store.read(request, 0) == b"picture"


@pytest.mark.parametrize("name", ["", "../0", "a/b", "A", "x" * 81])
def test_attachment_with_invalid_name_is_not_stored(tmp_path: Path, name: str) -> None:
    store = open_results(f"disk:{tmp_path}")
    with pytest.raises(NotFound):
        store.attach(new_request_id(), name, b"")
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.slow
def test_full_disk_error_hides_the_path_and_leaves_no_partial_result(tmp_path: Path) -> None:
    """Given a disk that fills up while a result is written, then nothing of it is there, what was is, and with room
    again the same call succeeds."""
    with small_disk(tmp_path, 2048) as disk:
        results, request = open_results(f"disk:{disk}"), new_request_id()
        results.check()
        results.put(request, 0, "image/png", b"first")
        fill(disk)
        with (disk / "filler").open("r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) - 8192)
        for call in (
            results.check,
            lambda: results.put(request, 1, "image/png", bytes(100_000)),
            lambda: results.attach(request, "image", bytes(100_000)),
        ):
            with pytest.raises(ResultsUnavailable) as caught:
                call()
            assert str(disk) not in str(caught.value)
        assert [path.name for path in disk.rglob("*") if path.is_file()] == ["filler", "0"]
        assert results.read(request, 0) == b"first"
        (disk / "filler").unlink()
        results.check()
        assert results.put(request, 1, "image/png", bytes(100_000)).bytes == 100_000


def test_result_folder_is_identified_by_its_store_id(folder: Path) -> None:
    mark = store_id(f"disk:{folder}?fsync=no")
    assert len(mark) == 32 and store_id(f"disk:{folder}") == mark
    assert (
        is_same_store(f"disk:{folder}", mark)
        and is_same_store(f"disk:{folder}", "")
        and is_same_store("s3://bucket/results", "")
    )
    assert not is_same_store(f"disk:{folder}-of-another-machine", mark)
    assert store_id("s3://bucket/results") == ""
    assert open_results(f"disk:{folder}", mark).stored_requests() == {}


def test_mismatched_store_id_raises_results_unavailable(folder: Path) -> None:
    request = new_request_id()
    results = open_results(f"disk:{folder}", "a mark")
    for call in (
        lambda: results.put(request, 0, "image/png", b"picture"),
        lambda: results.attach(request, "preview-denoise-1", b"preview", durable=False),
        lambda: results.attached(request, "image"),
    ):
        with pytest.raises(ResultsUnavailable):
            call()
    results.detach(request)
    results.delete(request)
    assert results.stored_requests() == {} and not folder.exists()


def test_store_without_store_id_matches_any_machine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert store_id(f"disk:{tmp_path / 'file'}") == ""
    assert is_same_store(f"disk:{tmp_path / 'file'}", "")


@pytest.mark.slow
def test_store_id_is_empty_on_a_full_disk_instead_of_an_error(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64) as disk:
        fill(disk)
        assert store_id(f"disk:{disk}") == ""
        (disk / "filler").unlink()
        assert len(store_id(f"disk:{disk}")) == 32
