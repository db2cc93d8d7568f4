"""Fingerprints cover every byte of a file, and are remembered as long as it shows no change."""

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from unfuse.core.errors import ConfigError
from unfuse.weights import fingerprints
from unfuse.weights.fingerprints import FILE, MAX_ENTRIES, PIECE_BYTES, REMEMBERED_FROM, Fingerprints

SIZE = REMEMBERED_FROM + 7


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that is large enough to be remembered, and was not changed lately."""
    path = tmp_path / "weights.safetensors"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were hashed, in their order."""
    calls, hash_file = list[Path](), fingerprints.HASHES["xxh3_128"]

    def counted(path: Path, size: int) -> str:
        calls.append(path)
        return hash_file(path, size)

    monkeypatch.setitem(fingerprints.HASHES, "xxh3_128", counted)
    return calls


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a minute later than it is, so that times of files are not coarse any more."""
    now = time.time()
    monkeypatch.setattr(fingerprints.time, "time", lambda: now + 60)


def test_fingerprint_is_the_hash_of_the_piece_hashes(tmp_path: Path) -> None:
    data = os.urandom(2 * PIECE_BYTES + 5)
    (tmp_path / "file").write_bytes(data)

    pieces = [data[:PIECE_BYTES], data[PIECE_BYTES : 2 * PIECE_BYTES], data[2 * PIECE_BYTES :]]
    expected = xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, pieces)))
    assert Fingerprints().hash_file(tmp_path / "file") == expected


def test_sha256_and_git_blob_hashes_match_those_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")

    assert Fingerprints().hash_file(tmp_path / "file", "sha256") == hashlib.sha256(b"content").hexdigest()
    assert Fingerprints().hash_file(tmp_path / "file", "git") == hashlib.sha1(b"blob 7\0content").hexdigest()


@pytest.mark.usefixtures("later")
def test_fingerprint_cache_is_shared_with_later_processes(file: Path, hashed: list[Path], tmp_path: Path) -> None:
    found = set()
    for _ in range(2):
        process = Fingerprints()
        process.cache_in(tmp_path / "data")
        found |= {process.hash_file(file), process.hash_file(file)}

    assert len(found) == 1
    assert hashed == [file]


@pytest.mark.usefixtures("later")
def test_changed_file_is_rehashed_even_if_its_mtime_was_restored(file: Path, tmp_path: Path) -> None:
    process = Fingerprints()
    process.cache_in(tmp_path)
    before, times = process.hash_file(file), file.stat()

    with file.open("r+b") as stream:
        stream.seek(SIZE // 2)
        stream.write(b"other")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert process.hash_file(file) != before


def test_fingerprint_of_a_recently_modified_file_is_not_cached(file: Path, hashed: list[Path], tmp_path: Path) -> None:
    """Where times are coarse, it may change once more and look the same."""
    process = Fingerprints()
    process.cache_in(tmp_path)

    process.hash_file(file)
    process.hash_file(file)

    assert hashed == [file, file]
    assert not (tmp_path / FILE).exists()


@pytest.mark.usefixtures("later")
def test_file_that_changes_during_hashing_is_rehashed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_file, changes = fingerprints.HASHES["xxh3_128"], [b"first", b"second"]

    def disturbed(path: Path, size: int) -> str:
        digest = hash_file(path, size)
        if changes:
            path.write_bytes(changes.pop(0) * SIZE)
        return digest

    monkeypatch.setitem(fingerprints.HASHES, "xxh3_128", disturbed)

    found = Fingerprints().hash_file(file)
    assert found == hash_file(file, file.stat().st_size)


def test_file_that_keeps_changing_during_hashing_raises_config_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturbed(path: Path, size: int) -> str:
        path.write_bytes(bytes(size + 1))
        return "0" * 32

    monkeypatch.setitem(fingerprints.HASHES, "xxh3_128", disturbed)

    with pytest.raises(ConfigError, match=f"{file} changes while it is read: wait until it is written"):
        Fingerprints().hash_file(file)


def test_missing_weight_file_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights cannot be read"):
        Fingerprints().hash_file(tmp_path / "weights")


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"xxh3_128 1 2 3 4 5": 7}',
        b"[" * 100_000,
        b'{"a": "b"}',
    ],
)
def test_corrupt_fingerprint_cache_file_is_replaced(
    content: bytes, file: Path, hashed: list[Path], tmp_path: Path
) -> None:
    (tmp_path / FILE).write_bytes(content)
    for _ in range(2):
        process = Fingerprints()
        process.cache_in(tmp_path)
        process.hash_file(file)

    assert hashed == [file]
    assert len(json.loads((tmp_path / FILE).read_bytes())) == 1


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("digest", ["", "g" * 32, "0" * 31, 5, None, ["0" * 32]])
def test_corrupt_fingerprint_cache_entry_is_ignored(digest: object, file: Path, tmp_path: Path) -> None:
    process = Fingerprints()
    process.cache_in(tmp_path)
    found = process.hash_file(file)
    (entry,) = json.loads((tmp_path / FILE).read_bytes())

    (tmp_path / FILE).write_text(json.dumps({entry: digest}))

    other = Fingerprints()
    other.cache_in(tmp_path)
    assert other.hash_file(file) == found


@pytest.mark.usefixtures("later")
def test_the_oldest_fingerprints_are_dropped(file: Path, tmp_path: Path) -> None:
    entries = {f"xxh3_128 1 {number} 3 4 5": "0" * 32 for number in range(MAX_ENTRIES)}
    (tmp_path / FILE).write_text(json.dumps(entries))
    process = Fingerprints()
    process.cache_in(tmp_path)

    found = process.hash_file(file)

    kept = json.loads((tmp_path / FILE).read_bytes())
    assert len(kept) == MAX_ENTRIES
    assert [*kept][0] == "xxh3_128 1 1 3 4 5"
    assert [*kept.values()][-1] == found


@pytest.mark.usefixtures("later")
def test_concurrent_cache_writers_lose_no_fingerprints(tmp_path: Path) -> None:
    """Each has a file descriptor of its own for the lock, as processes have."""
    files = [tmp_path / f"file-{number}" for number in range(6)]
    for file in files:
        file.write_bytes(os.urandom(SIZE))

    def fingerprint(file: Path) -> str:
        process = Fingerprints()
        process.cache_in(tmp_path)
        return process.hash_file(file)

    with ThreadPoolExecutor(len(files)) as threads:
        found = [*threads.map(fingerprint, files)]

    assert sorted(json.loads((tmp_path / FILE).read_bytes()).values()) == sorted(found)


@pytest.mark.usefixtures("later")
def test_fingerprints_are_computed_without_a_writable_cache(file: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("no folder")
    process = Fingerprints()
    process.cache_in(tmp_path / "occupied")

    assert process.hash_file(file) == Fingerprints().hash_file(file)
