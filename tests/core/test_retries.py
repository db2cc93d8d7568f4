"""The table that decides what is tried again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

from unfuse.core.errors import (
    ArenaFull,
    ConfigError,
    InvalidParameter,
    NotFound,
    ObjectLost,
    PermanentError,
    TransientError,
    UnsupportedRequest,
)
from unfuse.core.retries import RULES, rule_of, type_name
from unfuse.core.task import Claim
from unfuse.worker.compute_messages import failure

CLAIM = Claim("req_1", "denoise", 1, b"token")


class SafetensorError(Exception):
    """An error of a library."""


@pytest.mark.parametrize(
    ("error", "cause", "kind"),
    [
        (ObjectLost("x", "id"), "object", "object_lost"),
        (UnsupportedRequest("x"), "request", "permanent"),
        (InvalidParameter("x"), "request", "permanent"),
        (PermanentError("x"), "permanent", "permanent"),
        (NotFound("x"), "permanent", "permanent"),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory", "permanent"),
        (MemoryError(), "memory", "permanent"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "memory", "permanent"),
        (torch.AcceleratorError("an illegal memory access was encountered"), "device", "crash"),
        (RuntimeError("CUDA error: device-side assert triggered"), "device", "crash"),
        (ConnectionResetError("x"), "connection", "transient"),
        (TimeoutError("x"), "connection", "transient"),
        (torch.distributed.DistBackendError("x"), "connection", "transient"),
        (FileNotFoundError("x"), "file", "transient"),
        (OSError(5, "Input/output error"), "file", "transient"),
        (TransientError("x"), "transient", "transient"),
        (ArenaFull(1, 0, 1), "transient", "transient"),
        (AssertionError(), "unknown", "transient"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "unknown", "transient"),
        (ValueError("CUDA error: only said"), "unknown", "transient"),
        (SafetensorError("x"), "unknown", "transient"),
        (ConfigError("x"), "unknown", "transient"),
    ],
)
def test_first_matching_retry_rule_classifies_the_error(error: Exception, cause: str, kind: str) -> None:
    assert (rule_of(error).cause, rule_of(error).kind) == (cause, kind)
    report = failure(CLAIM, error)
    assert (report.kind, report.error) == (kind, type_name(error) if cause == "unknown" else "")
    assert (report.reason == "refused") == (cause == "request")


def test_every_retry_rule_has_a_unique_cause() -> None:
    causes = [rule.cause for rule in RULES]
    assert len({*causes}) == len(causes)


def test_type_name_is_qualified_except_for_builtins() -> None:
    assert type_name(KeyError()) == "KeyError"
    assert type_name(SafetensorError()) == f"{__name__}.SafetensorError"
