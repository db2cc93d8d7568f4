"""Find the errors after which the compute process cannot use its device any more."""

from __future__ import annotations

import traceback

from unfuse.core.retries import DEVICE, first_line, rule_of
from unfuse.worker.compute_messages import EVIDENCE_CHARS, DeviceFailed, sendable


def is_device_error(error: BaseException) -> bool:
    """Whether the error has made the device context unusable, so that the process must end."""
    return rule_of(error) is DEVICE


def task_error(error: Exception) -> Exception:
    """Return the error of one task, or raise it again after a device error.

    Called where the step loop catches an error to continue with other tasks.
    """
    if is_device_error(error):
        raise error
    return error


def device_failure(error: BaseException, rank: int) -> DeviceFailed:
    """Return the report of a device error.

    It is about the rank that the error names, else about this `rank`.
    """
    evidence = "".join(traceback.format_exception(error))[-EVIDENCE_CHARS:]
    return DeviceFailed(getattr(error, "rank", rank), sendable(first_line(error)), sendable(evidence))
