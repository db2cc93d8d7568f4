"""Read files and standard input for a verb, and name and write its output files."""

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

#: The output format by the suffix of a file's name.
FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".mp4": "mp4"}

#: The argument that selects standard input.
STDIN = "-"

#: The most bytes of a prompt on standard input. Servers accept no longer one.
MAX_STDIN = 2 << 20


def kind_of(output: Path, overwrite: bool = False) -> tuple[str, bool]:
    """Return the format of an output file, and whether it is for a video.

    `overwrite`: whether an existing file is replaced, and so must be writable.

    Raises InvalidParameter for an unknown suffix, and for a folder or file that is not writable.
    """
    from unfuse.client.result import NUMBERED

    if output.is_dir():
        raise InvalidParameter(f"-o {output} is a folder: name a file in it, such as {output / 'out.png'}", "output")
    format = FORMATS.get(output.suffix.lower())
    is_numbered = NUMBERED.search(output.name) is not None
    if format is None or (is_numbered and format != "png"):
        raise InvalidParameter(f"-o {output}: the name must end in one of {', '.join(FORMATS)}", "output")
    if not output.parent.is_dir():
        raise InvalidParameter(f"-o {output}: there is no folder {output.parent}", "output")
    # Writing is tested before the request, since generation may take minutes.
    try:
        with output.open("ab") if overwrite and output.exists() else tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise InvalidParameter(f"-o {output}: it cannot be written there ({error.strerror})", "output") from error
    return format, format == "mp4" or is_numbered


def save(result: Result, output: Path, overwrite: bool) -> list[Path]:
    """Write the files of a result, and return their paths.

    `output`: the name to use. If such files exist, the next free name is used, as `names_after` yields it.
    `overwrite`: replace existing files instead.

    Raises PermanentError if a file cannot be written.
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
    """Yield `output`, then alternatives if it exists: NAME-2.png, NAME-3.png, ….

    For a name with a number format, these are NAME-2-%04d.png and so on.
    """
    from unfuse.client.result import NUMBERED

    yield output
    match = NUMBERED.search(output.name)
    for number in count(2):
        if match:
            yield output.with_name(f"{output.name[: match.start()]}{number}-{output.name[match.start() :]}")
        else:
            yield output.with_stem(f"{output.stem}-{number}")


def _create(files: Sequence[Path]) -> bool:
    """Create these files, empty, so that no other process uses their names.

    Returns True; or False, and creates none, if one of them exists. Raises PermanentError if one cannot be created.
    """
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
    """Remove those of these files that are empty, and so have no content yet."""
    for file in files:
        with suppress(OSError):
            if not file.stat().st_size:
                file.unlink()


def require_files(flagged_files: Sequence[tuple[str, Path | None]]) -> None:
    """Raise InvalidParameter, which names the flag, for a file that does not exist.

    `flagged_files`: pairs of a flag and its file; the file is None if the flag was not used.
    """
    for flag, file in flagged_files:
        if file is not None and not file.is_file():
            raise InvalidParameter(f"{flag} {file}: there is no such file", flag.lstrip("-"))


def json_of(file: Path) -> Any:
    """Return the content of a JSON file. Raises InvalidParameter if it cannot be read."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"{file} cannot be read as JSON: {error}") from error


def is_terminal() -> bool:
    """Whether standard input is a terminal. False if it is closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def argument_of(text: str, terminal: Terminal) -> str:
    """Return an argument, or for "-" the text on standard input.

    Raises InvalidParameter for input that is empty, too long or not UTF-8, and UsageError if it cannot be read.
    """
    if text != STDIN:
        return text
    if is_terminal():
        terminal.write_line("type the prompt, and end it with Enter and Ctrl-D")
    prompt = _decode(_read_stdin(one_line=False), "standard input").strip()
    if not prompt:
        raise InvalidParameter("standard input is empty: write a prompt to it, or give the prompt as the argument")
    return prompt


def lines_of_stdin() -> Iterator[str | InvalidParameter]:
    """Yield the lines of standard input without empty ones. Prompts on a terminal.

    For a line that is too long or not UTF-8, an InvalidParameter is yielded instead, and the next line follows.
    """
    number = 0
    while True:
        number += 1
        try:
            line = (
                _input() if is_terminal() else _decode(_read_stdin(one_line=True), f"line {number} of standard input")
            )
        except EOFError:
            return
        except InvalidParameter as error:
            yield error
            continue
        if line.strip():
            yield line.strip()


def _input() -> str:
    """Prompt for a line on the terminal, and return it. Raises EOFError.

    The prompt goes to standard error if standard output is no terminal. Raises InvalidParameter for a line that is not
    UTF-8.
    """
    prompt = "> "
    if not sys.stdout.isatty():
        sys.stderr.write(prompt)
        sys.stderr.flush()
        prompt = ""
    try:
        line = input(prompt)
        line.encode()  # in the locale C, undecodable bytes are lone surrogates, which cannot be encoded
        return line
    except UnicodeError as error:
        raise InvalidParameter("that line is not UTF-8: type it again") from error


def _read_stdin(*, one_line: bool) -> bytes:
    """Return all bytes of standard input, or with `one_line` the next line.

    Raises InvalidParameter for more than MAX_STDIN bytes, EOFError if no line is left, UsageError if it cannot be read.
    """
    if sys.stdin is None:
        raise EOFError if one_line else UsageError("standard input is closed: write a prompt to it")
    stream = sys.stdin.buffer
    try:
        data = stream.readline(MAX_STDIN + 1) if one_line else stream.read(MAX_STDIN + 1)
        if one_line and not data:
            raise EOFError
        if len(data) <= MAX_STDIN:
            return data
        # The rest of a long line is skipped, so that the next call returns the next line.
        while one_line and not data.endswith(b"\n") and data:
            data = stream.readline(MAX_STDIN)
    except OSError as error:
        raise UsageError(f"standard input cannot be read: {error.strerror or error}") from error
    raise InvalidParameter(
        f"standard input is longer than the {MAX_STDIN >> 20} MiB that a prompt may have: shorten it"
    )


def _decode(data: bytes, source: str) -> str:
    """Decode input, without a byte order mark. Raises InvalidParameter if it is not UTF-8.

    `source`: the name of the input in the error.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{source} is not UTF-8 ({error.reason} at byte {error.start}): convert it, for example with iconv"
        raise InvalidParameter(message) from error
