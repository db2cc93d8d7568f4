"""The table that decides what is tried again."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch
import torch.distributed

from unfuse.core.errors import (
    ArenaFull,
    ConfigError,
    InvalidParameter,
    NotFound,
    ObjectLost,
    OutOfMemory,
    PermanentError,
    TransientError,
    UnsupportedRequest,
)
from unfuse.core.retries import RULES, first_line, is_out_of_host_memory, rule_of, type_name
from unfuse.core.task import Claim
from unfuse.worker.compute_messages import failure

CLAIM = Claim("req_1", "denoise", 1, b"token")


#: What libraries say in a RuntimeError when memory has run out.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaHostAlloc failed",
    "HIP out of memory. Tried to allocate 20.00 MiB",
    "HIP error: out of memory",
    "hipErrorOutOfMemory",
    "HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "rocblas_status_memory_error",
    "MPS backend out of memory (MPS allocated: 18.00 GB, other allocations: 0 bytes, max allowed: 18.13 GB)",
    "XPU out of memory. Tried to allocate 20.00 MiB",
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "Native API failed. Native API returns: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate",
    "unable to mmap 4096 bytes from file </weights>: Cannot allocate memory (12)",
    "std::bad_alloc",
)


HOST = ("cudaHostAlloc", "DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc")


def test_memory_of_the_host_is_told_from_memory_of_a_device() -> None:
    for text in OUT_OF_MEMORY:
        assert is_out_of_host_memory(RuntimeError(text)) == any(word in text for word in HOST)
    assert is_out_of_host_memory(MemoryError()) and is_out_of_host_memory(OSError(12, "Cannot allocate memory"))
    assert not is_out_of_host_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_host_memory(ValueError("std::bad_alloc is only mentioned"))


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
        (np._core._exceptions._ArrayMemoryError((1 << 50,), np.dtype("uint8")), "memory", "permanent"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory", "permanent"),
        *((RuntimeError(text), "memory", "permanent") for text in OUT_OF_MEMORY),
        *((torch.AcceleratorError(text), "memory", "permanent") for text in OUT_OF_MEMORY if "error" in text),
        (OutOfMemory("x"), "memory", "permanent"),
        (OutOfMemory("x", shared=True), "memory", "transient"),
        (torch.AcceleratorError("an illegal memory access was encountered"), "device", "device"),
        (RuntimeError("CUDA error: device-side assert triggered"), "device", "device"),
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
    assert rule_of(error).cause == cause
    report = failure(CLAIM, error)
    is_named = cause == "unknown" or kind == "transient" and cause == "memory"
    assert (report.kind, report.error) == (kind, type_name(error) if is_named else "")
    assert report.reason == {"request": "refused", "memory": "out_of_memory"}.get(cause, "")


def test_every_retry_rule_has_a_unique_cause() -> None:
    causes = [rule.cause for rule in RULES]
    assert len({*causes}) == len(causes)


def test_type_name_is_qualified_except_for_builtins() -> None:
    assert type_name(KeyError()) == "KeyError"
    assert type_name(SafetensorError()) == f"{__name__}.SafetensorError"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("CUDA error: misaligned address\nFor debugging, set X"), "CUDA error: misaligned address"),
        (RuntimeError("\n  out of memory\n"), "out of memory"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_first_line_of_an_error_names_its_type_if_it_has_no_text(error: Exception, line: str) -> None:
    assert first_line(error) == line
