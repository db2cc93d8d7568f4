"""The retry policy: one table that decides whether a failed task is retried."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import msgspec

from unfuse.core.errors import InvalidParameter, NotFound, ObjectLost, PermanentError, TransientError, Unsuitable
from unfuse.core.messages import FailureKind


class RetryRule(msgspec.Struct, frozen=True):
    """One row of the table. `matches` decides whether it applies to an exception; `kind` is what the worker reports.

    `code` is the error code of a request that fails by this rule. `errors` and `outcome` are the row's text in the
    documentation.
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
    """Match exceptions by full class name, without importing the class, and RuntimeErrors by their message."""
    wanted, pattern = frozenset(names), re.compile(text)

    def matches(error: BaseException) -> bool:
        found = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
        return not wanted.isdisjoint(found) or (isinstance(error, RuntimeError) and bool(pattern.search(str(error))))

    return matches


BUDGET = "retried up to 3 times, after 0.5, 1 and 2 s, on any worker"

LOST = RetryRule(
    "object", "`ObjectLost`", "the stage that made the object runs again, up to 3 times", "object_lost", "object_lost",
    _is_a(ObjectLost),
)  # fmt: skip
REQUEST = RetryRule(
    "request", "`Unsuitable`, `InvalidParameter`", "not retried: the request is wrong (400)", "invalid_parameter",
    "permanent", _is_a(Unsuitable, InvalidParameter),
)  # fmt: skip
PERMANENT = RetryRule(
    "permanent", "`PermanentError`, `NotFound`", "not retried: it fails on every worker", "stage_failed",
    "permanent", _is_a(PermanentError, NotFound),
)  # fmt: skip
MEMORY = RetryRule(
    "memory", "`torch.OutOfMemoryError`, `MemoryError`",
    "a batch is split until each task runs alone; a task that does not fit alone is not retried", "stage_failed",
    "permanent",
    _is_either(_is_a(MemoryError), _is_named(["torch.OutOfMemoryError"], r"DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_F")),
)  # fmt: skip
DEVICE = RetryRule(
    "device", "`torch.AcceleratorError`, `CUDA error`, `HIP error`",
    "the compute process is restarted, because its device context is unusable; this counts as a crash: "
    "the task is retried once, alone", "compute_crashed", "crash",
    _is_named(["torch.AcceleratorError"], r"CUDA error|HIP error|XPU error|device-side assert"),
)  # fmt: skip
CONNECTION = RetryRule(
    "connection", "`ConnectionError`, `TimeoutError`, `torch.distributed.DistError`", BUDGET, "stage_failed",
    "transient",
    _is_either(_is_a(ConnectionError, TimeoutError), _is_named(["torch.distributed.DistError"], "NCCL error")),
)  # fmt: skip
FILE = RetryRule(
    "file", "other `OSError`, such as of a model file", BUDGET, "stage_failed", "transient", _is_a(OSError)
)  # fmt: skip
TRANSIENT = RetryRule("transient", "`TransientError`", BUDGET, "stage_failed", "transient", _is_a(TransientError))
UNKNOWN = RetryRule(
    "unknown", "every other exception",
    "retried once, on another worker if there is one; the request fails if the same type of exception is raised again",
    "model_error", "transient", _is_a(BaseException),
)  # fmt: skip

RULES = (LOST, REQUEST, PERMANENT, MEMORY, DEVICE, CONNECTION, FILE, TRANSIENT, UNKNOWN)
"""The table. The first rule that matches an exception applies."""


def rule_of(error: BaseException) -> RetryRule:
    """Return the retry rule for a task that failed with this exception."""
    return next(rule for rule in RULES if rule.matches(error))


def type_name(error: BaseException) -> str:
    """Return the full name of an exception's type, as in tracebacks."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
