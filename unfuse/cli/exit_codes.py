"""Exit codes of the command."""

from __future__ import annotations

from unfuse.core.errors import InvalidParameter, Overloaded, TransientError, UnfuseError, UsageError

FAILED, USAGE, REFUSED, SIGNALLED = 1, 2, 3, 128
"""Exit codes beside 0; the number of a signal is added to the last: 130 after Ctrl-C, 143 after SIGTERM."""


def exit_code(error: UnfuseError) -> int:
    """The exit code for an error: 2 wrong usage, 3 worth trying again later, 1 anything else."""
    if isinstance(error, InvalidParameter | UsageError):
        return USAGE
    return REFUSED if isinstance(error, Overloaded | TransientError) else FAILED
