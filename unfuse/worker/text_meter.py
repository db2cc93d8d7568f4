"""Tells a worker's parent, now and then, what its compute process has of texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from unfuse.core.text import TextLoad
from unfuse.stages.base import HasTexts, SteppedStage
from unfuse.worker.compute_messages import TextsHeld

TELL_S = 0.25
"""The least seconds between two messages of a process that works; one that will wait tells what is left at once."""


class TextMeter:
    """Sends what the stages of one process have together, where that is news."""

    def __init__(self, stages: Iterable[SteppedStage[Any]], send: Callable[[TextsHeld], object]) -> None:
        found = (stage.texts for stage in stages)
        self._all: list[HasTexts] = [*{id(texts): texts for texts in found if texts is not None}.values()]
        self._send, self._told, self._at = send, TextsHeld(TextLoad(), 0), 0.0
        self._retracted = 0

    def tell(self, busy: bool) -> None:
        """Tell it, if it is time; a process that is not `busy` will do nothing until it gets a task."""
        now = time.monotonic()
        if not self._all or (busy and now - self._at < TELL_S):
            return
        retracted = sum(texts.retracted for texts in self._all)
        held = TextsHeld(sum((texts.load() for texts in self._all), TextLoad()), retracted - self._retracted)
        if held != self._told or held.retracted:
            self._send(held)
        self._told, self._at, self._retracted = held, now, retracted
