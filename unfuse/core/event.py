"""What a client may hear of its request."""

from __future__ import annotations

from typing import Literal

import msgspec

EventType = Literal[
    "queued", "stage_started", "progress", "preview", "stage_completed", "retrying", "completed", "failed", "cancelled"
]
TERMINAL_EVENTS = frozenset({"completed", "failed", "cancelled"})


class Event(msgspec.Struct, frozen=True):
    """One line of a request's history.

    `seq` counts from 1 within the request and is given by the queue (0 before); `at` is Unix seconds;
    `step` of `steps` is set on progress.
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
