"""The terminal of a verb: progress stays in one place, and everything else is written above it."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.text import Text
from typing_extensions import override

from unfuse.core.request import Event
from unfuse.service.groups import LogSettings
from unfuse.service.logs import Logs

Status = Callable[[], object]  # returns what goes on, in a few words; "" if there is nothing to show


class LockedConsole(Console):
    """A console on which one thread draws at a time.

    `rich.live.Live` moves the cursor up by the height of what was drawn last, and only then renders what is below. Two
    threads that do so at once move it by the same height, and leave lines behind.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._drawing = threading.RLock()

    @override
    def __enter__(self) -> Self:
        self._drawing.acquire()
        super().__enter__()
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)  # writes what was drawn
        finally:
            self._drawing.release()


class Terminal(Logs):
    """Standard error of a verb, and what was said of it; `flags` are the settings that flags gave."""

    def __init__(
        self, log: LogSettings | None = None, usual: str = "warning", *, quiet: bool = False,
        flags: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(log, usual, quiet=quiet)
        self.flags = flags or {}
        self.wrote_at = time.monotonic()  # the time at which something was last written
        self.draws = False  # whether progress is being drawn, above which everything else goes

    @cached_property
    def console(self) -> Console:
        """Standard error for what has colours and moves."""
        return LockedConsole(stderr=True, highlight=False)

    def write(self, text: str) -> int:
        """Write whole lines, above the progress that is shown."""
        self.wrote_at = time.monotonic()
        if not self.draws:
            return super().write(text)
        with suppress(OSError, ValueError):
            self.console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
        return len(text)


class ProgressDisplay(AbstractContextManager["ProgressDisplay"], Protocol):
    """What is shown while it is open: what goes on now, and the stages of a request."""

    status: Status

    @abstractmethod
    def show(self, event: Event) -> None:
        """Handle the next event of a request."""

    def close(self) -> None:
        """Show nothing from now on."""
        self.__exit__(None, None, None)


def retried(event: Event) -> str:
    """Why a stage runs again."""
    return f"{event.stage}: {event.message or 'trying again'}"
