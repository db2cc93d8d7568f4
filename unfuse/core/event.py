"""Events: what a client is told about its request."""

from __future__ import annotations

from typing import Literal

import msgspec

EventType = Literal[
    "queued", "stage_started", "progress", "preview", "appended", "stage_completed", "retrying",
    "completed", "failed", "cancelled",
]  # fmt: skip
TERMINAL_EVENTS = frozenset({"completed", "failed", "cancelled"})


class Event(msgspec.Struct, frozen=True):
    """One entry of a request's history.

    `seq` counts from 1 within the request; the queue sets it (0 before that). `at` is Unix seconds. `step` and `steps`
    are set on progress; of a stage that is read while it grows, `step` counts the recorded pieces in `appended`.
    """

    type: EventType
    at: float = 0.0
    stage: str = ""
    attempt: int = 0
    worker: str = ""
    step: int = 0
    steps: int = 0
    message: str = ""
    seq: int = 0
