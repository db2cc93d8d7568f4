"""The tree of the errors that unfuse raises.

An error's type decides whether the work is retried; its message is written for people.

UnfuseError
├── ConfigError                 the program cannot start
│   ├── DeviceUnusable
│   └── UsageError
│       └── FileInUse
├── InvalidParameter            the client's mistake
│   ├── ContextLengthExceeded
│   └── UnknownModel
├── WeightsChanged
├── NotFound
├── RecordDamaged
├── Overloaded                  the client may retry later
│   ├── LimitReached
│   └── ShuttingDown
├── TransientError              the task is retried
│   ├── KeyUnavailable
│   ├── ObjectLost
│   ├── ResultsUnavailable
│   └── ArenaFull
├── PermanentError              the task is not retried
│   └── UnsupportedRequest
├── ProtocolError
├── Conflict
├── LeaseLost
└── IllegalMove
"""

from __future__ import annotations


class UnfuseError(Exception):
    """Root of every error that unfuse raises on purpose."""


class ConfigError(UnfuseError):
    """The program cannot start with this configuration; the message names what to change."""


class DeviceUnusable(ConfigError):
    """A device failed its check, or failed while models were loaded; the message names it.

    `rank` is the rank of the device among those of its worker.
    """

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class UsageError(ConfigError):
    """A flag, setting or argument has an unusable value; the message names usable ones."""


class FileInUse(UsageError):
    """Another process uses an exclusive file; the message names the process and the remedy."""


class InvalidParameter(UnfuseError):
    """The client requested something that this model cannot do; it is never retried.

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
    """A model file, named in the message, changed after loading: the model is unavailable."""


class NotFound(UnfuseError):
    """No request, result or object of that name exists, or it no longer exists."""


class RecordDamaged(UnfuseError):
    """A stored record cannot be read.

    Its request makes no progress until somebody deletes it; other requests continue.
    """


class Overloaded(UnfuseError):
    """Admission control refused the request, because too much work waits. Try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LimitReached(Overloaded):
    """The tenant has reached the concurrency limit or the rate limit of its key.

    Try again after `retry_after` seconds (0: unknown).
    """

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message, retry_after)


class ShuttingDown(Overloaded):
    """The server is shutting down and accepts no more requests.

    Another server may accept this one.
    """


class TransientError(UnfuseError):
    """The task may succeed on another worker or later: it is retried within its budget."""


class KeyUnavailable(TransientError):
    """The part of the queue for this idempotency key cannot be reached.

    Nothing was queued. A key that was never used before can be replaced by another one.
    """


class ObjectLost(TransientError):
    """An object cannot be read, because it is gone or its bytes are damaged.

    Its owner is gone, it was released or aborted, or its bytes differ from the sealed ones.

    `object_id` names it. The scheduler repeats the stage that made it.
    """

    def __init__(self, message: str, object_id: str = "") -> None:
        super().__init__(message)
        self.object_id = object_id


class ResultsUnavailable(TransientError):
    """The result store is full or cannot be reached.

    The task's retry budget is not charged: the task waits until the result store works again.
    """


class ArenaFull(TransientError):
    """An object does not fit into the memory that is free now.

    `needed`, `free` and `capacity` are bytes.

    The message begins with `full`, which names the memory, and ends with `remedy`, which is advice for a person.
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
        self.needed = needed
        self.free = free
        self.capacity = capacity
        self.full = full
        self.remedy = remedy


class OutOfMemory(UnfuseError):
    """A request does not fit into the memory of a device, even alone.

    With `shared`, other processes use memory of the device: the task may succeed on another worker or later.
    """

    def __init__(self, message: str, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


class PermanentError(UnfuseError):
    """The task fails the same way on every worker: its request fails at once."""


class UnsupportedRequest(PermanentError):
    """A stage found that the model cannot do what the client requested.

    It is the client's mistake.
    """


class ProtocolError(UnfuseError):
    """Data is not a message of a supported version, or a message cannot be encoded."""


class Conflict(UnfuseError):
    """The version of the request context has changed: load it and decide again."""


class LeaseLost(UnfuseError):
    """The task has another attempt, or its request is over: drop this attempt's output."""


class IllegalMove(UnfuseError):
    """A transition is not in the tables of legal moves: please report this defect."""
