"""The entry point of the `unfuse` command: its signals and exit codes.

Nothing heavy is imported here, so that signals are handled from the start.
"""

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

#: The escape sequence that makes the cursor visible. Progress hides it.
SHOW_CURSOR = b"\x1b[?25h"

#: The numbers of the received signals, in order.
_received: list[int] = []


def main() -> NoReturn:
    """Run the command line of this process, and exit."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sys.unraisablehook = _unraisable
    _open_closed_streams()
    try:
        run(sys.argv[1:])
    except KeyboardInterrupt:
        _exit_by_signal()
    except SystemExit as exit_request:
        if _received:
            _exit_by_signal()
        sys.exit(exit_request.code)


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a command line, and exit with its code.

    UnfuseError and OSError become one line on standard error. Any other exception is a defect, and is raised.
    """
    from unfuse.cli.app import app

    code = 0
    try:
        app(arguments, prog_name="unfuse")
    except UnfuseError as error:
        code = _print_error(str(error), exit_code(error))
    except OSError as error:
        code = _print_error(": ".join(filter(None, (error.filename, error.strerror or str(error)))), FAILED)
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else 0
    for stream in (sys.stdout, sys.stderr):
        code = _flush(stream, code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open closed standard streams as /dev/null.

    Otherwise a socket or a file could get the descriptor of standard error, and receive what libraries write there.
    `sys.stdin` stays None. Verbs that read it raise an error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _flush(stream: TextIO, code: int) -> int:
    """Flush a stream, and return the exit code.

    It is `code`, or FAILED if that is 0 and the flush fails.

    After an error the stream is /dev/null, so that the rest is dropped and the error is reported once.
    """
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not code:
            if isinstance(error, BrokenPipeError):
                return FAILED
            return _print_error(f"standard output: {error.strerror}", FAILED)
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt for the first signal; exit at once for the next one."""
    _received.append(number)
    if len(_received) == 1:
        raise KeyboardInterrupt
    # os._exit skips the code that would show the cursor again.
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), SHOW_CURSOR)
    os._exit(SIGNALLED + number)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Exit for a signal that arrived in a callback of the interpreter, which cannot raise."""
    if unraisable.exc_type is KeyboardInterrupt:
        _exit_by_signal()
    sys.__unraisablehook__(unraisable)


def _exit_by_signal() -> NoReturn:
    """Exit with the code of the first signal.

    Python's own exit is avoided, because it may end this process by SIGINT instead of by this code.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(SIGNALLED + _received[0])


def _print_error(sentence: str, code: int) -> int:
    """Print in one line why the command fails, and return the exit code."""
    with suppress(OSError):
        sys.stderr.write(f"unfuse: {' '.join(sentence.split())}\n")
        sys.stderr.flush()
    return code
