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


def test_a_fingerprint_is_the_hash_of_the_hashes_of_pieces(tmp_path: Path) -> None:
    data = os.urandom(2 * PIECE_BYTES + 5)
    (tmp_path / "file").write_bytes(data)

    pieces = [data[:PIECE_BYTES], data[PIECE_BYTES : 2 * PIECE_BYTES], data[2 * PIECE_BYTES :]]
    expected = xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, pieces)))
    assert Fingerprints().hash_file(tmp_path / "file") == expected


def test_the_hub_s_names_of_contents(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")

    assert Fingerprints().hash_file(tmp_path / "file", "sha256") == hashlib.sha256(b"content").hexdigest()
    assert Fingerprints().hash_file(tmp_path / "file", "git") == hashlib.sha1(b"blob 7\0content").hexdigest()


@pytest.mark.usefixtures("later")
def test_a_file_is_hashed_once_also_by_later_processes(file: Path, hashed: list[Path], tmp_path: Path) -> None:
    found = set()
    for _ in range(2):
        process = Fingerprints()
        process.cache_in(tmp_path / "data")
        found |= {process.hash_file(file), process.hash_file(file)}

    assert len(found) == 1
    assert hashed == [file]


@pytest.mark.usefixtures("later")
def test_a_changed_file_is_hashed_again_even_if_its_time_of_change_was_set_back(file: Path, tmp_path: Path) -> None:
    process = Fingerprints()
    process.cache_in(tmp_path)
    before, times = process.hash_file(file), file.stat()

    with file.open("r+b") as stream:
        stream.seek(SIZE // 2)
        stream.write(b"other")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert process.hash_file(file) != before


def test_a_file_that_was_changed_just_now_is_not_remembered(file: Path, hashed: list[Path], tmp_path: Path) -> None:
    """Where times are coarse, it may change once more and look the same."""
    process = Fingerprints()
    process.cache_in(tmp_path)

    process.hash_file(file)
    process.hash_file(file)

    assert hashed == [file, file]
    assert not (tmp_path / FILE).exists()


@pytest.mark.usefixtures("later")
def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_file, changes = fingerprints.HASHES["xxh3_128"], [b"first", b"second"]

    def disturbed(path: Path, size: int) -> str:
        digest = hash_file(path, size)
        if changes:
            path.write_bytes(changes.pop(0) * SIZE)
        return digest

    monkeypatch.setitem(fingerprints.HASHES, "xxh3_128", disturbed)

    found = Fingerprints().hash_file(file)
    assert found == hash_file(file, file.stat().st_size)


def test_a_file_that_never_stays_the_same_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disturbed(path: Path, size: int) -> str:
        path.write_bytes(bytes(size + 1))
        return "0" * 32

    monkeypatch.setitem(fingerprints.HASHES, "xxh3_128", disturbed)

    with pytest.raises(ConfigError, match=f"{file} changes while it is read: wait until it is written"):
        Fingerprints().hash_file(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
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
def test_a_damaged_file_of_fingerprints_is_replaced(
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
def test_a_damaged_entry_is_passed_over(digest: object, file: Path, tmp_path: Path) -> None:
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
def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
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
def test_where_nothing_can_be_written_fingerprints_are_found_all_the_same(file: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("no folder")
    process = Fingerprints()
    process.cache_in(tmp_path / "occupied")

    assert process.hash_file(file) == Fingerprints().hash_file(file)
