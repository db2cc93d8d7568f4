"""How a task ended: its report after an error, and its line in the log."""

from __future__ import annotations

import traceback

import structlog

from unfuse.core.errors import NotFound, ObjectLost, PermanentError, UnfuseError
from unfuse.core.messages import REFUSED, Done, Failed, Stopped
from unfuse.core.request import Timings
from unfuse.core.retries import MEMORY, REQUEST, UNKNOWN, rule_of, type_name
from unfuse.core.task import Claim

EVIDENCE_CHARS = 4000

ROOMIER = "serve with --vae tiled, --offload, or on a larger device"

log = structlog.get_logger(__name__)


def failure(claim: Claim, error: Exception, timings: Timings | None = None) -> Failed:
    """The report for a task that ended with this error; `timings` say what it has used."""
    rule = rule_of(error)
    message = str(error) if isinstance(error, UnfuseError) else f"{type(error).__name__}: {error}"
    if rule is MEMORY:
        message = f"the device has not enough memory for this request: {message}; ask for less, or {ROOMIER}"
    evidence = "".join(traceback.format_exception(error))[-EVIDENCE_CHARS:]
    return Failed(
        claim, rule.kind, _sendable(message), _sendable(evidence),
        object_id=error.object_id if isinstance(error, ObjectLost) else "",
        reason=REFUSED if rule is REQUEST else "",
        error=_sendable(type_name(error)) if rule is UNKNOWN else "",
        timings=timings or Timings(),
    )  # fmt: skip


def unfetched(claim: Claim, error: Exception, ready: bool) -> Failed:
    """The report for a task whose inputs did not come; it is no fault of it if compute is not `ready`."""
    if isinstance(error, ObjectLost | PermanentError | NotFound):
        return failure(claim, error)
    if not ready:
        return Failed(claim, "hand_back", "the worker cannot run it now", reason="compute")
    return Failed(claim, "transient", _sendable(f"an input cannot be fetched: {error}"))


def _sendable(text: str) -> str:
    """The text with characters replaced that UTF-8 cannot encode, such as escapes in the names of files."""
    return text.encode(errors="replace").decode()


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
