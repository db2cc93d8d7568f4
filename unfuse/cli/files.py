"""Files that a verb reads, names of those that it writes, and standard input."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfuse.core.errors import InvalidParameter, PermanentError, UsageError

if TYPE_CHECKING:
    from unfuse.cli.terminal import Terminal
    from unfuse.client import Result

FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".mp4": "mp4"}

STDIN = "-"
"""The argument that stands for standard input."""

MAX_STDIN = 2 << 20
"""The most bytes that are read of standard input at one time: no server reads a longer prompt."""


def kind_of(output: Path, overwrite: bool = False) -> tuple[str, bool]:
    """The format by a file's name, and whether it is one of a video. Raises InvalidParameter.

    The folder must be writable, and with `overwrite` also a file of that name.
    """
    from unfuse.client.result import NUMBERED

    if output.is_dir():
        raise InvalidParameter(f"-o {output} is a folder: name a file in it, such as {output / 'out.png'}", "output")
    form, numbered = FORMATS.get(output.suffix.lower()), NUMBERED.search(output.name) is not None
    if form is None or (numbered and form != "png"):
        raise InvalidParameter(f"-o {output}: the name must end in one of {', '.join(FORMATS)}", "output")
    if not output.parent.is_dir():
        raise InvalidParameter(f"-o {output}: there is no folder {output.parent}", "output")
    try:
        with output.open("ab") if overwrite and output.exists() else tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise InvalidParameter(f"-o {output}: it cannot be written there ({error.strerror})", "output") from error
    return form, form == "mp4" or numbered


def save(result: Result, output: Path, overwrite: bool) -> list[Path]:
    """Write the files of a result under this name, or under the next one of which no file is there yet.

    With `overwrite`, files that are there are replaced. Raises PermanentError when a file cannot be written.
    """
    if overwrite or not result.data:
        return result.save(output) if result.data else []
    output = next(name for name in names_after(output) if _create(result.files_at(name)))
    try:
        return result.save(output)
    except BaseException:
        _remove_empty(result.files_at(output))
        raise


def names_after(output: Path) -> Iterator[Path]:
    """Yield `output`, then the names to use where a file is there: NAME-2.png, NAME-3.png, …, or NAME-2-%04d.png."""
    from unfuse.client.result import NUMBERED

    yield output
    found = NUMBERED.search(output.name)
    for number in count(2):
        if found:
            yield output.with_name(f"{output.name[: found.start()]}{number}-{output.name[found.start() :]}")
        else:
            yield output.with_stem(f"{output.stem}-{number}")


def _create(files: Sequence[Path]) -> bool:
    """Create these files, empty, so that no other process gets their names; none if one of them is there."""
    created = []
    try:
        for file in files:
            file.open("xb").close()
            created.append(file)
    except FileExistsError:
        _remove_empty(created)
        return False
    except OSError as error:
        _remove_empty(created)
        raise PermanentError(f"{error.filename} cannot be written: {error.strerror}") from error
    return True


def _remove_empty(files: Sequence[Path]) -> None:
    """Remove those of these files that are empty."""
    for file in files:
        with suppress(OSError):
            if not file.stat().st_size:
                file.unlink()


def require_files(named: Sequence[tuple[str, Path | None]]) -> None:
    """Raise InvalidParameter, with its flag, for a file that is not there."""
    for flag, file in named:
        if file is not None and not file.is_file():
            raise InvalidParameter(f"{flag} {file}: there is no such file", flag.lstrip("-"))


def json_of(file: Path) -> Any:
    """What a JSON file says. Raises InvalidParameter for one that cannot be read."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"{file} cannot be read as JSON: {error}") from error


def is_terminal() -> bool:
    """Whether a person types standard input. It may also be closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def argument_of(text: str, terminal: Terminal) -> str:
    """Return an argument of the command line, or for `-` the text on standard input. Raises InvalidParameter."""
    if text != STDIN:
        return text
    if is_terminal():
        terminal.say("type the prompt, and end it with Enter and Ctrl-D")
    found = _text(_read_stdin(lines=False), "standard input").strip()
    if not found:
        raise InvalidParameter("standard input is empty: write a prompt to it, or give the prompt as the argument")
    return found


def lines_of_stdin() -> Iterator[str | InvalidParameter]:
    """Yield the lines of standard input, without empty ones; an InvalidParameter in the place of one that is no text.

    Where a person types, they are asked for.
    """
    number = 0
    while True:
        number += 1
        try:
            line = _typed() if is_terminal() else _text(_read_stdin(lines=True), f"line {number} of standard input")
        except EOFError:
            return
        except InvalidParameter as error:
            yield error
            continue
        if line.strip():
            yield line.strip()


def _typed() -> str:
    """Ask for a line, on standard error where standard output goes elsewhere. Raises EOFError at the end."""
    asks = "> "
    if not sys.stdout.isatty():
        sys.stderr.write(asks)
        sys.stderr.flush()
        asks = ""
    try:
        line = input(asks)
        line.encode()  # where the locale is C, bytes that are no text come as halves of surrogate pairs
        return line
    except UnicodeError as error:
        raise InvalidParameter("that line is not UTF-8: type it again") from error


def _read_stdin(*, lines: bool) -> bytes:
    """Read standard input, or a line of it. Raises InvalidParameter for too much, and EOFError where no line is left.

    Raises UsageError where nothing can be read.
    """
    if sys.stdin is None:
        raise EOFError if lines else UsageError("standard input is closed: write a prompt to it")
    stream = sys.stdin.buffer
    try:
        data = stream.readline(MAX_STDIN + 1) if lines else stream.read(MAX_STDIN + 1)
        if lines and not data:
            raise EOFError
        if len(data) <= MAX_STDIN:
            return data
        while lines and not data.endswith(b"\n") and data:
            data = stream.readline(MAX_STDIN)
    except OSError as error:
        raise UsageError(f"standard input cannot be read: {error.strerror or error}") from error
    raise InvalidParameter(
        f"standard input is longer than the {MAX_STDIN >> 20} MiB that a prompt may have: shorten it"
    )


def _text(data: bytes, what: str) -> str:
    """Decode what was read. Raises InvalidParameter for bytes that are not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{what} is not UTF-8 ({error.reason} at byte {error.start}): convert it, for example with iconv"
        raise InvalidParameter(message) from error
