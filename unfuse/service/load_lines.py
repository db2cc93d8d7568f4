"""Says line by line how far private workers are with loading, for a program that has no terminal of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

from typing_extensions import override

from unfuse.service.loading import Loading

EVERY_S = 5.0  # seconds between two lines
LOOK_S = 0.2  # seconds between two looks whether everything is loaded


class LoadLines(AbstractContextManager["LoadLines"]):
    """While it is open, `say` gets a line at once, every few seconds, and when all workers have loaded `model`."""

    def __init__(
        self, model: str, loading: Loading, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._model, self._loading, self._say, self._clock = model, loading, say, clock
        self._began = self._said_at = clock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unfuse-loading", daemon=True)

    @override
    def __enter__(self) -> Self:
        self._say(str(self._loading))
        self._thread.start()
        return self

    @override
    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def look(self) -> bool:
        """Say how far loading is, if a line is due. Returns whether there may be more to say."""
        now, state = self._clock(), str(self._loading)
        if not state:
            self._say(f"{self._model} is ready in {now - self._began:.0f} s")
            return False
        if now - self._said_at >= EVERY_S:
            self._say(f"{state} ({now - self._began:.0f} s)")
            self._said_at = now
        return True

    def _run(self) -> None:
        is_closed = False
        while self.look() and not is_closed:
            is_closed = self._closed.wait(LOOK_S)
