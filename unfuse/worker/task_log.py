"""A worker's log lines about tasks."""

from __future__ import annotations

import structlog

from unfuse.core.messages import Done, Failed, Stopped
from unfuse.core.task import Claim

log = structlog.get_logger(__name__)


def about(claim: Claim) -> dict[str, object]:
    """The fields of every log line about a task."""
    return {"request": claim.request, "stage": claim.stage, "attempt": claim.attempt}


def log_outcome(message: Stopped | Done | Failed) -> None:
    """Log how a task ended."""
    if isinstance(message, Done):
        log.debug("task done", run_s=message.timings.run_s, **about(message.claim))
    elif isinstance(message, Failed) and message.reason == "drain":
        log.info("task handed back", reason=message.message, **about(message.claim))
    elif isinstance(message, Failed):
        log.warning("task failed", kind=message.kind, reason=message.message, **about(message.claim))
    else:
        log.info("task stopped", run_s=message.timings.run_s, **about(message.claim))
