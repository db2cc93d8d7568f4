"""Decides whether a task is retried after a device error, or its request fails.

A device that fails may be broken, or a task may have made it fail. The tasks of the process run again without a charge.
From then on they run alone, so that the next failure has a single suspect, and on another worker if there is one.

A failure while the task ran alone is recorded in its stage. It counts against the task if the device had worked: if it
had completed another task of this pool since its failure before. The request fails when FAILURES_OF_WORKING_DEVICES
failures count. A task that is always the first on its device has no other tasks to compare with: its request fails
after MOST_FAILURES recorded failures, whether they count or not.
"""

from __future__ import annotations

from msgspec.structs import replace

from unfuse.core.messages import TaskFailed
from unfuse.core.request import Change, DeviceFailure, ErrorInfo
from unfuse.scheduler.change_builder import CODES, ChangeBuilder

#: Failures of working devices after which the task is to blame.
FAILURES_OF_WORKING_DEVICES = 2

#: Failures of any devices after which the task is to blame.
MOST_FAILURES = 3


def retry_after_device_error(builder: ChangeBuilder, failed: TaskFailed, worker: str, has_other: bool) -> Change:
    """Retry a stage whose device failed, or fail its request if it is to blame.

    The retry runs alone, and on another worker if there is one (`has_other`).
    """
    stage = failed.claim.stage
    state = builder.stages[stage]
    failures = state.device_failures
    if state.alone or not failed.had_companions:
        device = f"{failed.device.index} of {worker}" if failed.device else worker
        failures = (*failures, DeviceFailure(device, failed.had_worked))
    builder.stages[stage] = replace(
        state, alone=True, avoid_worker=worker if has_other else "", device_failures=failures
    )
    if is_to_blame(failures):
        devices = ", then ".join(failure.device for failure in failures)
        message = f"the task made its device fail {len(failures)} times, on {devices}: {failed.message}"
        error = ErrorInfo(CODES["crashes"], message, stage, failed.evidence)
        return builder.end_request("failed", error, failed.claim, is_dead_letter=True)
    builder.publish("retrying", stage, failed.message)
    return builder.retry(failed.claim)


def is_to_blame(failures: tuple[DeviceFailure, ...]) -> bool:
    """Return whether a task with these failures caused them."""
    of_working_devices = sum(failure.had_worked for failure in failures)
    return of_working_devices >= FAILURES_OF_WORKING_DEVICES or len(failures) >= MOST_FAILURES
