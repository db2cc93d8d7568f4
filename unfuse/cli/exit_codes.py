"""Exit codes of the command."""

from __future__ import annotations

from unfuse.core.errors import InvalidParameter, Overloaded, TransientError, UnfuseError, UsageError

#: The command failed for any reason that is not one of the following.
FAILED = 1

#: A flag, argument, setting or parameter is wrong.
USAGE = 2

#: The server is overloaded or unreachable: the command may succeed later.
REFUSED = 3

#: A signal ended the command. Its number is added: 130 after Ctrl-C, 143 after SIGTERM.
SIGNALLED = 128


def exit_code(error: UnfuseError) -> int:
    """Return the exit code for an error: USAGE, REFUSED or FAILED."""
    if isinstance(error, InvalidParameter | UsageError):
        return USAGE
    return REFUSED if isinstance(error, Overloaded | TransientError) else FAILED
