"""The retry policy: one table that decides whether a failed task is retried."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable

import msgspec

from unfuse.core.errors import (
    InvalidParameter,
    NotFound,
    ObjectLost,
    OutOfMemory,
    PermanentError,
    TransientError,
    UnsupportedRequest,
)
from unfuse.core.messages import FailureKind


class RetryRule(msgspec.Struct, frozen=True):
    """One row of the retry policy: which exceptions it covers, and what follows."""

    #: Name of the row.
    cause: str
    #: The exceptions, as text for the documentation.
    errors: str
    #: What happens to the task, as text for the documentation.
    result: str
    #: Error code of a request that fails by this rule.
    code: str
    #: The kind of failure that the worker reports.
    kind: FailureKind
    #: Whether the rule applies to an exception.
    matches: Callable[[BaseException], bool]


def _is_a(*types: type[BaseException]) -> Callable[[BaseException], bool]:
    """Return a rule that matches exceptions of these types."""
    return lambda error: isinstance(error, types)


def _is_either(*rules: Callable[[BaseException], bool]) -> Callable[[BaseException], bool]:
    """Return a rule that matches an exception if any of these rules matches it."""
    return lambda error: any(matches(error) for matches in rules)


def _is_named(names: Iterable[str], message_pattern: str) -> Callable[[BaseException], bool]:
    """Return a rule that matches exceptions by full class name, without importing the class.

    It also matches RuntimeErrors whose message matches the regular expression `message_pattern`: torch raises these for
    errors of a device.
    """
    class_names = frozenset(names)
    pattern = re.compile(message_pattern)

    def matches(error: BaseException) -> bool:
        type_names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
        is_named = not class_names.isdisjoint(type_names)
        return is_named or (isinstance(error, RuntimeError) and bool(pattern.search(str(error))))

    return matches


BUDGET = "retried up to 3 times, after 0.5, 1 and 2 s, on any worker"

LOST = RetryRule(
    cause="object",
    errors="`ObjectLost`",
    result="the stage that made the object runs again, up to 3 times",
    code="object_lost",
    kind="object_lost",
    matches=_is_a(ObjectLost),
)
REQUEST = RetryRule(
    cause="request",
    errors="`UnsupportedRequest`, `InvalidParameter`",
    result="not retried: the request is wrong (400)",
    code="invalid_parameter",
    kind="permanent",
    matches=_is_a(UnsupportedRequest, InvalidParameter),
)
PERMANENT = RetryRule(
    cause="permanent",
    errors="`PermanentError`, `NotFound`",
    result="not retried: it fails on every worker",
    code="stage_failed",
    kind="permanent",
    matches=_is_a(PermanentError, NotFound),
)
#: How drivers, libraries and allocators report in a RuntimeError that memory ran out: of a GPU, pinned, or of the host.
OUT_OF_MEMORY = (
    r"(?i)out of (device |host |pinned )?memory|out_of_((device|host)_)?(memory|resources)|_alloc_failed"
    r"|error_?memory_?allocation|error_?out_?of_?memory|(cuda|hip)(hostalloc|mallochost|hostmalloc)\b"
    r"|status_memory_error|defaultcpuallocator|cannot allocate memory|bad_alloc"
)


def _is_memory_of_system(error: BaseException) -> bool:
    """Return whether the operating system refused memory, such as for a mapping."""
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


MEMORY = RetryRule(
    cause="memory",
    errors=(
        "`torch.OutOfMemoryError`, `MemoryError`, `CUDA error: out of memory`, `CUBLAS_STATUS_ALLOC_FAILED` and other "
        "spellings"
    ),
    result=(
        "a batch is halved until each task runs alone; a task alone is repeated once, the VAE then uses tiles, and at "
        "last the request fails. It is retried once, on another worker or later, if other processes use memory of the "
        "device"
    ),
    code="out_of_memory",
    kind="permanent",
    matches=_is_either(
        _is_a(MemoryError, OutOfMemory), _is_memory_of_system, _is_named(["torch.OutOfMemoryError"], OUT_OF_MEMORY)
    ),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a task failed because memory ran out, in any spelling."""
    return rule_of(error) is MEMORY


#: How allocators of host memory, also of pinned memory, report in a RuntimeError that memory ran out.
HOST_MEMORY = re.compile(
    r"(?i)defaultcpuallocator|cannot allocate memory|bad_alloc|out[ _]of[ _](host|pinned)[ _]memory"
    r"|(cuda|hip)(hostalloc|mallochost|hostmalloc)\b"
)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Return whether memory of the host ran out, not that of a device."""
    if isinstance(error, MemoryError) or _is_memory_of_system(error):
        return True
    return isinstance(error, RuntimeError) and bool(HOST_MEMORY.search(str(error)))


#: Messages of errors after which a device context is unusable, or the device is gone.
DEVICE_ERRORS = (
    r"(CUDA|HIP|XPU|CUDA driver|CUDA unknown) error"
    r"|cudaError|hipError|ncclUnhandledCudaError|Cuda failure"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|(rocblas|hipblas|miopen)_?[sS]tatus_?([iI]nternal|[uU]nknown|[eE]xecution)"
    r"|illegal (memory access|instruction) was encountered|misaligned address|unspecified launch failure"
    r"|device-side assert|[uU]ncorrectable ECC|no kernel image is available"
    r"|no CUDA-capable device|No (CUDA|HIP|XPU) GPUs? (are|is) available|GPU is lost|fallen off the bus"
)
DEVICE = RetryRule(
    cause="device",
    errors="`torch.AcceleratorError`, `CUDA error`, `HIP error`, `CUDNN_STATUS_EXECUTION_FAILED`",
    result=(
        "the compute process ends, because its device context is unusable; its tasks run again, on another worker if "
        "there is one; the request fails if two working devices failed while its task ran alone, or after 3 such "
        "failures"
    ),
    code="compute_crashed",
    kind="device",
    matches=_is_named(["torch.AcceleratorError", "unfuse.parallel.group.RankDeviceError"], DEVICE_ERRORS),
)
CONNECTION = RetryRule(
    cause="connection",
    errors="`ConnectionError`, `TimeoutError`, `torch.distributed.DistError`",
    result=BUDGET,
    code="stage_failed",
    kind="transient",
    matches=_is_either(_is_a(ConnectionError, TimeoutError), _is_named(["torch.distributed.DistError"], "NCCL error")),
)
FILE = RetryRule(
    cause="file",
    errors="other `OSError`, such as of a model file",
    result=BUDGET,
    code="stage_failed",
    kind="transient",
    matches=_is_a(OSError),
)
TRANSIENT = RetryRule(
    cause="transient",
    errors="`TransientError`",
    result=BUDGET,
    code="stage_failed",
    kind="transient",
    matches=_is_a(TransientError),
)
UNKNOWN = RetryRule(
    cause="unknown",
    errors="every other exception",
    result=(
        "retried once, on another worker if there is one; the request fails if the same type of exception is raised "
        "again"
    ),
    code="model_error",
    kind="transient",
    matches=_is_a(BaseException),
)

RULES = (LOST, REQUEST, PERMANENT, MEMORY, DEVICE, CONNECTION, FILE, TRANSIENT, UNKNOWN)
"""The retry policy. The first rule that matches an exception applies: a ConnectionError is an OSError, too."""


def rule_of(error: BaseException) -> RetryRule:
    """Return the retry rule for a task that failed with this exception."""
    return next(rule for rule in RULES if rule.matches(error))


def type_name(error: BaseException) -> str:
    """Return the full name of an exception's type, as in tracebacks."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or the name of its type.

    The other lines of torch's errors are about debugging.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
