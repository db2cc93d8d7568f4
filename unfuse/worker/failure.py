"""Describes a task that ended in an error: whether it may be tried again, and the cause."""

from __future__ import annotations

import traceback

from unfuse.core.errors import NotFound, ObjectLost, PermanentError, UnfuseError
from unfuse.core.messages import REFUSED, Failed
from unfuse.core.request import Timings
from unfuse.core.retries import MEMORY, REQUEST, UNKNOWN, rule_of, type_name
from unfuse.core.task import Claim

EVIDENCE_CHARS = 4000

ROOMIER = "serve with --vae tiled, --offload, or on a larger device"


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
