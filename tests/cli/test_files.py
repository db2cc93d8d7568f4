"""Files that verbs write and read, and standard input."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

from unfuse.cli import files
from unfuse.cli.files import argument_of, kind_of, lines_of_stdin, names_after, save
from unfuse.cli.terminal import Terminal
from unfuse.client import Result
from unfuse.core.errors import InvalidParameter, PermanentError, UsageError


def video(*contents: bytes) -> Result:
    """A result whose file is written as it came."""
    file = {"content_type": "video/mp4", "url": "/v1/requests/req_1/result/0"}
    return Result({"id": "req_1", "result": [file]}, contents)


class Unreadable(io.RawIOBase):
    """What a folder is as standard input."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        raise IsADirectoryError(21, "Is a directory")


@pytest.mark.parametrize(
    ("name", "next_names"),
    [
        ("out.png", ["out-2.png", "out-3.png"]),
        ("a.b.webp", ["a.b-2.webp", "a.b-3.webp"]),
        ("out-%04d.png", ["out-2-%04d.png", "out-3-%04d.png"]),
        ("%d.png", ["2-%d.png", "3-%d.png"]),
    ],
)
def test_next_free_file_names_keep_the_extension(name: str, next_names: list[str]) -> None:
    assert [str(path) for path in islice(names_after(Path(name)), 3)] == [name, *next_names]


def test_existing_file_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out.mp4").write_bytes(b"mine")
    (tmp_path / "out-2.mp4").mkdir()
    os.symlink("nowhere", tmp_path / "out-3.mp4")
    assert save(video(b"new"), tmp_path / "out.mp4", overwrite=False) == [tmp_path / "out-4.mp4"]
    assert (tmp_path / "out.mp4").read_bytes() == b"mine"
    assert (tmp_path / "out-4.mp4").read_bytes() == b"new"
    assert save(video(b"newer"), tmp_path / "out.mp4", overwrite=True) == [tmp_path / "out.mp4"]
    assert (tmp_path / "out.mp4").read_bytes() == b"newer"


def test_concurrent_saves_write_one_file_each(tmp_path: Path) -> None:
    def one(number: int) -> Path:
        (file,) = save(video(str(number).encode()), tmp_path / "out.mp4", overwrite=False)
        return file

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(40)))
    assert [file.read_bytes() for file in found] == [str(number).encode() for number in range(40)]
    assert len({*found}) == 40 == len(list(tmp_path.iterdir()))


def test_files_of_one_result_share_a_free_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = video(b"a", b"b", b"c")
    monkeypatch.setattr(Result, "files_at", lambda self, path: [path.with_name(path.name % n) for n in range(3)])
    monkeypatch.setattr(Result, "save", lambda self, path: self.files_at(path))
    (tmp_path / "out-1.png").write_bytes(b"mine")
    names = [file.name for file in save(result, tmp_path / "out-%d.png", overwrite=False)]
    assert names == ["out-2-0.png", "out-2-1.png", "out-2-2.png"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out-1.png", *names]


def test_failed_save_on_a_full_disk_leaves_no_empty_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Result, path: Path) -> list[Path]:
        raise PermanentError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(Result, "save", full)
    with pytest.raises(PermanentError, match="No space left"):
        save(video(b"a"), tmp_path / "out.mp4", overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_save_in_a_missing_folder_raises_permanent_error(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match=r"out\.mp4 cannot be written: No such file"):
        save(video(b"a"), tmp_path / "gone" / "out.mp4", overwrite=False)


def test_unwritable_file_is_an_error_only_with_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "out.png").write_bytes(b"mine")
    monkeypatch.setattr(Path, "open", refuse)
    assert kind_of(tmp_path / "out.png") == ("png", False)
    with pytest.raises(InvalidParameter, match="it cannot be written there"):
        kind_of(tmp_path / "out.png", overwrite=True)


Typed = Callable[[bytes], None]


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Replace standard input by these bytes."""

    def have(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return have


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a red circle\n", "a red circle"),
        ("\ufeffein Stern über Köln\r\n".encode(), "ein Stern über Köln"),
        (b"two\nlines\n\n", "two\nlines"),
    ],
)
def test_hyphen_argument_reads_the_text_from_stdin(stdin: Typed, data: bytes, text: str) -> None:
    stdin(data)
    assert argument_of("-", Terminal()) == text
    assert argument_of("--", Terminal()) == "--"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "standard input is empty"),
        (b" \n\t\n", "standard input is empty"),
        (b"caf\xe9", "standard input is not UTF-8 (unexpected end of data at byte 3)"),
        (b"x" * (files.MAX_STDIN + 1), "longer than the 2 MiB"),
    ],
)
def test_invalid_prompt_on_stdin_raises_invalid_parameter(stdin: Typed, data: bytes, said: str) -> None:
    stdin(data)
    with pytest.raises(InvalidParameter) as refused:
        argument_of("-", Terminal())
    assert said in str(refused.value)


def test_unreadable_stdin_raises_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="standard input is closed"):
        argument_of("-", Terminal())
    assert list(lines_of_stdin()) == []
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(Unreadable())))
    with pytest.raises(UsageError, match="standard input cannot be read: Is a directory"):
        argument_of("-", Terminal())
    with pytest.raises(UsageError, match="standard input cannot be read: Is a directory"):
        list(lines_of_stdin())


def test_invalid_stdin_line_yields_an_error_and_later_lines_follow(stdin: Typed) -> None:
    long = b"x" * (files.MAX_STDIN + 10)
    stdin(b"hello\n\ncaf\xe9\r\n" + long + b"\n  bye  ")
    first, second, third, last = lines_of_stdin()
    assert (first, last) == ("hello", "bye")
    assert "line 3 of standard input is not UTF-8" in str(second)
    assert isinstance(third, InvalidParameter) and "longer than the 2 MiB" in str(third)


def test_typed_non_utf8_line_yields_an_error_in_the_c_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a terminal whose locale is C, where bytes that are no text come as surrogates, then that is told too."""
    typed = iter(["hello", "caf\udce9", "bye"])

    def read(asks: str) -> str:
        if (line := next(typed, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("unfuse.cli.files.is_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", read)
    first, second, last = lines_of_stdin()
    assert (first, str(second), last) == ("hello", "that line is not UTF-8: type it again", "bye")
