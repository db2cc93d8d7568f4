"""What becomes of a task that ended with an error: the one table that decides what is tried again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import msgspec

from unfuse.core.errors import InvalidParameter, NotFound, ObjectLost, PermanentError, TransientError, Unsuitable
from unfuse.core.messages import FailureKind


class RetryRule(msgspec.Struct, frozen=True):
    """One line of the table. `errors`, `outcome` and `code` are for people; `kind` is what the worker reports.

    `code` is the error code of a request that ends by this rule. `matches` says whether an error falls under it.
    """

    cause: str
    errors: str
    outcome: str
    code: str
    kind: FailureKind
    matches: Callable[[BaseException], bool]


def _is_a(*types: type[BaseException]) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, types)


def _is_either(*rules: Callable[[BaseException], bool]) -> Callable[[BaseException], bool]:
    return lambda error: any(matches(error) for matches in rules)


def _is_named(names: Iterable[str], text: str) -> Callable[[BaseException], bool]:
    """Match errors of classes with one of these full names, which need not be imported, or with such a text."""
    wanted, pattern = frozenset(names), re.compile(text)

    def matches(error: BaseException) -> bool:
        found = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
        return not wanted.isdisjoint(found) or (isinstance(error, RuntimeError) and bool(pattern.search(str(error))))

    return matches


BUDGET = "tried again up to 3 times, after 0.5, 1 and 2 s, by whichever worker is free"

LOST = RetryRule(
    "object", "`ObjectLost`", "the stage that made the object runs again, up to 3 times", "object_lost", "object_lost",
    _is_a(ObjectLost),
)  # fmt: skip
REQUEST = RetryRule(
    "request", "`Unsuitable`, `InvalidParameter`", "not tried again: the request is wrong (400)", "invalid_parameter",
    "permanent", _is_a(Unsuitable, InvalidParameter),
)  # fmt: skip
PERMANENT = RetryRule(
    "permanent", "`PermanentError`, `NotFound`", "not tried again: it fails the same way everywhere", "stage_failed",
    "permanent", _is_a(PermanentError, NotFound),
)  # fmt: skip
MEMORY = RetryRule(
    "memory", "`torch.OutOfMemoryError`, `MemoryError`",
    "a batch is divided, and run alone in the end; a task that does not fit alone is not tried again", "stage_failed",
    "permanent",
    _is_either(_is_a(MemoryError), _is_named(["torch.OutOfMemoryError"], r"DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_F")),
)  # fmt: skip
DEVICE = RetryRule(
    "device", "`torch.AcceleratorError`, `CUDA error`, `HIP error`",
    "the compute process starts again, since its device context is unusable; the task counts as one that crashed it: "
    "it is tried once more, alone", "compute_crashed", "crash",
    _is_named(["torch.AcceleratorError"], r"CUDA error|HIP error|XPU error|device-side assert"),
)  # fmt: skip
CONNECTION = RetryRule(
    "connection", "`ConnectionError`, `TimeoutError`, `torch.distributed.DistError`", BUDGET, "stage_failed",
    "transient",
    _is_either(_is_a(ConnectionError, TimeoutError), _is_named(["torch.distributed.DistError"], "NCCL error")),
)  # fmt: skip
FILE = RetryRule("file", "other `OSError`, as of a model's files", BUDGET, "stage_failed", "transient", _is_a(OSError))
TRANSIENT = RetryRule("transient", "`TransientError`", BUDGET, "stage_failed", "transient", _is_a(TransientError))
UNKNOWN = RetryRule(
    "unknown", "every other exception",
    "tried again once, on another worker, or on the same one where it is alone; the same type there ends the request",
    "model_error", "transient", _is_a(BaseException),
)  # fmt: skip

RULES = (LOST, REQUEST, PERMANENT, MEMORY, DEVICE, CONNECTION, FILE, TRANSIENT, UNKNOWN)
"""The table. The first rule that matches an error decides."""


def rule_of(error: BaseException) -> RetryRule:
    """Return the rule that decides what becomes of a task which ended with this error."""
    return next(rule for rule in RULES if rule.matches(error))


def type_name(error: BaseException) -> str:
    """Return the full name of an error's type, as tracebacks write it."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
