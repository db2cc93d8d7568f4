"""The entry point of the command, its signals and exit codes. It imports nothing heavy: signals work at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TextIO

from unfuse.cli.exit_codes import FAILED, SIGNALLED, exit_code
from unfuse.core.errors import UnfuseError

SHOW_CURSOR = b"\x1b[?25h"

_received: list[int] = []


def main() -> NoReturn:
    """The entry point of the command."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sys.unraisablehook = _unraisable
    _open_closed_streams()
    try:
        run(sys.argv[1:])
    except KeyboardInterrupt:
        _end()
    except SystemExit as ended:
        if _received:
            _end()
        sys.exit(ended.code)


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a command line and exit; an error of ours, or of the system, is one line on standard error."""
    from unfuse.cli.app import app

    code = 0
    try:
        app(arguments, prog_name="unfuse")
    except UnfuseError as error:
        code = _say(str(error), exit_code(error))
    except OSError as error:
        code = _say(": ".join(filter(None, (error.filename, error.strerror or str(error)))), FAILED)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    for stream in (sys.stdout, sys.stderr):
        code = _flushed(stream, code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open standard streams that are closed, as /dev/null: else a socket or a file would get their numbers.

    What libraries write to standard error would go there. `sys.stdin` stays None, which verbs that read it say.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _flushed(stream: TextIO, code: int) -> int:
    """Flush a stream and return the exit code; an error is reported once, and the rest dropped."""
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not code:
            return FAILED if isinstance(error, BrokenPipeError) else _say(f"standard output: {error.strerror}", FAILED)
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    """On the first signal, end and keep what is finished; on the next one, end at once."""
    _received.append(number)
    if len(_received) == 1:
        raise KeyboardInterrupt
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), SHOW_CURSOR)
    os._exit(SIGNALLED + number)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """A signal that came in a callback of the interpreter, out of which no exception goes: it ends all the same."""
    if lost.exc_type is KeyboardInterrupt:
        _end()
    sys.__unraisablehook__(lost)


def _end() -> NoReturn:
    """End as the first signal asked; without Python's own end, which may turn an interrupt into a SIGINT to itself."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(SIGNALLED + _received[0])


def _say(sentence: str, code: int) -> int:
    """Print in one line why the command ends, and return the exit code."""
    with suppress(OSError):
        sys.stderr.write(f"unfuse: {' '.join(sentence.split())}\n")
        sys.stderr.flush()
    return code
