"""What a worker's log says of tasks."""

from __future__ import annotations

import structlog

from unfuse.core.messages import Done, Failed
from unfuse.core.task import Claim
from unfuse.worker.compute_messages import Stopped

log = structlog.get_logger(__name__)


def about(claim: Claim) -> dict[str, object]:
    """What every log line on a task says."""
    return {"request": claim.request, "stage": claim.stage, "attempt": claim.attempt}


def log_outcome(message: Stopped | Done | Failed) -> None:
    """How a task ended."""
    if isinstance(message, Done):
        log.debug("task done", run_s=message.timings.run_s, **about(message.claim))
    elif isinstance(message, Failed):
        log.warning("task failed", kind=message.kind, reason=message.message, **about(message.claim))
    else:
        log.info("task stopped", **about(message.claim))
