"""The error tree. An error's type decides whether the work is tried again; its text is for the person who reads it."""

from __future__ import annotations


class UnfuseError(Exception):
    """Root of every error unfuse raises on purpose."""


class ConfigError(UnfuseError):
    """The program cannot start as it was configured; the text says what to change."""


class UsageError(ConfigError):
    """What was typed, or set, is nothing that can be asked for; the text says what can."""


class InUse(UsageError):
    """Another process has what this one was to have alone; the text names that process and says what to do."""


class InvalidParameter(UnfuseError):
    """The client asked for something this model cannot do. Never retried.

    `param` names the offending field as the client typed it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(InvalidParameter):
    """No pool serves a model of that name. Never retried."""


class NotFound(UnfuseError):
    """No request, result or object of that name exists (any more)."""


class Damaged(UnfuseError):
    """What is stored of a request cannot be read: it stands still until somebody drops it. Others are not touched."""


class Overloaded(UnfuseError):
    """Refused before acceptance because too much is already waiting. The client retries after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TransientError(UnfuseError):
    """The same task may succeed elsewhere or later: it is tried again within its budget."""


class ObjectLost(TransientError):
    """An object cannot be read any more (its owner is gone, or its bytes are not the ones that were sealed).

    `object_id` names it; the scheduler has the stage that made it run again.
    """

    def __init__(self, message: str, object_id: str = "") -> None:
        super().__init__(message)
        self.object_id = object_id


class ResultsUnavailable(TransientError):
    """The place where results and uploads are kept has no room, or cannot be reached.

    That is no failure of a task: it waits until the place is well again.
    """


class ArenaFull(TransientError):
    """There is no room for an object now; `needed` and `free` are bytes. `full` says where, `remedy` what helps."""

    def __init__(
        self,
        needed: int,
        free: int,
        capacity: int,
        full: str = "the arena has no contiguous room",
        remedy: str = "start the worker with a larger --arena",
    ) -> None:
        super().__init__(
            f"{full} for {needed} bytes ({free} of {capacity} free): wait for requests to finish, or {remedy}"
        )
        self.needed, self.free, self.capacity = needed, free, capacity


class PermanentError(UnfuseError):
    """The task fails the same way wherever it runs: its request fails at once."""


class ProtocolError(UnfuseError):
    """A peer sent something that is not a message of a version we read."""


class Conflict(UnfuseError):
    """The context's version moved since it was loaded: load it again and decide again."""


class LeaseLost(UnfuseError):
    """The task belongs to another attempt or to a request that is over: drop what this attempt made."""


class IllegalMove(UnfuseError):
    """A transition that the tables of legal moves do not hold: a defect in unfuse, please report it."""
