"""The error tree. An error's type decides whether the work is tried again; its message is written for people."""

from __future__ import annotations


class UnfuseError(Exception):
    """Root of every error unfuse raises on purpose."""


class ConfigError(UnfuseError):
    """The program cannot start as it was configured; the message says what to change."""


class UsageError(ConfigError):
    """A flag, a setting or an argument has a value that cannot be used; the message says which can."""


class InUse(UsageError):
    """Another process holds a file that only one may use; the message names that process and says what to do."""


class InvalidParameter(UnfuseError):
    """The client asked for something that this model cannot do. Never retried.

    `param` names the field that is wrong, as the client typed it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidParameter):
    """Messages and answer together exceed the model's maximum context length. Never retried."""


class UnknownModel(InvalidParameter):
    """No model of that name is served. Never retried."""


class WeightsChanged(UnfuseError):
    """The model is unavailable, because one of its files changed after loading; the message names the file."""


class NotFound(UnfuseError):
    """No request, result or object of that name exists, or it no longer exists."""


class Damaged(UnfuseError):
    """A stored record cannot be read. Its request makes no progress until somebody drops it; others go on."""


class Overloaded(UnfuseError):
    """The request was not accepted, because too much waits already. Try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LimitReached(Overloaded):
    """The tenant has as many requests as its key allows. Try again after `retry_after` seconds (0: nobody knows)."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message, retry_after)


class ShuttingDown(Overloaded):
    """The server is shutting down and accepts no more requests. Another server may accept this one."""


class TransientError(UnfuseError):
    """The task may succeed on another worker or later: it is tried again within its budget."""


class KeyUnavailable(TransientError):
    """The request of this idempotency key, if there is one, is in a part of the queue that does not answer.

    Nothing was queued. A key that was never used before can be replaced by another one.
    """


class ObjectLost(TransientError):
    """An object cannot be read any more: its owner is gone, or its bytes are not those that were sealed.

    `object_id` names it. The scheduler runs the stage that made it again.
    """

    def __init__(self, message: str, object_id: str = "") -> None:
        super().__init__(message)
        self.object_id = object_id


class ResultsUnavailable(TransientError):
    """The result store is full, or cannot be reached.

    This is not charged to a task: the task waits until the result store works again.
    """


class ArenaFull(TransientError):
    """There is no room for an object now. `needed`, `free` and `capacity` are bytes.

    `full` begins the message and says what is full; `remedy` ends it and says what a person can do.
    """

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
        self.needed, self.free, self.capacity, self.full, self.remedy = needed, free, capacity, full, remedy


class PermanentError(UnfuseError):
    """The task fails the same way wherever it runs: its request fails at once."""


class Unsuitable(PermanentError):
    """What the client asked for cannot be done with this model, as its stage found: the mistake is the client's."""


class ProtocolError(UnfuseError):
    """Data is not a message of a version that this build reads, or a message cannot be encoded."""


class Conflict(UnfuseError):
    """The context's version has changed since it was loaded: load it again and decide again."""


class LeaseLost(UnfuseError):
    """The task belongs to another attempt, or its request is over: drop what this attempt made."""


class IllegalMove(UnfuseError):
    """A transition is not in the tables of legal moves. This is a defect in unfuse: please report it."""
